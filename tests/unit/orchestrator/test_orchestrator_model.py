"""Random lives of an orchestrator: every submission is committed exactly once."""

import asyncio
import itertools
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from orchestrator_bench import PLACES, Bench, delete_database, open_bench
from orchestrator_fakes import RUN, Network, submission_for
from postgres_server import PostgresServer

from muster.api import Lease
from muster.protocol.errors import ChainUnreachable, ContractRevert
from muster.protocol.messages import Reason, Submission, Ticket, Verdict
from muster.protocol.recipe import TrainingRecipe

TRAINING = TrainingRecipe(submissions_per_step=2, max_async_level=1)

actions = st.lists(
    st.one_of(
        st.tuples(st.just("lease"), st.integers(0, 2)),
        st.tuples(st.just("upload"), st.integers(0, 2)),
        st.tuples(st.just("commit"), st.sampled_from(["mined", "refused", "lost", "unanswered"])),
        st.tuples(st.just("judge"), st.sampled_from([Verdict.ACCEPTED, Verdict.REJECTED])),
        st.tuples(st.just("wait"), st.sampled_from([1, 61])),
        st.tuples(st.just("publish"), st.just(0)),
        st.tuples(st.just("restart"), st.booleans()),
        st.tuples(st.just("reorg"), st.just(0)),
    ),
    max_size=25,
)


class Life:
    """One network, one folder, and all tickets and submissions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = Network(training=TRAINING)
        self.tickets: list[Ticket] = []
        self.received: list[Submission] = []
        self.bodies = (b"file %d" % n for n in itertools.count())
        self.starts = 0
        self.stack = AsyncExitStack()
        self.bench: Bench

    async def start(self) -> None:
        self.bench = await self.stack.enter_async_context(
            open_bench(self.folder, self.network, start_s=self.starts)
        )
        self.starts += 1

    async def restart(self, lose_database: bool) -> None:
        await self.stack.aclose()
        if lose_database:
            delete_database(self.folder)
        await self.start()

    async def lease(self, node: int) -> Ticket | None:
        async with self.bench.node(node) as api:
            lease = await api.lease(RUN)
        if not isinstance(lease, Lease):
            return None
        version = self.network.run.latest_version
        assert version is not None
        if lease.ticket not in self.tickets:
            assert lease.ticket.step - 1 - version <= TRAINING.max_async_level
            self.tickets.append(lease.ticket)
        return lease.ticket

    async def upload(self, node: int) -> None:
        ticket = await self.lease(node)
        if ticket is None:
            return
        body = next(self.bodies)
        submission = submission_for(ticket, body)
        async with self.bench.node(node) as api:
            await api.submit(submission, self.network.sign_submission(submission, node), body)
        self.received.append(submission)

    async def commit(self, fate: str) -> None:
        errors = {"refused": ContractRevert("LedgerPaused"), "lost": ChainUnreachable("no answer")}
        ledger = self.network.chain.ledger
        ledger.fail_next = errors.get(fate)
        ledger.lose_next = ChainUnreachable("no answer") if fate == "unanswered" else None
        await self.bench.commit()
        ledger.fail_next = ledger.lose_next = None

    async def judge(self, verdict: Verdict) -> None:
        unjudged = self.bench.services.projection.unjudged
        if not unjudged:
            return
        async with self.bench.api() as api:
            batch = await api.batch(unjudged[0].batch_id)
        reason = Reason.NONE if verdict is Verdict.ACCEPTED else Reason.SCHEMA
        submissions = [entry.submission for entry in batch.submissions]
        await self.bench.judge(batch.batch_id, submissions, verdict, reason)
        await self.bench.record()

    async def wait(self, seconds: int) -> None:
        self.bench.set_chain_time(self.network.chain.time + seconds)

    async def publish(self, _: int) -> None:
        self.network.publish((self.network.run.latest_version or 0) + 1)
        await self.bench.follow()

    async def reorg(self, _: int) -> None:
        """The newest commitment is taken back, unless a later block exists."""
        view, chain = self.network.view, self.network.chain
        newest = view.batches.get(chain.ledger.batches)
        if newest is None or newest.block_number != chain.emit.block:
            return
        chain.ledger.batches -= 1
        chain.rewind_next = newest.block_number - 1
        await self.bench.follow()

    async def quiesce(self) -> None:
        while await self.bench.commit():
            pass

    def check(self) -> None:
        slots = Counter((s.worker, s.step, s.index) for s in self.received)
        assert set(slots.values()) <= {1}
        committed = Counter(stored.root for stored in self.bench.services.files.batches())
        on_chain = {b.root: b.count for b in self.network.view.batches.values()}
        assert set(on_chain) <= set(committed)
        assert len(on_chain) == len(self.network.view.batches)
        assert sum(on_chain.values()) == len(self.received)


@pytest.mark.sqlite_only
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(actions)
def test_every_submission_is_committed_exactly_once_whatever_happens(
    postgres: PostgresServer, kind: str, chosen: list[tuple[str, object]]
) -> None:
    async def live(folder: Path) -> None:
        life = Life(folder)
        await life.start()
        async with life.stack:
            for name, argument in chosen:
                await getattr(life, name)(argument)
            await life.quiesce()
            life.check()

    with tempfile.TemporaryDirectory() as folder:
        if kind == "postgresql":
            PLACES[Path(folder)] = postgres.create("empty")
        asyncio.run(live(Path(folder)))
        PLACES.pop(Path(folder), None)
