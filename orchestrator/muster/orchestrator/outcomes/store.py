"""The outcomes that validators handed in, by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from sqlalchemy import BindParameter, bindparam, select
from sqlalchemy.dialects.postgresql import insert

from muster.chain import BatchView
from muster.orchestrator.db.database import Database
from muster.orchestrator.db.query import Query, Statement, columns
from muster.orchestrator.db.tables import outcomes
from muster.protocol.ids import Address, Hash32

_LONGEST = 512
"""Batches in one statement: SQLite limits its variables."""


@dataclass(frozen=True, slots=True)
class OutcomesRow:
    """One validator's signed outcomes of one batch."""

    batch_id: int
    validator: Address
    records: bytes
    """The packed records."""
    signature: bytes
    received_at: int
    """Chain time at which they were received; 0 when that was lost with a database."""
    batch_root: Hash32

    def is_of(self, batch: BatchView) -> bool:
        """Return whether they are of this batch, not of one that a reorganisation replaced."""
        return self.batch_root == batch.root


_OUTCOMES = select(*columns(outcomes, OutcomesRow))
handed_in_by = Query(
    _OUTCOMES.where(
        outcomes.c.batch_id == bindparam("batch_id"),
        outcomes.c.validator == bindparam("validator"),
    )
)
"""A `validator`'s outcomes of a batch: OutcomesRows."""
_row = insert(outcomes).values({each.name: bindparam(each.name) for each in outcomes.c})
_KEEP = Query(
    _row.on_conflict_do_update(
        index_elements=["batch_id", "validator"],
        set_={
            name: _row.excluded[name]
            for name in ("records", "signature", "received_at", "batch_root")
        },
    )
)


def keep(row: OutcomesRow) -> Statement:
    """Write a validator's outcomes down, in place of earlier ones."""
    return _KEEP(**asdict(row))


@lru_cache
def _of_batches(count: int) -> Query:
    ids: list[BindParameter[int]] = [bindparam(f"id_{number}") for number in range(count)]
    return Query(_OUTCOMES.where(outcomes.c.batch_id.in_(ids)))


async def outcomes_of(database: Database, batches: Sequence[BatchView]) -> list[OutcomesRow]:
    """Return all outcomes that were handed in for these batches."""
    by_id = {batch.batch_id: batch for batch in batches}
    wanted, found = list(by_id), list[OutcomesRow]()
    for start in range(0, len(wanted), _LONGEST):
        ids = _padded(wanted[start : start + _LONGEST])
        values = {f"id_{number}": batch_id for number, batch_id in enumerate(ids)}
        [rows] = await database.search(_of_batches(len(ids))(**values))
        found += [OutcomesRow(*row) for row in rows]
    return [row for row in found if row.is_of(by_id[row.batch_id])]


def _padded(ids: Sequence[int]) -> list[int]:
    """Return ids, the last one repeated up to a power of two.

    A list of another length is another statement, and every connection keeps the newest hundred.
    """
    length = 1 << (len(ids) - 1).bit_length()
    return [*ids, *[ids[-1]] * (length - len(ids))]
