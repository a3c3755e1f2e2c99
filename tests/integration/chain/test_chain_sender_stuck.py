"""Transactions that Anvil does not mine, forgets, or was given by another program."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
from sending import (
    CHAIN_ID,
    KEY,
    TARGET,
    act,
    actions,
    data_of,
    manual_anvil,
    mining,
    open_sender,
    pooled,
    until,
)

from muster.app.anvil import Anvil
from muster.chain import SendPolicy, TransactionSender
from muster.chain.outgoing import Fees, UnsignedTransaction
from muster.chain.rpc import Rpc
from muster.protocol.encoding import hex0x

PATIENT = SendPolicy(first_poll_s=0.002, longest_poll_s=0.02, bump_after_s=30, give_up_after_s=20)
GWEI = 10**9


@pytest.fixture
async def chain() -> AsyncIterator[tuple[Anvil, Rpc]]:
    async with manual_anvil() as opened:
        yield opened


def is_pooled(rpc: Rpc, *nonces: int) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return set(nonces) <= set(await pooled(rpc))

    return holds


async def started(sender: TransactionSender, rpc: Rpc, count: int) -> list[asyncio.Task[str]]:
    """Start actions 0, 1, 2 …; return their tasks once all are in the pool."""
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(act(sender, number)))
        await until(is_pooled(rpc, number))
    return tasks


def foreign(nonce: int, number: int, fee_gwei: int = 100) -> str:
    """Return what another program with the same key would send."""
    fees = Fees(fee_gwei * GWEI, GWEI)
    unsigned = UnsignedTransaction(CHAIN_ID, nonce, TARGET, data_of(number), 50_000, fees)
    return hex0x(unsigned.signed(KEY).raw)


async def test_transaction_below_a_risen_base_fee_is_replaced_and_mined_once(
    chain: tuple[Anvil, Rpc],
) -> None:
    _, rpc = chain
    (sending,) = await started(await open_sender(rpc), rpc, 1)
    first = (await pooled(rpc))[0]
    # Fifty times its maximum offer; steps of 1.25 would never get there.
    await rpc.call("anvil_setNextBlockBaseFeePerGas", hex(150 * GWEI))
    await rpc.call("evm_mine")
    assert await actions(rpc) == []
    async with mining(rpc):
        assert await sending != first
    assert await actions(rpc) == [0]


async def test_gap_that_cancelled_tasks_leave_is_closed_by_the_one_behind_it(
    chain: tuple[Anvil, Rpc],
) -> None:
    _, rpc = chain
    tasks = await started(await open_sender(rpc, policy=PATIENT), rpc, 4)
    sent = await pooled(rpc)
    for task in tasks[:3]:
        task.cancel()
    await asyncio.gather(*tasks[:3], return_exceptions=True)
    for nonce in (0, 2):
        await rpc.call("anvil_dropTransaction", sent[nonce])
    async with mining(rpc):
        assert await tasks[3] == sent[3]
    assert await actions(rpc) == [0, 1, 2, 3]


async def test_waiting_transaction_of_another_program_is_not_replaced(
    chain: tuple[Anvil, Rpc],
) -> None:
    anvil, rpc = chain
    stolen: list[str] = []

    async def rival(body: bytes) -> bytes:
        """Let the other program be faster, between our choice of a nonce and our sending."""
        if not stolen and "eth_sendRawTransaction" in str(json.loads(body)):
            stolen.append(await rpc.call("eth_sendRawTransaction", foreign(0, 99)))
        async with aiohttp.request(
            "POST", anvil.rpc_url, data=body, headers={"content-type": "application/json"}
        ) as response:
            return await response.read()

    sender = await open_sender(Rpc(anvil.rpc_url, post=rival), policy=PATIENT)
    sending = asyncio.create_task(act(sender, 0))
    await until(is_pooled(rpc, 0, 1))
    assert (await pooled(rpc))[0] == stolen[0]
    await rpc.call("evm_mine")
    await sending
    assert await actions(rpc) == [99, 0]


async def test_node_that_lost_its_pool_gets_all_of_it_again_in_order(
    chain: tuple[Anvil, Rpc],
) -> None:
    _, rpc = chain
    tasks = await started(await open_sender(rpc, policy=PATIENT), rpc, 5)
    sent = await pooled(rpc)
    await rpc.call("anvil_dropAllTransactions")
    await until(is_pooled(rpc, *range(5)))
    assert await pooled(rpc) == sent
    await rpc.call("evm_mine")
    await asyncio.gather(*tasks)
    assert await actions(rpc) == [0, 1, 2, 3, 4]


# ------------------------------------------------------------------------- reorg


async def mined(sender: TransactionSender, rpc: Rpc, count: int) -> list[str]:
    """Do actions 0, 1, 2 …, each in a block of its own."""
    hashes = []
    for number in range(count):
        task = asyncio.create_task(act(sender, number))
        await until(is_pooled(rpc, number))
        await rpc.call("evm_mine")
        hashes.append(await task)
    return hashes


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("method", ["anvil_reorg", "anvil_rollback"])
async def test_actions_that_a_reorg_took_back_happen_again_before_the_next(
    chain: tuple[Anvil, Rpc], method: str, depth: int
) -> None:
    _, rpc = chain
    sender = await open_sender(rpc)
    await mined(sender, rpc, 5)
    await rpc.call(method, depth, *([[]] if method == "anvil_reorg" else []))
    assert await actions(rpc) == list(range(5 - depth))
    async with mining(rpc):
        await act(sender, 5)
    assert await actions(rpc) == [0, 1, 2, 3, 4, 5]


async def test_action_is_not_repeated_when_the_reorg_keeps_it(chain: tuple[Anvil, Rpc]) -> None:
    _, rpc = chain
    sender = await open_sender(rpc)
    hashes = await mined(sender, rpc, 2)
    raws = await rpc.batch([("eth_getRawTransactionByHash", [tx]) for tx in hashes])
    # The same transactions, both in the first of the two new blocks.
    await rpc.call("anvil_reorg", 2, [[raw, 0] for raw in raws])
    assert await actions(rpc) == [0, 1]
    assert [await act(sender, number) for number in (0, 1)] == hashes
    assert await actions(rpc) == [0, 1]


async def test_action_is_done_anew_when_a_reorg_gave_its_nonce_to_another_program(
    chain: tuple[Anvil, Rpc],
) -> None:
    _, rpc = chain
    sender = await open_sender(rpc)
    await mined(sender, rpc, 1)
    await rpc.call("anvil_reorg", 1, [[foreign(0, 99), 0]])
    assert await actions(rpc) == [99]
    async with mining(rpc):
        await act(sender, 0)
    assert await actions(rpc) == [99, 0]


async def test_process_that_starts_after_a_reorg_sends_again_what_it_took_back(
    chain: tuple[Anvil, Rpc], tmp_path_factory: pytest.TempPathFactory
) -> None:
    _, rpc = chain
    path = tmp_path_factory.mktemp("journal") / "j"
    sender = await open_sender(rpc, path)
    hashes = await mined(sender, rpc, 3)
    sender.close()
    await rpc.call("anvil_reorg", 2, [])
    sender = await open_sender(rpc, path)
    async with mining(rpc):
        await sender.recover()
    assert await actions(rpc) == [0, 1, 2]
    assert await act(sender, 2) == hashes[2]
    sender.close()
