"""The life cycle of workers: what the chain says of them, and when their nodes were last heard.

    registered ─▶ discovered ──heard──▶ active ──silent──▶ unhealthy ──silent──▶ dead
                      ▲                   ▲ ▲                  │                  │
                      │                   │ └──────heard───────┘                  │
                   freed                  └───────────────heard───────────────────┘
                      │
        jailed · exiting · banned  ◀── from any state, as the chain says; deaf to heartbeats

Two words are kept apart: the *status* of a worker is what the chain says (Active, Jailed, Exiting,
Banned), its *state* is what the orchestrator makes of that and of heartbeats. A worker of status
Active may work; it is in the state `active` while it is also heard of.

Nothing of it is stored: a worker's state follows from its standing on chain and from its node's
last heartbeat, so that every replica and every restart comes to the same. A heartbeat from
before a standing says nothing about it: a worker that was freed, or registered, is discovered until
it speaks.
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


HEARD = frozenset({WorkerState.ACTIVE, WorkerState.UNHEALTHY})
"""States of those that may work and were heard of lately."""


_BY_STATUS = {
    WorkerStatus.JAILED: WorkerState.JAILED,
    WorkerStatus.EXITING: WorkerState.EXITING,
    WorkerStatus.BANNED: WorkerState.BANNED,
}


def state_of(
    status: WorkerStatus, since: int, seen_at: int | None, now: float, dead_after_s: int
) -> WorkerState:
    """Return the state of a worker.

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


CLOCK_SKEW_S = 30
"""How far the clocks of two replicas may be apart."""

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
    """The node's last words about itself. Nothing here is verified."""

    policy_version: PolicyVersion | None
    """The policy it has loaded."""
    state: str
    """What it does."""
    software: str
    """Its software and version."""
    seen_at: int
    """Wall clock."""


class Heartbeats:
    """The last heartbeat of every node. Only registered nodes get here: the chain bounds it."""

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
        """Read what was heard before the start, or by other replicas since the last time."""
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
