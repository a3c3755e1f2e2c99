"""The life cycle of workers: what the chain says of them, and when their nodes were last heard.

    registered ─▶ discovered ──heard──▶ active ──silent──▶ unhealthy ──silent──▶ dead
                      ▲                   ▲ ▲                  │                  │
                      │                   │ └──────heard───────┘                  │
                   freed                  └───────────────heard───────────────────┘
                      │
        jailed · exiting · banned  ◀── from any state, as the chain says; deaf to heartbeats

Nothing of it is stored: a worker's state follows from its standing on chain and from its node's
last heartbeat, so that every replica and every restart comes to the same. What is heard before a
standing began says nothing about it: who was freed, or registered, is discovered until it speaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from enum import StrEnum

from muster.chain import MemberView, WorkerStatus
from muster.orchestrator.services.heartbeats import Heartbeat
from muster.protocol.ids import Address

UNHEALTHY_SHARE = 4
"""A worker is unhealthy after this part of the time after which it is dead."""


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    DISCOVERED = "discovered"
    """It may work and was not heard of since it may."""
    ACTIVE = "active"
    """It was heard of lately."""
    UNHEALTHY = "unhealthy"
    """It misses heartbeats."""
    DEAD = "dead"
    """It was silent for so long that its slots are given to others."""
    JAILED = "jailed"
    """It may not work for some time."""
    EXITING = "exiting"
    """It is leaving."""
    BANNED = "banned"
    """It may not work any more."""


class LifeEvent(StrEnum):
    """What moves a worker from one state to another."""

    HEARD = "heard"
    """Its node sent a heartbeat."""
    MISSED = "missed"
    """It was silent for the time that makes it unhealthy."""
    LOST = "lost"
    """It was silent for the time that makes it dead."""
    FREED = "freed"
    """The chain says Active: registered, out of jail, acquitted or back."""
    JAILED = "jailed"
    """The chain says Jailed."""
    LEFT = "left"
    """The chain says Exiting."""
    BANNED = "banned"
    """The chain says Banned."""


_STANDINGS = {
    LifeEvent.JAILED: WorkerState.JAILED,
    LifeEvent.LEFT: WorkerState.EXITING,
    LifeEvent.BANNED: WorkerState.BANNED,
}
_BY_STATUS = {
    WorkerStatus.JAILED: WorkerState.JAILED,
    WorkerStatus.EXITING: WorkerState.EXITING,
    WorkerStatus.BANNED: WorkerState.BANNED,
}
_SILENCES = {
    (WorkerState.ACTIVE, LifeEvent.MISSED): WorkerState.UNHEALTHY,
    (WorkerState.ACTIVE, LifeEvent.LOST): WorkerState.DEAD,
    (WorkerState.UNHEALTHY, LifeEvent.LOST): WorkerState.DEAD,
}


def next_state(state: WorkerState, event: LifeEvent) -> WorkerState:
    """Return the state after an event; one that says nothing new changes nothing."""
    if event in _STANDINGS:
        return _STANDINGS[event]
    is_barred = state in _STANDINGS.values()
    if event is LifeEvent.FREED:
        return WorkerState.DISCOVERED if is_barred else state
    if event is LifeEvent.HEARD:
        return state if is_barred else WorkerState.ACTIVE
    return _SILENCES.get((state, event), state)


def state_of(
    status: WorkerStatus, since: int, seen_at: int | None, now: float, dead_after_s: int
) -> WorkerState:
    """Return the state to which all events until now have led.

    `since` is when the status began, `seen_at` when the node was heard of last, Unix seconds.
    """
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if seen_at is None or seen_at < since:
        return WorkerState.DISCOVERED
    silence_s = now - seen_at
    if silence_s >= dead_after_s:
        return WorkerState.DEAD
    is_late = silence_s >= dead_after_s / UNHEALTHY_SHARE
    return WorkerState.UNHEALTHY if is_late else WorkerState.ACTIVE


class Lives:
    """The states of all workers, as of now."""

    def __init__(
        self,
        workers: Callable[[], Mapping[Address, MemberView]],
        heartbeats: Mapping[Address, Heartbeat],
        *,
        dead_after_s: int,
        clock: Callable[[], float],
    ) -> None:
        """`workers` are looked up anew each time: a reorganisation replaces them."""
        self._workers = workers
        self._heartbeats = heartbeats
        self._dead_after_s = dead_after_s
        self._clock = clock

    def state(self, worker: MemberView) -> WorkerState:
        """Return a worker's state."""
        beat = self._heartbeats.get(worker.node)
        return state_of(
            worker.status,
            worker.status_since,
            None if beat is None else beat.seen_at,
            self._clock(),
            self._dead_after_s,
        )

    def counts(self) -> Counter[WorkerState]:
        """Return how many workers are in each state."""
        return Counter(self.state(worker) for worker in self._workers().values())
