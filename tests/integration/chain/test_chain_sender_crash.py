"""A process that sends is killed at any moment: afterwards everything happened once, in order."""

import asyncio
import random
import signal
from pathlib import Path

import pytest
from sending import Order, Victims, act, actions, manual_anvil, mining, open_sender, pooled, until

from muster.chain.rpc import Rpc

OVERLAP = 6
"""Number of actions that a child repeats without knowing that they have happened."""


async def finish(victims: Victims, rpc: Rpc) -> int:
    """Let a last child do everything up to a few actions more; return how many there are."""
    done = len(await actions(rpc))
    last = done + OVERLAP
    async with mining(rpc):
        await victims.start(Order(max(done - OVERLAP, 0), last))
        assert await victims.ended() == 0
    return last


@pytest.mark.parametrize(
    "moments",
    [
        [(number, number % 2 == 0) for number in range(1, 12)],
        pytest.param(
            [(number, dies_after) for number in range(1, 12) for dies_after in (False, True)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["before or after each", "before and after each"],
)
async def test_series_is_exact_wherever_between_two_requests_its_process_dies(
    tmp_path: Path, moments: list[tuple[int, bool]]
) -> None:
    async with manual_anvil() as (anvil, rpc), Victims(anvil.rpc_url, tmp_path / "j") as victims:
        # One send asks for the count, the estimate, the sending, and the receipt until it is there.
        for request_number, dies_after in moments:
            done = len(await actions(rpc))
            order = Order(max(done - 1, 0), done + 200, request_number, dies_after)
            async with mining(rpc):
                await victims.start(order)
                assert await victims.ended() == -signal.SIGKILL
        last = await finish(victims, rpc)
        assert await actions(rpc) == list(range(last))


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.slow)])
async def test_series_is_exact_after_kills_at_random_moments(tmp_path: Path, kills: int) -> None:
    moments = random.Random(kills)
    killed = 0
    async with manual_anvil() as (anvil, rpc), Victims(anvil.rpc_url, tmp_path / "j") as victims:
        while killed < kills:
            done = len(await actions(rpc))
            pid = await victims.start(Order(max(done - OVERLAP, 0), done + 200))
            async with mining(rpc, pause_s=moments.choice([0.002, 0.01, 0.05])):
                await asyncio.sleep(moments.uniform(0.0, 0.15))
                assert await victims.kill(pid) == -signal.SIGKILL
            killed += 1
            if moments.random() < 0.4:
                # The node is restarted as well, and forgets what it had not mined.
                await rpc.call("anvil_dropAllTransactions")
        last = await finish(victims, rpc)
        assert await actions(rpc) == list(range(last))


async def test_killed_process_has_its_transactions_mined_without_it(tmp_path: Path) -> None:
    async with manual_anvil() as (anvil, rpc), Victims(anvil.rpc_url, tmp_path / "j") as victims:
        pid = await victims.start(Order(0, 1))

        async def is_pooled() -> bool:
            return bool(await pooled(rpc))

        await until(is_pooled)
        await victims.kill(pid)
        sent = await pooled(rpc)
        await rpc.call("evm_mine")
        sender = await open_sender(rpc, tmp_path / "j")
        assert await act(sender, 0) in sent.values()
        assert await actions(rpc) == [0]
        sender.close()
