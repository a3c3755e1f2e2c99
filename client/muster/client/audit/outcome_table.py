"""All posted outcomes in columns, with the verdicts that stand after disputes. Pure.

Rows are in batch order, batches in the order of their commitment. `_N` is one value per row.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.chain import BatchView
from muster.client.audit.contradictions import Contradiction, Kind, at_outcomes
from muster.client.audit.ledger import RECORD, Ledger, PackedRecords
from muster.protocol.encoding import address_bytes, keccak
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import OutcomeRecord, Submission, Verdict


@dataclass(frozen=True, slots=True, eq=False)
class OutcomeTable:
    """Every posted outcome."""

    batches: Sequence[BatchView]
    """The judged batches."""
    starts: NDArray[np.int64]
    """First row of each batch, followed by the total number of rows."""
    records_N: NDArray[Any]
    """The records, of type RECORD."""
    batch_N: NDArray[np.int32]
    """Place of the batch in `batches`."""
    verdict_N: NDArray[np.uint8]
    """The verdict that stands."""

    def __len__(self) -> int:
        return len(self.records_N)

    def column(self, name: str) -> NDArray[np.int64]:
        """Return a numeric field of each record, in the machine's byte order."""
        return self.records_N[name].astype(np.int64)

    def of_batches(self, values: Sequence[int]) -> NDArray[np.int64]:
        """Return one value per row, given one per batch."""
        per_batch: NDArray[np.int64] = np.array(values, np.int64)
        return per_batch[self.batch_N] if len(values) else np.zeros(0, np.int64)

    def run_N(self) -> NDArray[np.int64]:
        """Return the run of each row."""
        return self.of_batches([batch.run_id for batch in self.batches])

    def member_N(self) -> NDArray[np.int64]:
        """Return the worker of each row in its run, as `run << 32 | worker`."""
        return (self.run_N() << 32) | self.column("worker_id")

    def place(self, row: int) -> tuple[BatchView, int]:
        """Return a row's batch and its position there."""
        number = int(self.batch_N[row])
        return self.batches[number], row - int(self.starts[number])

    def record(self, row: int) -> OutcomeRecord:
        """Return a row as a record."""
        return PackedRecords(self.records_N[row : row + 1].tobytes())[0]

    def is_of(self, run_id: RunId | None) -> NDArray[np.bool_]:
        """Return which rows are a run's; all of them for None."""
        if run_id is None:
            return np.ones(len(self), bool)
        return np.equal(self.run_N(), run_id)

    def is_verdict(self, *verdicts: Verdict) -> NDArray[np.bool_]:
        """Return for each row whether one of these verdicts stands."""
        return np.isin(self.verdict_N, np.array(verdicts, np.uint8))

    def slices(self) -> Iterator[tuple[BatchView, NDArray[Any]]]:
        """Yield every judged batch with its records."""
        for number, batch in enumerate(self.batches):
            yield batch, self.records_N[self.starts[number] : self.starts[number + 1]]


def at_row(table: OutcomeTable, row: int, kind: Kind, detail: str) -> Contradiction:
    """Return a contradiction about the outcome of a row."""
    batch, position = table.place(row)
    return at_outcomes(batch, kind, detail, position)


def packed(batch: BatchView) -> bytes:
    """Return a judged batch's records as posted."""
    return batch.records.data if batch.records else b""


def tabulate(view: Ledger, *, only: Collection[int] | None = None) -> OutcomeTable:
    """Return the outcomes that a view knows, of all batches or of some."""
    batches = [
        batch
        for batch in view.batches.values()
        if batch.records and (only is None or batch.batch_id in only)
    ]
    # Joined as bytes: numpy's concatenation would convert them to the machine's byte order.
    records = np.frombuffer(b"".join(map(packed, batches)), dtype=RECORD)
    sizes = [len(batch.records or ()) for batch in batches]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    table = OutcomeTable(
        batches=batches,
        starts=starts,
        records_N=records,
        batch_N=np.repeat(np.arange(len(batches), dtype=np.int32), sizes),
        verdict_N=records["verdict"].astype(np.uint8),
    )
    _apply_disputes(view, table)
    return table


def _apply_disputes(view: Ledger, table: OutcomeTable) -> None:
    """Replace the recorded verdict of every overturned outcome by the jury's."""
    numbers = {batch.batch_id: number for number, batch in enumerate(table.batches)}
    for case in view.cases.values():
        number = numbers.get(case.batch_id)
        if not case.overturned or number is None:
            continue
        record = view.record_at(case.batch_id, case.position)
        if record is not None and case.case_id == record.leaf(case.batch_id, case.position):
            table.verdict_N[table.starts[number] + case.position] = case.ruling >> 8


# Leaves of many records at once: preimages are laid out in arrays, then hashed one by one. The
# layouts are those of docs/protocol.md, sections 3 and 9.1; a test compares them with those of the
# messages.

_TYPE = keccak(Submission.TYPE.encode())
_WORDS = 9
"""Words of a submission's preimage: the type hash and eight fields."""
_FIELDS = (
    ("step", 3, 4),
    ("index", 4, 4),
    ("policy_version", 5, 4),
    ("rollouts", 7, 2),
    ("units", 8, 4),
)
"""Numeric fields of a record, each with its word in a submission's preimage and its bytes."""


def outcome_leaves(batch_id: int, records_N: NDArray[Any]) -> list[Hash32]:
    """Return the leaves of a batch's outcomes tree."""
    count = len(records_N)
    preimages = np.empty((count, 12 + records_N.dtype.itemsize), np.uint8)
    preimages[:, :8] = np.frombuffer(batch_id.to_bytes(8, "big"), np.uint8)
    preimages[:, 8:12] = np.arange(count, dtype=">u4").view(np.uint8).reshape(count, 4)
    preimages[:, 12:] = _bytes_of(records_N)
    return [keccak(row.tobytes()) for row in preimages]


def submission_leaves(
    run_id: int, records_N: NDArray[Any], addresses: Mapping[int, Address]
) -> list[Hash32] | None:
    """Return the leaves of the submissions that the records describe; None when a record names a
    worker without an address.
    """
    known = {number: addresses.get(number) for number in set(records_N["worker_id"].tolist())}
    if None in known.values():
        return None
    count = len(records_N)
    preimages = np.zeros((count, _WORDS, 32), np.uint8)
    preimages[:, 0] = np.frombuffer(_TYPE, np.uint8)
    preimages[:, 1, 24:] = np.frombuffer(run_id.to_bytes(8, "big"), np.uint8)
    for number, address in known.items():
        assert address is not None  # checked above
        mine = records_N["worker_id"] == number
        preimages[mine, 2, 12:] = np.frombuffer(address_bytes(address), np.uint8)
    for name, word, size in _FIELDS:
        preimages[:, word, 32 - size :] = _bytes_of(records_N[name])
    preimages[:, 6] = _bytes_of(records_N["file_hash"])
    return [keccak(keccak(row.tobytes())) for row in preimages]


def _bytes_of(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Return each value's bytes as a row."""
    size = values.dtype.itemsize
    return np.frombuffer(values.tobytes(), np.uint8).reshape(len(values), size)
