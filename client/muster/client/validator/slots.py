"""Which slots earlier batches fill: a slot settles once, in the first batch that names it.

Every validator must answer alike whenever it asks, so only batches before the one in question
count, whether or not their outcomes are on chain yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from muster.protocol.ids import Hash32
from muster.protocol.messages import OutcomeRecord

SlotOfWorker = tuple[int, int, int]
"""Worker id, step, index, within one run."""


class KnownBatch(NamedTuple):
    """A batch whose slots are known: from the chain, this validator's journal or its contents."""

    batch_id: int
    """The batch."""
    root: Hash32
    """The root it was committed with."""
    slots: tuple[SlotOfWorker, ...]
    """In batch order."""


class SlotIndex:
    """The first batch that fills each slot of a run."""

    def __init__(self) -> None:
        self._first: dict[SlotOfWorker, int] = {}
        self._roots: dict[int, Hash32] = {}

    def refresh(self, batches: Iterable[KnownBatch]) -> None:
        """Take in every known batch; after a reorganisation of the chain, start afresh."""
        current = {batch.batch_id: batch for batch in batches}
        for batch_id, root in self._roots.items():
            if batch_id not in current or current[batch_id].root != root:
                self._first.clear()
                self._roots.clear()
                break
        for batch in current.values():
            if batch.batch_id not in self._roots:
                self._take_in(batch)

    def is_used(self, slot: SlotOfWorker, *, before: int) -> bool:
        """Return whether a batch with a lower id than `before` fills the slot."""
        return self._first.get(slot, before) < before

    def _take_in(self, batch: KnownBatch) -> None:
        self._roots[batch.batch_id] = batch.root
        for slot in batch.slots:
            self._first[slot] = min(self._first.get(slot, batch.batch_id), batch.batch_id)


def slots_of_records(records: Iterable[OutcomeRecord]) -> tuple[SlotOfWorker, ...]:
    """Return the slots outcome records are about, in their order."""
    return tuple(slot_of_record(record) for record in records)


def slot_of_record(record: OutcomeRecord) -> SlotOfWorker:
    """Return the slot an outcome record is about."""
    return (record.worker_id, record.step, record.index)
