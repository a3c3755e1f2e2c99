"""The ledger as an auditor rebuilds it: the chain's view without an object per submission.

A million outcomes stay the 56 bytes each that were posted; whoever looks at one parses it then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from muster.chain import BatchStatus, BatchView, BlockId, Event, SlashState
from muster.chain.view_parts import parse_records, split_signatures
from muster.client.audit.contradictions import Contradiction, Kind
from muster.client.facts import HistoryView
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.jury import Place
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
WITHHELD = keccak(b"")
"""What validators sign of a batch of which nothing can be had: the hash of no records."""
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


@dataclass(frozen=True, slots=True)
class Bond:
    """What a worker put up for work that it brought before judges itself."""

    payer: Address
    """Who."""
    wei: int
    """How much."""
    returned_wei: int = 0
    """How much of it went back."""


@dataclass(frozen=True, slots=True)
class Draw:
    """What a jury was drawn from, and when."""

    places: tuple[Place, ...]
    """The bench that there was at the opening, as it was at the draw."""
    block_number: int
    """The block of the draw."""


@dataclass(frozen=True, slots=True)
class Followed:
    """What a later offence took of stake that an earlier one gave back."""

    later: Hash32
    """The escrow of the later one."""
    earlier: Hash32
    """The escrow that was given back."""
    wei: int
    """How much."""


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
        self.seated_at: dict[tuple[RunId, Address], int] = {}
        """When each account first took a seat of a run."""
        self.draws: dict[Hash32, Draw] = {}
        """What each case's jury was drawn from."""
        self.terms_then: dict[int, int] = {}
        """Number of the run's terms when a batch was committed, as the events before say."""
        self.freed_wei: dict[int, int] = {}
        """What was given back to the run for a void batch."""
        self.reserved_before: dict[int, int] = {}
        """What the run had set aside just before."""
        self.bonds: dict[int, Bond] = {}
        """By batch."""
        self.followed: list[Followed] = []
        """In chain order."""
        self.restored_after: dict[Hash32, int] = {}
        """How many slashes there were when one was given back, by its escrow."""
        self.restored_before: dict[Hash32, frozenset[Hash32]] = {}
        """Which of them had been given back by then."""
        self.splits: dict[Hash32, list[tuple[int, int, int]]] = {}
        """Wei burned, insured and rewarded at each release of an escrow."""
        self.court_wei: dict[Hash32, tuple[int, int]] = {}
        """What a run paid for a case, and what it had then."""
        self.proven: set[Hash32] = set()
        """Escrows of faults that proved themselves."""
        self._voided: int | None = None
        self._paid_for_court: dict[RunId, tuple[str, int, int]] = {}

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
        if (note := _NOTES.get(event.name)) is not None:
            note(self, event, event.args)
        if event.name == "OutcomesPosted":
            try:
                self._outcomes_posted(event, event.args)
            except (KeyError, EncodingError) as error:
                self._contradict(event, f"refers to something unknown: {error}")
            return
        super()._take_in(event)

    def _outcomes_posted(self, event: Event, args: dict[str, Any]) -> None:
        batch = self.batches[args["batch_id"]]
        records = PackedRecords(args["records"])
        self._expect(event, "records", batch.count, len(records))
        if batch.records is not None:
            self._contradict(event, f"batch {batch.batch_id} has outcomes already")
            return
        # Whoever reads a batch's records iterates, indexes or counts: a list is not needed.
        batch.records = records  # type: ignore[assignment]
        batch.status = BatchStatus.JUDGED
        batch.records_hash = keccak(records.data)
        batch.signatures = split_signatures(args["signatures"])
        batch.signers = args["signers"]
        batch.outcomes_root = args["outcomes_root"]
        batch.posted_at = args["posted_at"]
        batch.posted_block, batch.posted_tx = event.block_number, event.tx_hash
        batch.posted_beacon = event.block_hash
        batch.validators = tuple(self.runs[batch.run_id].validators)
        self.posted.append(batch.batch_id)

    # What a view does not keep, noted before the event is taken in

    def _note_seat(self, event: Event, args: dict[str, Any]) -> None:
        seat = RunId(args["run_id"]), args["validator"]
        self.seated_at.setdefault(seat, event.block_timestamp)

    def _note_commitment(self, _event: Event, args: dict[str, Any]) -> None:
        run = self.runs.get(args["run_id"])
        if run is not None:
            self.terms_then[args["batch_id"]] = run.terms_number

    def _note_withheld(self, event: Event, args: dict[str, Any]) -> None:
        batch = self.batches.get(args["batch_id"])
        run = self.runs.get(batch.run_id) if batch else None
        if batch is None or run is None:
            return
        batch.records_hash, batch.validators = WITHHELD, tuple(run.validators)
        batch.signatures = split_signatures(args["signatures"])
        batch.posted_block, batch.posted_tx = event.block_number, event.tx_hash

    def _note_void(self, _event: Event, args: dict[str, Any]) -> None:
        self._voided = args["batch_id"]

    def _note_freed(self, event: Event, args: dict[str, Any]) -> None:
        run = self.runs.get(args["run_id"])
        if self._voided is None or run is None:
            self._contradict(event, "no batch is void")
            return
        self.freed_wei[self._voided] = args["amount"]
        self.reserved_before[self._voided] = run.reserved_wei
        self._voided = None

    def _note_bond(self, _event: Event, args: dict[str, Any]) -> None:
        self.bonds[args["batch_id"]] = Bond(args["payer"], args["amount"])

    def _note_bond_back(self, event: Event, args: dict[str, Any]) -> None:
        bond = self.bonds.get(args["batch_id"])
        self._expect(event, "who put the bond up", bond and bond.payer, args["payer"])
        if bond is not None:
            back = bond.returned_wei + args["amount"]
            self.bonds[args["batch_id"]] = Bond(bond.payer, bond.wei, back)

    def _note_followed(self, _event: Event, args: dict[str, Any]) -> None:
        followed = Followed(args["escrow_id"], args["from_escrow_id"], args["amount"])
        self.followed.append(followed)

    def _note_restored(self, _event: Event, args: dict[str, Any]) -> None:
        back = frozenset(s.escrow_id for s in self.slashes if s.state is SlashState.RESTORED)
        self.restored_after[args["escrow_id"]] = len(self.slashes)
        self.restored_before[args["escrow_id"]] = back

    def _note_released(self, _event: Event, args: dict[str, Any]) -> None:
        parts = (args["burned"], args["insured"], args["rewarded"])
        self.splits.setdefault(args["escrow_id"], []).append(parts)

    def _note_court(self, event: Event, args: dict[str, Any]) -> None:
        run = self.runs.get(args["run_id"])
        if run is not None:
            paid = (event.tx_hash, args["amount"], run.available_wei)
            self._paid_for_court[run.run_id] = paid

    def _note_closed(self, event: Event, args: dict[str, Any]) -> None:
        case = self.cases.get(args["case_id"])
        paid = self._paid_for_court.pop(case.run_id, None) if case else None
        if paid is not None and paid[0] == event.tx_hash:
            self.court_wei[args["case_id"]] = paid[1:]

    def _note_jury(self, event: Event, args: dict[str, Any]) -> None:
        case = self.cases.get(args["case_id"])
        if case is not None:
            places = tuple(self.bench[: case.places])
            self.draws[case.case_id] = Draw(places, event.block_number)

    def _note_proven(self, _event: Event, args: dict[str, Any]) -> None:
        self.proven.add(args["escrow_id"])


_NOTES: dict[str, Callable[[Ledger, Event, dict[str, Any]], None]] = {
    "ValidatorSeated": Ledger._note_seat,
    "BatchCommitted": Ledger._note_commitment,
    "BatchWithheld": Ledger._note_withheld,
    "BatchVoided": Ledger._note_void,
    "RewardFreed": Ledger._note_freed,
    "BondTaken": Ledger._note_bond,
    "BondReturned": Ledger._note_bond_back,
    "SlashFollowed": Ledger._note_followed,
    "SlashRestored": Ledger._note_restored,
    "SlashReleased": Ledger._note_released,
    "CourtPaid": Ledger._note_court,
    "CaseClosed": Ledger._note_closed,
    "JuryDrawn": Ledger._note_jury,
    "DoubleOutcomeProven": Ledger._note_proven,
    "DoubleSubmissionProven": Ledger._note_proven,
}
