"""The outcomes that validators handed in, by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.chain import BatchView
from muster.orchestrator.db.database import Database
from muster.orchestrator.db.statements import Statement
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


def handed_in(condition: str, *values: object) -> Statement:
    """The handed-in outcomes that meet a condition: OutcomesRows."""
    return (
        "SELECT batch_id, validator, records, signature, received_at, batch_root FROM outcomes"
        f" WHERE {condition}",
        values,
    )


def keep(row: OutcomesRow) -> Statement:
    """Write a validator's outcomes down, in place of earlier ones."""
    return (
        "INSERT INTO outcomes (batch_id, validator, records, signature, received_at, batch_root)"
        " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (batch_id, validator) DO UPDATE SET"
        " records = excluded.records, signature = excluded.signature,"
        " received_at = excluded.received_at, batch_root = excluded.batch_root",
        (
            row.batch_id,
            row.validator,
            row.records,
            row.signature,
            row.received_at,
            row.batch_root,
        ),
    )


async def outcomes_of(database: Database, batches: Sequence[BatchView]) -> list[OutcomesRow]:
    """Return all outcomes that were handed in for these batches."""
    by_id = {batch.batch_id: batch for batch in batches}
    wanted, found = list(by_id), list[OutcomesRow]()
    for start in range(0, len(wanted), _LONGEST):
        ids = _padded(wanted[start : start + _LONGEST])
        marks = ", ".join("?" * len(ids))
        [rows] = await database.search(handed_in(f"batch_id IN ({marks})", *ids))
        found += [OutcomesRow(*row) for row in rows]
    return [row for row in found if row.is_of(by_id[row.batch_id])]


def _padded(ids: Sequence[int]) -> list[int]:
    """Return ids, the last one repeated up to a power of two.

    A list of another length is another statement, and every connection keeps the newest hundred.
    """
    length = 1 << (len(ids) - 1).bit_length()
    return [*ids, *[ids[-1]] * (length - len(ids))]
