"""The orchestrator behind an endpoint that lies and fails, on a chain that reorganises."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from orchestrator_network import NODES, OWNER, TRAINER, Network, eventually, open_network, running

from muster.api import Lease
from muster.app.anvil import Anvil
from muster.chain import Chain, ChainView, EventReader, apply_poll
from muster.lab.endpoints.proxy import (
    RpcProxy,
    breaking_off,
    dropping,
    refusing,
    saying,
    sending,
    without_logs,
)
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ApiError, RpcError
from muster.protocol.messages import Submission

OWNER_ADDRESS = address_of(OWNER)
DEPTHS = range(1, 21)
"""Blocks that a reorganisation replaces."""


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    async with open_network(tmp_path, block_time_s=Anvil.STILL_S) as opened:
        opened.neighbour = await opened.open_run(replace(opened.config, orchestrator=OWNER_ADDRESS))
        # Deep reorganisations must not reach what the network stands on.
        await opened.chain.rpc.call("anvil_mine", hex(2 * max(DEPTHS)))
        yield opened


async def replayed(network: Network) -> ChainView:
    view = ChainView()
    apply_poll(view, await EventReader(network.chain).poll())
    return view


FAULTS = (
    refusing(429, retry_after="1"), refusing(503), dropping, breaking_off,
    sending(b"<html>"), sending(b"null"), sending(b"[" * 100_000),
)  # fmt: skip
LIES = (
    without_logs(), saying("eth_getLogs", {}), saying("eth_chainId", "0x1"),
    saying("eth_getBlockByNumber", None), saying("eth_getBlockByNumber", {"number": "0x1"}),
    saying("eth_getTransactionReceipt", {"status": "0x1"}), saying("eth_estimateGas", []),
    saying("eth_getTransactionCount", "0x"),
)  # fmt: skip


async def test_process_outlives_every_fault_and_the_run_goes_on(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.orchestrator.loop.RETRY_S", 0.02)
    async with RpcProxy(network.anvil.rpc_url) as proxy, running(network, rpc=proxy.url) as url:
        for number, fault in enumerate((*FAULTS, *LIES)):
            asked = proxy.http_requests

            async def is_asked(asked: int = asked) -> bool:
                return proxy.http_requests > asked

            lying = proxy.telling(fault) if fault in LIES else proxy.failing(fault, times=2)
            with lying:
                submission = await network.upload(url, number % 2, b"rows %d" % number)
                await eventually(is_asked)
            await network.until(url, submission, "committed")
            # One each: newcomers get no more tickets than their judged work allows.
            await network.judge(url, submission)
            await network.until(url, submission, "judged")
            await network.publish(number + 1)
    assert sum(b.count for b in (await replayed(network)).batches.values()) == number + 1


async def upload(
    network: Network, url: str, number: int, judge: Callable[[], Awaitable[bool]]
) -> Submission:
    """Upload as soon as there is a ticket: a reorganisation may have taken the policy back, and who
    has much that is not judged gets no other.
    """
    while True:
        try:
            return await network.upload(url, number % 2, b"rows %d" % number)
        except (AssertionError, ApiError):
            await judge()
            await asyncio.sleep(0.05)


async def neighbour_first(network: Network, depth: int, number: int) -> None:
    """Replace the newest blocks; then another run's batch is there before this one's come again."""
    await reorganise(network.chain, depth)
    assert network.neighbour is not None
    await network.chain.ledger.commit_batch(network.neighbour, keccak(b"%d" % number), 1, 1)


async def reorganise(chain: Chain, depth: int) -> None:
    """Replace the newest blocks by empty ones, once nothing is being mined."""
    async with asyncio.timeout(180):
        while int((await chain.rpc.call("txpool_status"))["pending"], 16):
            await asyncio.sleep(0.01)
    await chain.rpc.call("anvil_reorg", depth, [])


async def test_commitment_that_is_taken_back_before_it_was_read_is_made_again(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="muster.orchestrator")
    async with RpcProxy(network.anvil.rpc_url) as proxy, running(network, rpc=proxy.url) as url:
        # The newest block that is read is older than what is taken back: nothing tells of it.
        with proxy.failing(refusing(503), methods=["eth_getLogs"]):
            submission = await network.upload(url, 0, b"rows")

            async def is_committed() -> bool:
                return "batch committed" in caplog.messages

            await eventually(is_committed)
            await reorganise(network.chain, 1)
            assert (await replayed(network)).batches == {}
        await network.until(url, submission, "committed")


async def test_lease_whose_policy_moves_to_another_block_is_replaced(tmp_path: Path) -> None:
    async with open_network(tmp_path, block_time_s=Anvil.STILL_S) as network:
        async with running(network) as url, network.api(url, NODES[0]) as api:
            void = await api.lease(network.run_id)
            assert isinstance(void, Lease)
            await reorganise(network.chain, 1)
            await network.trainer.sender.recover()
            await network.chain.rpc.call("anvil_mine", "0x1")

            async def is_replaced() -> bool:
                lease = await api.lease(network.run_id)
                return isinstance(lease, Lease) and lease.ticket.beacon != void.ticket.beacon

            await eventually(is_replaced)
        async with running(network) as url:
            await network.until(url, await network.upload(url, 1, b"rows"), "committed")


async def test_batches_that_change_numbers_are_judged_under_the_new_ones(network: Network) -> None:
    async with RpcProxy(network.anvil.rpc_url) as proxy, running(network, rpc=proxy.url) as url:
        moved = await network.upload(url, 0, b"rows")
        await network.judge(url, moved)
        await network.until(url, moved, "judged")
        first = (await replayed(network)).batches[1]
        depth = await network.chain.block_number() - first.block_number + 1
        async with network.api(url, NODES[1]) as api:
            lease = await api.lease(network.run_id)
            assert isinstance(lease, Lease)
        with proxy.failing(refusing(503)):
            await reorganise(network.chain, depth)
            other = await network.submit_direct(url, lease, 1, b"others")
        await network.until(url, other, "committed")
        state = await network.until(url, moved, "committed")
        assert (first.batch_id, state.batch_id) == (1, 2)
        for submission in (other, moved):
            await network.judge(url, submission)
            await network.until(url, submission, "judged")


@pytest.mark.parametrize(
    ("seed", "reorganisations"),
    [(0, 3), *(pytest.param(seed, 20, marks=pytest.mark.slow) for seed in (1, 2))],
)
async def test_everything_is_committed_once_through_reorganisations_at_any_moment(
    network: Network, seed: int, reorganisations: int
) -> None:
    chance = random.Random(seed)
    depths = chance.sample(DEPTHS, reorganisations)
    async with (
        RpcProxy(network.anvil.rpc_url) as proxy,
        await Chain.connect(proxy.url, network.deployment, key=TRAINER) as network.trainer,
        running(network, rpc=proxy.url) as url,
    ):
        submissions: list[Submission] = []

        async def all_judged() -> bool:
            """Hand in outcomes of what is committed, and return whether nothing waits for any."""
            async with network.api(url, OWNER) as api:
                states = [await api.submission_state(each.file_hash) for each in submissions]
            for submission, state in zip(submissions, states, strict=True):
                if state.state == "committed":
                    # As validators do: outcomes undone by a reorganisation are handed in again.
                    with suppress(ApiError, AssertionError, RpcError, TimeoutError):
                        await asyncio.wait_for(network.judge(url, submission), 5)
            return all(state.state == "judged" for state in states)

        for number, depth in enumerate(depths):
            reorganisation = partial(reorganise, network.chain, depth)
            if chance.random() < 0.5:
                reorganisation = partial(neighbour_first, network, depth, number)
            happened = proxy.interrupt(reorganisation, after=chance.randrange(25))
            submissions.append(await upload(network, url, number, all_judged))
            await network.publish(number + 1)
            if chance.random() < 0.5:
                await all_judged()
            async with asyncio.timeout(180):
                await happened

        async def is_known() -> bool:
            """Whether the orchestrator's states equal those of a new reader of the chain."""
            batches = (await replayed(network)).batches.values()
            async with network.api(url, OWNER) as api:
                states = [await api.submission_state(each.file_hash) for each in submissions]
            places = {(state.batch_id, state.position) for state in states}
            own = [batch for batch in batches if batch.run_id == network.run_id]
            on_chain = {(b.batch_id, at) for b in own for at in range(b.count)}
            return places == on_chain and len(places) == len(submissions)

        await eventually(is_known)
        await eventually(all_judged)
