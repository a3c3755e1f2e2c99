"""The ledger as an auditor rebuilds it: the chain's view without an object per submission.

A million outcomes stay the 56 bytes each that were posted; whoever looks at one parses it then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from muster.chain import BatchView, BlockId, Event, RunTerms
from muster.chain.view_parts import parse_records, split_signatures
from muster.client.audit.contradictions import Contradiction, Kind
from muster.client.facts import HistoryView
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32
from muster.protocol.messages import OutcomeRecord, Verdict

RECORD = np.dtype(
    [
        ("worker_id", ">u4"),
        ("step", ">u4"),
        ("index", ">u4"),
        ("policy_version", ">u4"),
        ("file_hash", "V32"),
        ("rollouts", ">u2"),
        ("units", ">u4"),
        ("verdict", "u1"),
        ("reason", "u1"),
    ]
)
"""An outcome record, as it is on chain."""
REMEMBERED_BLOCKS = 256
"""Newest blocks with events whose hashes are kept."""


class PackedRecords(Sequence[OutcomeRecord]):
    """A batch's outcome records as they were posted; parsed one by one when looked at."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        """Raises EncodingError when the ledger cannot have accepted the bytes."""
        self.data = data
        if not data or len(data) % OutcomeRecord.SIZE:
            raise EncodingError(f"{len(data)} bytes are no outcome records")
        verdicts = self.columns()["verdict"]
        if verdicts.min() < Verdict.ACCEPTED or verdicts.max() > Verdict.FRAUD:
            raise EncodingError("a record has no known verdict")

    def columns(self) -> NDArray[Any]:
        """Return the records as a structured array of type RECORD, without a copy."""
        return np.frombuffer(self.data, dtype=RECORD)

    def __len__(self) -> int:
        return len(self.data) // OutcomeRecord.SIZE

    @overload
    def __getitem__(self, place: int) -> OutcomeRecord: ...

    @overload
    def __getitem__(self, place: slice) -> list[OutcomeRecord]: ...

    def __getitem__(self, place: int | slice) -> OutcomeRecord | list[OutcomeRecord]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        at = range(len(self))[place] * OutcomeRecord.SIZE
        return parse_records(self.data[at : at + OutcomeRecord.SIZE])[0]

    def __iter__(self) -> Iterator[OutcomeRecord]:
        return iter(parse_records(self.data))


class Ledger(HistoryView):
    """Everything that events say, with contradictions that say where they are.

    Events are not kept unless `keeps_events`: then the ledger can be rewound.
    """

    def __init__(self, *, keeps_events: bool = False) -> None:
        self._keeps_events = keeps_events
        self._at: tuple[int, int] | None = None
        self._blocks: dict[int, Hash32] = {}
        super().__init__()

    def _reset(self) -> None:
        super()._reset()
        self.disorder: list[Contradiction] = []
        """Events that do not follow from those before them."""
        self.posted: list[int] = []
        """Batches in the order in which their outcomes were posted."""
        self.terms_at_posting: dict[int, RunTerms] = {}
        """A run's terms when a batch's outcomes were posted: they may change later."""
        self.terms_at_slash: dict[Hash32, RunTerms] = {}
        """A run's terms when a fraud was executed, by offence."""

    @property
    def block_number(self) -> int | None:
        """The block of the newest event."""
        return self._at[0] if self._at else None

    def apply(self, event: Event) -> None:
        """Take in the next event; one that was taken in before changes nothing."""
        here = (event.block_number, event.log_index)
        if self._at is not None and here <= self._at:
            return
        self._at = here
        self._blocks[event.block_number] = event.block_hash
        if len(self._blocks) > REMEMBERED_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        if self._keeps_events:
            self._events.append(event)
        self._take_in(event)

    def file_hashes(self, batch: BatchView) -> Iterator[bytes]:
        """Yield the files of a batch without an object per record."""
        records: object = batch.records
        if not isinstance(records, PackedRecords):
            yield from super().file_hashes(batch)
            return
        start = RECORD.fields["file_hash"][1] if RECORD.fields else 0
        for at in range(start, len(records.data), OutcomeRecord.SIZE):
            yield records.data[at : at + 32]

    def rewind(self, block_number: int) -> None:
        """Forget everything after a block."""
        assert self._keeps_events  # otherwise nothing is read twice
        events = [event for event in self._events if event.block_number <= block_number]
        self._events, self._at, self._blocks = [], None, {}
        self._reset()
        for event in events:
            self.apply(event)

    def kept_events(self) -> list[Event]:
        """Return the events, oldest first; none unless they are kept."""
        return self._events

    def recent_blocks(self) -> list[BlockId]:
        """Return the newest blocks with events, oldest first."""
        return [BlockId(number, hashed) for number, hashed in sorted(self._blocks.items())]

    def _contradict(self, event: Event, problem: str) -> None:
        super()._contradict(event, problem)
        self.disorder.append(
            Contradiction(
                Kind.EVENT_ORDER,
                f"{event.contract}.{event.name}: {problem}",
                tx=event.tx_hash,
                block=event.block_number,
                batch_id=event.args.get("batch_id"),
            )
        )

    def _take_in(self, event: Event) -> None:
        if (event.contract, event.name) != ("ContributionLedger", "OutcomesPosted"):
            super()._take_in(event)
            if event.name == "FraudExecuted":
                self._remember_terms(event.args)
            return
        try:
            self._outcomes_posted(event, event.args)
        except (KeyError, EncodingError) as error:
            self._contradict(event, f"refers to something unknown: {error}")

    def _remember_terms(self, args: dict[str, Any]) -> None:
        batch = self.batches.get(args["batch_id"])
        run = self.runs.get(batch.run_id) if batch else None
        if run is not None:
            self.terms_at_slash[args["offence"]] = run.config.terms

    def _outcomes_posted(self, event: Event, args: dict[str, Any]) -> None:
        batch = self.batches[args["batch_id"]]
        records = PackedRecords(args["records"])
        self._expect(event, "records", batch.count, len(records))
        if batch.records is not None:
            self._contradict(event, f"batch {batch.batch_id} has outcomes already")
            return
        # Whoever reads a batch's records iterates, indexes or counts: a list is not needed.
        batch.records = records  # type: ignore[assignment]
        batch.records_hash = keccak(records.data)
        batch.signatures = split_signatures(args["signatures"])
        batch.signers = args["signers"]
        batch.outcomes_root = args["outcomes_root"]
        batch.posted_at = args["posted_at"]
        batch.posted_block, batch.posted_tx = event.block_number, event.tx_hash
        batch.posted_beacon = event.block_hash
        run = self.runs[batch.run_id]
        batch.validators = tuple(run.validators)
        self.terms_at_posting[batch.batch_id] = run.config.terms
        self.posted.append(batch.batch_id)
