"""The life cycle of workers: the state that chain and heartbeats give, and what follows from it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import NOW, RUN, Network

from muster.api import Lease
from muster.chain import WorkerStatus
from muster.orchestrator.leases.life import WorkerState, state_of
from muster.protocol.encoding import keccak
from muster.protocol.recipe import TrainingRecipe

S = WorkerState
DEAD_AFTER_S = 120


@pytest.mark.parametrize(
    ("status", "seen_at", "state"),
    [
        (WorkerStatus.ACTIVE, None, S.DISCOVERED),
        (WorkerStatus.ACTIVE, NOW - 1001, S.DISCOVERED),
        (WorkerStatus.ACTIVE, NOW - 29, S.ACTIVE),
        (WorkerStatus.ACTIVE, NOW + 5, S.ACTIVE),
        (WorkerStatus.ACTIVE, NOW - 30, S.UNHEALTHY),
        (WorkerStatus.ACTIVE, NOW - 119, S.UNHEALTHY),
        (WorkerStatus.ACTIVE, NOW - 120, S.DEAD),
        (WorkerStatus.JAILED, NOW, S.JAILED),
        (WorkerStatus.EXITING, None, S.EXITING),
        (WorkerStatus.BANNED, NOW, S.BANNED),
    ],
)
def test_state_follows_from_chain_and_heartbeat(
    status: WorkerStatus, seen_at: int | None, state: WorkerState
) -> None:
    assert state_of(status, NOW - 1000, seen_at, NOW, DEAD_AFTER_S) is state


# In the orchestrator


async def beat(bench: Bench, node: int) -> None:
    async with bench.node(node) as api:
        await api.heartbeat(RUN, policy_version=None, state="idle", software="muster")


async def lease(bench: Bench, node: int) -> bool:
    async with bench.node(node) as api:
        return isinstance(await api.lease(RUN), Lease)


@pytest.fixture
async def narrow(tmp_path: Path) -> AsyncIterator[Bench]:
    """There is work for one worker at a time."""
    training = TrainingRecipe(steps=1, submissions_per_step=1, max_async_level=0)
    async with open_bench(tmp_path, Network(training=training)) as opened:
        yield opened


async def test_slot_of_a_dead_worker_is_given_to_another(narrow: Bench) -> None:
    bench = narrow
    await beat(bench, 0)
    assert await lease(bench, 0)
    assert not await lease(bench, 1)
    bench.wall.time += DEAD_AFTER_S
    forget_who_is_dead(bench)
    assert await lease(bench, 1)
    # Its ticket is valid until its deadline: it may have gone on working in silence.
    await beat(bench, 0)
    forget_who_is_dead(bench)
    assert await lease(bench, 0)
    assert not await lease(bench, 2)


async def test_slot_of_a_silent_worker_that_never_beat_is_kept_until_its_deadline(
    narrow: Bench,
) -> None:
    bench = narrow
    assert await lease(bench, 0)
    bench.wall.time += 10 * DEAD_AFTER_S
    forget_who_is_dead(bench)
    assert not await lease(bench, 1)
    bench.set_chain_time(bench.network.chain.time + 61)
    assert await lease(bench, 1)


def forget_who_is_dead(bench: Bench) -> None:
    bench.services.leases._holders_known_at = float("-inf")


async def test_states_are_shown(bench: Bench) -> None:
    await beat(bench, 0)
    bench.network.apply(
        "WorkerRegistry", "WorkerBanned",
        run_id=RUN, worker=bench.network.worker(1).address, escrow_id=keccak(b"offence"),
    )  # fmt: skip
    status = await bench.services.status.build()
    shown = {w.worker_id: (w.status, w.life) for w in status.workers}
    assert shown == {1: ("active", "active"), 2: ("banned", "banned"), 3: ("active", "discovered")}
    assert bench.services.lives.counts() == {S.ACTIVE: 1, S.BANNED: 1, S.DISCOVERED: 1}
    bench.wall.time += DEAD_AFTER_S
    assert bench.services.lives.counts() == {S.DEAD: 1, S.BANNED: 1, S.DISCOVERED: 1}


async def test_freed_worker_is_discovered_until_it_speaks(bench: Bench) -> None:
    worker = bench.network.worker(0)
    await beat(bench, 0)
    about = {"run_id": RUN, "worker": worker.address}
    bench.network.apply(
        "WorkerRegistry", "WorkerJailed", until=NOW + 9, escrow_id=keccak(b"offence"), **about
    )
    assert bench.services.lives.state(worker) is S.JAILED
    bench.network.chain.time += 50
    bench.network.apply("WorkerRegistry", "WorkerReturned", active_from=1, terms=1, **about)
    assert bench.services.lives.state(worker) is S.DISCOVERED
    bench.wall.time += 60
    await beat(bench, 0)
    assert bench.services.lives.state(worker) is S.ACTIVE
