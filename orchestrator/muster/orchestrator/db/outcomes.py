"""What validators handed in, by batch."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from muster.chain import BatchView
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.models import OutcomesRow

_LONGEST = 512
"""Batches in one statement: SQLite limits its variables."""


async def outcomes_of(database: Database, batches: Sequence[BatchView]) -> list[OutcomesRow]:
    """Return all outcomes that were handed in for these batches."""
    by_id = {batch.batch_id: batch for batch in batches}
    wanted = list(by_id)
    found: list[OutcomesRow] = []
    async with database.read() as session:
        for start in range(0, len(wanted), _LONGEST):
            ids = _padded(wanted[start : start + _LONGEST])
            found += await session.scalars(select(OutcomesRow).where(OutcomesRow.batch_id.in_(ids)))
    return [row for row in found if row.is_of(by_id[row.batch_id])]


def _padded(ids: Sequence[int]) -> list[int]:
    """Return ids, the last one repeated up to a power of two.

    A list of another length is another statement, and every connection keeps the newest hundred.
    """
    length = 1 << (len(ids) - 1).bit_length()
    return [*ids, *[ids[-1]] * (length - len(ids))]
