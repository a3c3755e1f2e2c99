"""Heartbeats: the latest sign of life of every node, in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sqlalchemy import select

from muster.orchestrator.db.direct import Statement
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.models import HeartbeatRow
from muster.protocol.ids import Address, PolicyVersion

CLOCK_SKEW_S = 30
"""How far the clocks of two replicas may be apart."""

_UPSERT = """
INSERT INTO heartbeats (node, policy_version, state, software, seen_at, count)
VALUES (?, ?, ?, ?, ?, 1)
ON CONFLICT (node) DO UPDATE SET
    policy_version = excluded.policy_version,
    state = excluded.state,
    software = excluded.software,
    seen_at = excluded.seen_at,
    count = heartbeats.count + 1
"""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a node last said of itself. Nothing here is verified."""

    policy_version: PolicyVersion | None
    """The policy it has loaded."""
    state: str
    """What it does."""
    software: str
    """Its software and version."""
    seen_at: int
    """Wall clock."""


class Heartbeats:
    """Who was heard of, and when. Only registered nodes get here, so it is bounded by the chain."""

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
        row = HeartbeatRow
        # Columns, not rows: replicas read those of all nodes, again and again.
        columns = select(row.node, row.policy_version, row.state, row.software, row.seen_at)
        async with self._database.read() as session:
            found = (await session.execute(columns.where(row.seen_at >= self._read_from))).all()
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
        return _UPSERT, (node, policy_version, state, software, heartbeat.seen_at)

    def _note(self, node: Address, heartbeat: Heartbeat) -> None:
        known = self._latest.get(node)
        if known is None or heartbeat.seen_at >= known.seen_at:
            self._latest[node] = heartbeat
