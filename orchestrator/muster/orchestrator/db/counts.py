"""Counts that every lease needs. Written as SQL: composing them takes longer than running them.

Each is answered by an index alone.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncSession

from muster.protocol.ids import Address, Step

_OPEN_LEASES = text(
    "SELECT count(*) FROM leases"
    " WHERE is_filled = false AND deadline >= :now AND policy_version >= :oldest"
)
_UNFILLED_OF = text(
    "SELECT count(*) FROM leases"
    " WHERE worker = :worker AND is_filled = false AND deadline >= :since"
)
_WAITING = text("SELECT count(*) FROM submissions WHERE batch_root IS NULL")
_LAST_INDEX = text(
    "SELECT max(number) FROM ("
    'SELECT max("index") AS number FROM leases WHERE worker = :worker AND step = :step UNION ALL '
    'SELECT max("index") FROM submissions WHERE worker = :worker AND step = :step) AS numbers'
)


async def open_leases(session: AsyncSession, *, now: int, oldest: int) -> int:
    """Return how many tickets wait for their submission, of policies from `oldest` on."""
    return await _number(session, _OPEN_LEASES, now=now, oldest=oldest) or 0


async def unfilled_leases(session: AsyncSession, worker: Address, *, since: int) -> int:
    """Return how many tickets of a worker, due at `since` or later, wait for their submission."""
    return await _number(session, _UNFILLED_OF, worker=worker, since=since) or 0


async def waiting_submissions(session: AsyncSession) -> int:
    """Return how many submissions are in no batch."""
    return await _number(session, _WAITING) or 0


async def next_index(session: AsyncSession, worker: Address, step: Step) -> int:
    """Return the number after a worker's last slot of a step, as far as the database knows."""
    last = await _number(session, _LAST_INDEX, worker=worker, step=step)
    return 0 if last is None else last + 1


async def _number(session: AsyncSession, query: TextClause, **values: Any) -> int | None:
    number: int | None = await session.scalar(query, values)
    return number
