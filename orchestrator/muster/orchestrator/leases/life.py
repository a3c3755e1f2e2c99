"""The life cycle of workers: their status on chain, and the last heartbeats of their nodes.

    registered ─▶ discovered ──heard──▶ active ──silent──▶ unhealthy ──silent──▶ dead
                      ▲                   ▲ ▲                  │                  │
                      │                   │ └──────heard───────┘                  │
                   freed                  └───────────────heard───────────────────┘
                      │
        jailed · exiting · banned  ◀── from any state, by the chain; heartbeats are ignored

Two words differ: the *status* of a worker is on chain (Active, Jailed, Exiting, Banned); its
*state* follows from the status and from heartbeats. A worker of status Active may work; it is in
the state `active` while it also sends heartbeats.

The state is not stored: it follows from the status on chain and from the node's last heartbeat, so
that every replica and every restart computes the same. A heartbeat from before the current status
does not count: a worker that was just registered or freed is `discovered` until its next heartbeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import bindparam, literal_column, select

from muster.chain import MemberView, WorkerStatus
from muster.orchestrator.db import Database
from muster.orchestrator.db.query import Query, Statement, new_row
from muster.orchestrator.db.tables import heartbeats
from muster.protocol.ids import Address, PolicyVersion

UNHEALTHY_SHARE = 4
"""A worker is unhealthy after the time after which it is dead, divided by this."""


class WorkerState(StrEnum):
    """State of a worker."""

    DISCOVERED = "discovered"
    """It may work but has sent no heartbeat since."""
    ACTIVE = "active"
    """Its heartbeats arrive."""
    UNHEALTHY = "unhealthy"
    """It misses heartbeats."""
    DEAD = "dead"
    """It was silent for so long that its open tickets no longer count: others get as many."""
    JAILED = "jailed"
    """It may not work for some time."""
    EXITING = "exiting"
    """It is leaving."""
    BANNED = "banned"
    """It may not work any more."""


HEARD = frozenset({WorkerState.ACTIVE, WorkerState.UNHEALTHY})
"""States of workers that may work and sent a heartbeat recently."""
MAY_WORK = HEARD | {WorkerState.DISCOVERED}
"""States of workers that may work and did not fall silent."""


_BY_STATUS = {
    WorkerStatus.JAILED: WorkerState.JAILED,
    WorkerStatus.EXITING: WorkerState.EXITING,
    WorkerStatus.BANNED: WorkerState.BANNED,
}


def state_of(
    status: WorkerStatus, since: int, seen_at: int | None, now: float, dead_after_s: int
) -> WorkerState:
    """Return the state of a worker.

    `since` is when the status began, `seen_at` the time of the last heartbeat, in Unix seconds.
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
        """`workers` is called each time, because a reorganisation replaces the workers."""
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


CLOCK_SKEW_S = 30
"""Largest difference in seconds between the clocks of two replicas."""

_SAID = ("policy_version", "state", "software", "seen_at")
_row = new_row(heartbeats, "node", *_SAID)
_BEAT = Query(
    _row.values(count=literal_column("1")).on_conflict_do_update(
        index_elements=["node"],
        set_={
            **{name: _row.excluded[name] for name in _SAID},
            "count": heartbeats.c.count + literal_column("1"),
        },
    )
)
_SINCE = Query(
    select(*(heartbeats.c[name] for name in ("node", *_SAID))).where(
        heartbeats.c.seen_at >= bindparam("since")
    )
)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A node's last heartbeat. Nothing in it is verified."""

    policy_version: PolicyVersion | None
    """The policy it has loaded."""
    state: str
    """What the node is doing."""
    software: str
    """The node's software and version."""
    seen_at: int
    """Wall clock."""


class Heartbeats:
    """The last heartbeat of every node. Only registered nodes are stored, so the chain bounds the
    size."""

    def __init__(self, database: Database, *, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._latest: dict[Address, Heartbeat] = {}
        self._read_from = 0

    @property
    def latest(self) -> Mapping[Address, Heartbeat]:
        """The latest heartbeat by node."""
        return self._latest

    async def load(self) -> None:
        """Load heartbeats from before the start, or received by other replicas since the last
        call."""
        [found] = await self._database.search(_SINCE(since=self._read_from))
        for node, number, state, software, seen_at in found:
            version = None if number is None else PolicyVersion(number)
            self._note(Address(node), Heartbeat(version, state, software, seen_at))
            self._read_from = max(self._read_from, seen_at - CLOCK_SKEW_S)

    def beat(
        self, node: Address, policy_version: PolicyVersion | None, state: str, software: str
    ) -> Statement:
        """Note a heartbeat; returns the row to write together with the request's nonce."""
        heartbeat = Heartbeat(policy_version, state, software, int(self._clock()))
        self._note(node, heartbeat)
        return _BEAT(
            node=node,
            policy_version=policy_version,
            state=state,
            software=software,
            seen_at=heartbeat.seen_at,
        )

    def _note(self, node: Address, heartbeat: Heartbeat) -> None:
        known = self._latest.get(node)
        if known is None or heartbeat.seen_at >= known.seen_at:
            self._latest[node] = heartbeat
