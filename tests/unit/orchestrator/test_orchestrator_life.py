"""The life cycle of workers: every state by every event, and what follows from each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import NOW, RUN, Network

from muster.api import Lease
from muster.chain import WorkerStatus
from muster.orchestrator.services.life import (
    LifeEvent,
    WorkerState,
    next_state,
    state_of,
)
from muster.protocol.encoding import keccak
from muster.protocol.recipe import TrainingRecipe

S, E = WorkerState, LifeEvent
DISC, ACT, UNH, DEAD = S.DISCOVERED, S.ACTIVE, S.UNHEALTHY, S.DEAD
JAIL, EXIT, BAN = S.JAILED, S.EXITING, S.BANNED
TABLE = {
    #     heard missed lost  freed jailed left  banned
    DISC: (ACT, DISC, DISC, DISC, JAIL, EXIT, BAN),
    ACT: (ACT, UNH, DEAD, ACT, JAIL, EXIT, BAN),
    UNH: (ACT, UNH, DEAD, UNH, JAIL, EXIT, BAN),
    DEAD: (ACT, DEAD, DEAD, DEAD, JAIL, EXIT, BAN),
    JAIL: (JAIL, JAIL, JAIL, DISC, JAIL, EXIT, BAN),
    EXIT: (EXIT, EXIT, EXIT, DISC, JAIL, EXIT, BAN),
    BAN: (BAN, BAN, BAN, DISC, JAIL, EXIT, BAN),
}
CASES = [
    (state, event, after)
    for state, row in TABLE.items()
    for event, after in zip(LifeEvent, row, strict=True)
]
DEAD_AFTER_S = 120


def test_table_is_of_every_state_and_every_event() -> None:
    assert len(CASES) == len(WorkerState) * len(LifeEvent) == 49


@pytest.mark.parametrize(("state", "event", "after"), CASES)
def test_every_event_in_every_state(
    state: WorkerState, event: LifeEvent, after: WorkerState
) -> None:
    assert next_state(state, event) is after
    assert next_state(after, event) is after, "the same event again changes nothing"


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


CHAIN_SAYS = {
    E.FREED: WorkerStatus.ACTIVE,
    E.JAILED: WorkerStatus.JAILED,
    E.LEFT: WorkerStatus.EXITING,
    E.BANNED: WorkerStatus.BANNED,
}
happenings = st.lists(
    st.tuples(st.integers(1, 200), st.sampled_from([E.HEARD, E.HEARD, None, *CHAIN_SAYS])),
    max_size=20,
)


@given(happenings)
def test_what_is_derived_is_where_the_events_lead(
    happened: list[tuple[int, LifeEvent | None]],
) -> None:
    now, since, seen_at = NOW, NOW, None
    state, status = S.DISCOVERED, WorkerStatus.ACTIVE
    for pause_s, event in happened:
        now += pause_s
        # Silence comes to light before what ends it.
        silence_s = 0 if seen_at is None else now - seen_at
        if silence_s >= DEAD_AFTER_S / 4:
            state = next_state(state, E.MISSED)
        if silence_s >= DEAD_AFTER_S:
            state = next_state(state, E.LOST)
        if event in CHAIN_SAYS and CHAIN_SAYS[event] is not status:
            status, since = CHAIN_SAYS[event], now
            state = next_state(state, event)
        if event is E.HEARD and status is WorkerStatus.ACTIVE:
            seen_at = now
            state = next_state(state, event)
        assert state_of(status, since, seen_at, now, DEAD_AFTER_S) is state


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
    # Its ticket is good until its deadline: it may have worked on, unheard.
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
    bench.services.leases._dead_known_at = float("-inf")


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
