"""What a validator has signed: one set of records per batch, ever. Two would be equivocation.

A batch is a number and a root: after a reorganisation of the chain another may have the number.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.client.journal import Journal
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.ids import BatchName, Hash32, to_hash32
from muster.protocol.messages import OutcomeRecord, Outcomes, pack_records, unpack_records


@dataclass(frozen=True, slots=True)
class JudgedBatch:
    """The outcomes of one batch that were, or may have been, signed."""

    batch_id: int
    """The batch."""
    root: Hash32
    """The root it was committed with."""
    records: tuple[OutcomeRecord, ...]
    """In batch order."""

    @property
    def name(self) -> BatchName:
        """What tells the batch from every other."""
        return BatchName(self.batch_id, self.root)

    def packed(self) -> bytes:
        """Return the records as they go on chain."""
        return pack_records(list(self.records))

    def message(self) -> Outcomes:
        """Return what the validator signs."""
        return Outcomes(self.batch_id, self.root, keccak(self.packed()))


class OutcomeJournal(Journal):
    """Remembers the outcomes of every batch before they are signed."""

    def __init__(self, folder: Path) -> None:
        self._judged: dict[BatchName, JudgedBatch] = {}
        super().__init__(folder / "outcomes.jsonl")

    def take_in(self, entry: dict[str, Any]) -> None:
        """Remember the outcomes of a batch."""
        records = unpack_records(bytes.fromhex(entry["records"].removeprefix("0x")))
        judged = JudgedBatch(int(entry["batch_id"]), to_hash32(entry["root"]), tuple(records))
        self._judged[judged.name] = judged

    def record(self, batch: JudgedBatch) -> JudgedBatch:
        """Return what may be signed for the batch: this, now durable, or what was recorded before,
        which stands whatever came later.
        """
        if earlier := self.judged(batch.name):
            return earlier
        self.append(
            {
                "batch_id": batch.batch_id,
                "root": hex0x(batch.root),
                "records": hex0x(batch.packed()),
            }
        )
        self._judged[batch.name] = batch
        return batch

    def judged(self, name: BatchName) -> JudgedBatch | None:
        """Return what was recorded for a batch."""
        return self._judged.get(name)

    def all(self) -> list[JudgedBatch]:
        """Return everything recorded, oldest first."""
        return list(self._judged.values())
