"""Reorganisations made by Anvil: what is read afterwards equals a replay from genesis."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from chain_scenario import (
    HONEST,
    ORCHESTRATOR,
    OWNER,
    TRAINER,
    Person,
    Scenario,
    accepted,
    network,
    play,
    rejected,
)
from safetensors.torch import save_file

from muster.app.anvil import Anvil
from muster.chain import Chain, ChainView, Event, EventReader, Poll, apply_poll
from muster.chain.reader import LAG_POLLS
from muster.protocol.errors import ChainInconsistent, ContractRevert
from muster.protocol.ids import PolicyVersion
from muster.shardcast import ChunkStore
from muster.trainer.ports import ChainLedger, PolicyRoots
from muster.trainer.publish.publisher import Publisher


class Follower:
    """A reader, its view, and all events that the reader says still stand."""

    def __init__(self, net: Scenario) -> None:
        self._net = net
        self._reader = EventReader(net.of(OWNER))
        self.view = ChainView()
        self.events: list[Event] = []
        self.rewinds: list[int] = []

    async def poll(self) -> None:
        poll = await self._patient_poll()
        apply_poll(self.view, poll)
        if poll.rewound_to is not None:
            self.rewinds.append(poll.rewound_to)
            self.events = [e for e in self.events if e.block_number <= poll.rewound_to]
        self.events += poll.events

    async def _patient_poll(self) -> Poll:
        # At first a shorter chain is mistaken for an endpoint that lags.
        for _ in range(LAG_POLLS):
            with suppress(ChainInconsistent):
                return await self._reader.poll()
        return await self._reader.poll()

    async def check(self) -> None:
        """Poll, and compare with a new reader's view of the chain."""
        await self.poll()
        fresh = Follower(self._net)
        await fresh.poll()
        assert self.events == fresh.events
        assert figures(self.view) == figures(fresh.view)
        assert self.view.recent_blocks() == fresh.view.recent_blocks()

    def block_of(self, name: str) -> int:
        """Return the block of the first event of a name."""
        return next(e.block_number for e in self.events if e.name == name)


def figures(view: ChainView) -> Sequence[object]:
    """A view's whole content, in a form that can be compared."""
    return [value for name, value in sorted(vars(view).items()) if name != "_events"]


async def cut(net: Scenario, block: int, method: str = "anvil_reorg") -> None:
    """Take back a block and all after it; a reorg puts as many empty ones in their place."""
    depth = await net.of(OWNER).block_number() - block + 1
    await net.rpc.call(method, depth, *([[]] if method == "anvil_reorg" else []))


async def test_view_equals_a_replay_after_a_reorg_of_every_depth() -> None:
    async with network(block_time_s=Anvil.STILL_S) as net:
        follower = Follower(net)
        await follower.poll()
        before = await net.of(OWNER).block_number()
        await play(net)
        await follower.poll()
        counts = [len(follower.events)]
        blocks = sorted({e.block_number for e in follower.events if e.block_number > before})
        for block in reversed(blocks):
            await cut(net, block)
            await follower.check()
            counts.append(len(follower.events))
        # Each cut took back exactly one more block with events, down to the first one.
        assert counts == sorted(set(counts), reverse=True)
        assert len(follower.rewinds) == len(blocks) >= 7
        assert (follower.view.batches, follower.view.slashes) == ({}, [])


def timeless(args: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in args.items() if not name.endswith("_at")}


@pytest.mark.parametrize("method", ["anvil_reorg", "anvil_rollback"])
@pytest.mark.parametrize("name", ["BatchCommitted", "OutcomesPosted", "Slashed"])
async def test_what_a_reorg_took_back_is_sent_again_and_read_again(name: str, method: str) -> None:
    async with network(block_time_s=Anvil.STILL_S) as net:
        follower = Follower(net)
        await play(net)
        await follower.poll()
        lost = next(e for e in follower.events if e.name == name)
        await cut(net, lost.block_number, method)
        await follower.check()
        assert lost not in follower.events
        sender = net.of(ORCHESTRATOR).sender
        assert sender is not None
        await sender.recover()
        await follower.check()
        again = next(e for e in follower.events if e.name == name)
        # The same transaction in another block, whose time may be another.
        assert again.tx_hash == lost.tx_hash
        assert timeless(again.args) == timeless(lost.args)
        assert again.block_hash != lost.block_hash


async def test_view_equals_a_replay_when_the_new_blocks_say_something_else() -> None:
    async with network(block_time_s=Anvil.STILL_S) as net:
        follower = Follower(net)
        submission = net.submission(HONEST, 0)
        batch_id = await net.commit([submission])
        await follower.poll()
        snapshot = await net.rpc.call("evm_snapshot")
        await net.post(batch_id, [submission], [accepted(1, submission)])
        await follower.check()
        assert len(follower.view.training_stream(net.run_id)) == 1
        await net.rpc.call("evm_revert", snapshot)
        # Another process with the same key, which does not know the first one's transactions.
        async with await Chain.connect(
            net.anvil.rpc_url, net.deployment, key=ORCHESTRATOR.key
        ) as chain:
            net.chains[ORCHESTRATOR.address] = chain
            await net.post(batch_id, [submission], [rejected(1, submission)])
        await follower.check()
        assert follower.view.training_stream(net.run_id) == []


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_view_equals_a_replay_through_a_random_history(seed: int) -> None:
    chance = random.Random(seed)
    async with network(block_time_s=Anvil.STILL_S) as net:
        follower = Follower(net)
        for index in range(12):
            submission = net.submission(HONEST, index)
            try:
                batch_id = await net.commit([submission])
                if chance.random() < 0.7:
                    await net.post(batch_id, [submission], [accepted(1, submission)])
            except ContractRevert:
                # The transactions before it were sent again in other circumstances.
                pass
            if chance.random() < 0.5:
                await follower.poll()
            if chance.random() < 0.6:
                depth = chance.randint(1, 6)
                await cut(net, await net.of(OWNER).block_number() - depth + 1)
            if chance.random() < 0.5:
                await follower.check()
        await follower.check()
        assert follower.rewinds != []


async def test_reorg_deeper_than_what_is_remembered_is_read_from_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("muster.chain.reader.REMEMBERED_BLOCKS", 3)
    async with network(block_time_s=Anvil.STILL_S) as net:
        follower = Follower(net)
        before = await net.of(OWNER).block_number()
        await play(net)
        await follower.poll()
        await cut(net, before + 1)
        await follower.check()
        assert follower.rewinds == [net.deployment.deploy_block - 1]
        assert follower.view.batches == {}


@pytest.mark.parametrize(("confirmations", "seen"), [(0, [[0], [0, 1], [1, 0]]), (2, [[1, 0]])])
async def test_training_stream_keeps_its_order_as_far_as_it_is_confirmed(
    confirmations: int, seen: list[list[int]]
) -> None:
    async with network(block_time_s=Anvil.STILL_S) as net:
        submissions = [net.submission(HONEST, index) for index in (0, 1)]
        batches = [await net.commit([submission]) for submission in submissions]
        view, found = ChainView(), list[list[int]]()
        ledger = ChainLedger(view, net.run_id)
        reader = EventReader(net.of(OWNER), confirmations=confirmations)

        async def look() -> None:
            apply_poll(view, await reader.poll())
            await ledger.on_change([])
            stream = [item.record.index for item in ledger.stream()]
            if stream and [stream] != found[-1:]:
                found.append(stream)

        async def post(index: int, sender: Person) -> None:
            submission = submissions[index]
            await net.post(batches[index], [submission], [accepted(1, submission)], sender=sender)
            await look()

        await post(0, ORCHESTRATOR)
        await post(1, OWNER)
        await cut(net, await net.of(OWNER).block_number() - 1)
        for sender in (net.of(OWNER).sender, net.of(ORCHESTRATOR).sender):
            assert sender is not None
            await sender.recover()
            await look()
        await net.rpc.call("anvil_mine", hex(confirmations))
        await look()
        assert [stream for stream in found if stream != [1]] == seen


async def test_only_what_is_final_is_told_where_that_is_wanted() -> None:
    async with network(block_time_s=Anvil.STILL_S) as net:
        await net.commit([net.submission(HONEST, 0)])
        readers = {
            wanted: EventReader(net.of(OWNER), confirmations=wanted)
            for wanted in (0, "safe", "finalized")
        }
        told = {wanted: ChainView() for wanted in readers}

        async def batches() -> list[int]:
            for wanted, reader in readers.items():
                apply_poll(told[wanted], await reader.poll())
            return [len(view.batches) for view in told.values()]

        assert await batches() == [1, 0, 0]
        # Anvil calls blocks of one epoch (32 blocks) ago safe, and of two epochs ago final.
        for expected in ([1, 1, 0], [1, 1, 1]):
            await net.rpc.call("anvil_mine", hex(32))
            assert await batches() == expected


async def test_published_version_stays_on_chain_though_it_is_taken_back(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(4)}, policy / "model.safetensors")
    async with network(block_time_s=Anvil.STILL_S) as net:
        chain = net.of(TRAINER)
        policy_roots = PolicyRoots(chain, net.run_id)
        publisher = Publisher(
            ChunkStore(tmp_path / "store"),
            policy_roots,
            run_id=net.run_id,
            domain=chain.domain("RunRegistry"),
            key=TRAINER.key,
        )
        version = PolicyVersion(((await policy_roots.newest()) or 0) + 1)
        root = await publisher.publish(version, policy, 0, 2)
        await cut(net, await chain.block_number())
        assert await policy_roots.root_of(version) is None
        standing_by = asyncio.create_task(publisher.stand_by(every_s=0.05))
        async with asyncio.timeout(180):
            while await policy_roots.root_of(version) != root:
                await asyncio.sleep(0.05)
        standing_by.cancel()
