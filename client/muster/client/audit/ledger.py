"""The ledger as an auditor rebuilds it: the chain's view without an object per submission.

Each of a million outcomes stays in the 56 bytes that were posted, and is parsed when it is read.
"""

from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muster.chain import BatchView, Event, Offence, RunTerms, SlashState, SlashView
from muster.chain.doubles import WITHHELD
from muster.chain.structs import ZERO_ADDRESS
from muster.chain.view_parts import PostedRecords, split_signatures, unpack_leniently
from muster.client.audit.contradictions import Contradiction, Kind
from muster.client.chain_facts import HistoryView
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.jury import BENCH, BenchPlace
from muster.protocol.messages import OutcomeRecord

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


class PackedRecords(PostedRecords):
    """A batch's outcome records as they were posted; parsed anew whenever they are looked at."""

    __slots__ = ()

    def columns(self) -> NDArray[Any]:
        """Return the records as a structured array of type RECORD, without a copy."""
        return np.frombuffer(self.data, dtype=RECORD)

    def parsed(self) -> list[OutcomeRecord]:
        """Return all records; they are not kept."""
        return unpack_leniently(self.data)


@dataclass(frozen=True, slots=True)
class Bond:
    """The bond for work that a worker committed itself, or brought before jurors."""

    payer: Address
    """The account that paid it."""
    wei: int
    """The amount."""
    returned_wei: int = 0
    """The part that was returned."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The jurors' bench that a jury was drawn from, and the block of the draw."""

    places: tuple[BenchPlace, ...]
    """The places of the bench that existed at the case's opening, as they were at the draw."""
    block_number: int
    worker: Address
    """Whose work the case was about then."""


@dataclass(frozen=True, slots=True)
class LaterShare:
    """The share that a later offence took of stake that an earlier slash gave back."""

    later: Hash32
    """The escrow of the later offence."""
    earlier: Hash32
    """The escrow that was given back."""
    wei: int
    """The amount."""


class Ledger(HistoryView):
    """Everything that events say, with contradictions and their places.

    The events themselves are not kept, so it is never rewound: an audit reads a chain once.
    """

    RECORDS = PackedRecords

    def __init__(self) -> None:
        self._at: tuple[int, int] | None = None
        super().__init__()

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.disorder: list[Contradiction] = []
        """Events that do not follow from those before them."""
        self.seated_at: dict[tuple[RunId, Address], int] = {}
        """When each account first took a seat of a run."""
        self.draws: dict[Hash32, Draw] = {}
        """The draw of each case's jury."""
        self.terms_then: dict[int, int] = {}
        """Number of the run's terms at a batch's commitment, by the events before it."""
        self.freed_wei: dict[int, int] = {}
        """Amount that a void or judged batch gave back to its run."""
        self.reserved_before: dict[int, int] = {}
        """Amount that the run had set aside just before it."""
        self.bonds: dict[int, Bond] = {}
        """By batch."""
        self.followed: list[LaterShare] = []
        """In chain order."""
        self.restored_after: dict[Hash32, int] = {}
        """Number of all slashes when a slash was given back, by its escrow."""
        self.restored_before: dict[Hash32, frozenset[Hash32]] = {}
        """Escrows that had been given back before it, by its escrow."""
        self.splits: dict[Hash32, list[tuple[int, int, int]]] = {}
        """Wei burned, insured and rewarded at each release of an escrow."""
        self.court_wei: dict[Hash32, tuple[int, int]] = {}
        """Amount that a run paid for a case, and its available money before that payment."""
        self.proven: set[Hash32] = set()
        """Escrows of self-proving faults."""
        self._ended: int | None = None
        self._paid_for_court: dict[RunId, tuple[str, int, int]] = {}

    @property
    def block_number(self) -> int | None:
        """The block of the newest event."""
        return self._at[0] if self._at else None

    def apply(self, event: Event) -> None:
        """Apply the next event; an event that was applied before changes nothing."""
        here = (event.block_number, event.log_index)
        if self._at is not None and here <= self._at:
            return
        self._at = here
        self._take_in(event)

    def terms_of(self, batch: BatchView) -> RunTerms | None:
        """Return the terms under which a batch is paid, judged and slashed; None if not known."""
        run = self.runs.get(batch.run_id)
        return run.terms[batch.terms - 1] if run and 0 < batch.terms <= len(run.terms) else None

    def batch_of(self, slash: SlashView) -> BatchView | None:
        """Return the batch of a slash; None when the slash is not about an outcome."""
        return None if slash.batch_id is None else self.batches.get(slash.batch_id)

    def record_at(self, batch_id: int | None, position: int | None) -> OutcomeRecord | None:
        """Return a posted outcome; None if there is none."""
        batch = None if batch_id is None else self.batches.get(batch_id)
        if batch is None or not batch.records or position is None:
            return None
        return batch.records[position] if 0 <= position < len(batch.records) else None

    def answers_for(self, batch: BatchView, worker: Address, signer: Address | None) -> bool:
        """Return whether a signer was a worker's node when a batch was committed, and it had not
        left by then.
        """
        member = self.member(batch.run_id, worker)
        return bool(member and signer and member.answers_for(signer, batch.committed_at))

    def contradict(self, event: Event, problem: str) -> None:
        """Note that an event does not follow from those before it."""
        super().contradict(event, problem)
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
        for note in (self._note_batches, self._note_slashes, self._note_cases):
            note(event, event.args)
        super()._take_in(event)

    # Facts that the base view does not keep. They are noted before the event is applied.

    def _note_batches(self, event: Event, args: dict[str, Any]) -> None:
        match event.name:
            case "ValidatorSeated":
                seat = RunId(args["run_id"]), args["validator"]
                self.seated_at.setdefault(seat, event.block_timestamp)
            case "BatchCommitted":
                if (run := self.runs.get(args["run_id"])) is not None:
                    self.terms_then[args["batch_id"]] = run.terms_number
            case "BatchWithheld":
                self._note_withheld(event, args)
            case "BatchVoided" | "OutcomesPosted":
                self._ended = args["batch_id"]
            case "RewardFreed":
                self._note_freed(event, args)
            case "BondTaken":
                self.bonds[args["batch_id"]] = Bond(args["payer"], args["amount"])
            case "BondReturned":
                bond = self.bonds.get(args["batch_id"])
                self.expect(event, "who put the bond up", bond and bond.payer, args["payer"])
                if bond is not None:
                    back = bond.returned_wei + args["amount"]
                    self.bonds[args["batch_id"]] = replace(bond, returned_wei=back)

    def _note_withheld(self, event: Event, args: dict[str, Any]) -> None:
        batch = self.batches.get(args["batch_id"])
        run = self.runs.get(batch.run_id) if batch else None
        if batch is None or run is None:
            return
        batch.records_hash, batch.validators = WITHHELD, tuple(run.validators)
        batch.signatures = split_signatures(args["signatures"])
        batch.posted_block, batch.posted_tx = event.block_number, event.tx_hash

    def _note_freed(self, event: Event, args: dict[str, Any]) -> None:
        run = self.runs.get(args["run_id"])
        batch = self.batches.get(self._ended or 0)
        if batch is None or run is None or batch.run_id != run.run_id:
            self.contradict(event, "no batch of its run was judged or void just before")
            return
        self.freed_wei[batch.batch_id] = args["amount"]
        self.reserved_before[batch.batch_id] = run.reserved_wei
        self._ended = None

    def _note_slashes(self, event: Event, args: dict[str, Any]) -> None:
        match event.name:
            case "SlashFollowed":
                followed = LaterShare(args["escrow_id"], args["from_escrow_id"], args["amount"])
                self.followed.append(followed)
            case "SlashRestored":
                restored = (s for s in self.slashes if s.state is SlashState.RESTORED)
                self.restored_after[args["escrow_id"]] = len(self.slashes)
                self.restored_before[args["escrow_id"]] = frozenset(s.escrow_id for s in restored)
            case "SlashReleased":
                parts = (args["burned"], args["insured"], args["rewarded"])
                self.splits.setdefault(args["escrow_id"], []).append(parts)
            case "DoubleOutcomeProven" | "DoubleSubmissionProven" | "MisrecordProven":
                self.proven.add(args["escrow_id"])

    def _note_cases(self, event: Event, args: dict[str, Any]) -> None:
        match event.name:
            case "CourtPaid":
                if (run := self.runs.get(args["run_id"])) is not None:
                    paid = (event.tx_hash, args["amount"], run.available_wei)
                    self._paid_for_court[run.run_id] = paid
            case "CaseClosed":
                case = self.cases.get(args["case_id"])
                paid_now = self._paid_for_court.pop(case.run_id, None) if case else None
                if paid_now is not None and paid_now[0] == event.tx_hash:
                    self.court_wei[args["case_id"]] = paid_now[1:]
            case "JuryDrawn":
                if (case := self.cases.get(args["case_id"])) is not None:
                    given_up = BenchPlace(ZERO_ADDRESS, joined_at=case.opened_at)
                    places = tuple(self.bench[: case.places])
                    places += (given_up,) * (case.places - len(places))
                    batch = self.batches.get(case.batch_id)
                    about = batch and case.claims and batch.claim_about(case).submission.worker
                    self.draws[case.case_id] = Draw(
                        places, event.block_number, about or case.worker
                    )


# One run of it


def of_run(view: Ledger, run_id: RunId) -> Ledger:
    """Return the part of a ledger that is about one known run. A slash or case that names two runs
    belongs to both.

    Anyone can own a run and fill it with contradictory outcomes: an audit of one run must not
    report those of others. The network's part stays: workers, the jurors' bench, and cases about
    the run with the stake that they cost jurors.
    """
    own = copy(view)
    own.runs = {run_id: view.runs[run_id]}
    own.batches = {b: batch for b, batch in view.batches.items() if batch.run_id == run_id}
    own.cases = {
        case_id: case
        for case_id, case in view.cases.items()
        if case.run_id == run_id or case.batch_id in own.batches
    }
    own.stakes = {key: stake for key, stake in view.stakes.items() if key[0] in (run_id, BENCH)}
    own.payments = [payment for payment in view.payments if payment.run_id == run_id]
    strange = {case.number for case in view.cases.values()}
    strange -= {case.number for case in own.cases.values()}
    is_own = [_is_own(slash, run_id, own, strange) for slash in view.slashes]
    own.slashes = [slash for slash, ours in zip(view.slashes, is_own, strict=True) if ours]
    _narrow(own, view, is_own)
    return own


def _is_own(slash: SlashView, run_id: RunId, own: Ledger, strange: set[int]) -> bool:
    if slash.run_id == run_id or slash.batch_id in own.batches:
        return True
    # Jurors' losses belong to the bench, unless the case is about another run.
    is_absence = slash.offence is Offence.ABSENT_JUROR
    return slash.run_id == BENCH and not (is_absence and slash.tag in strange)


def _narrow(own: Ledger, view: Ledger, is_own: list[bool]) -> None:
    """Reduce the ledger's notes to those of the run."""
    theirs = set(view.batches) - set(own.batches)
    own.disorder = [each for each in view.disorder if each.batch_id not in theirs]
    own.bonds = {b: bond for b, bond in view.bonds.items() if b not in theirs}
    own.freed_wei = {b: wei for b, wei in view.freed_wei.items() if b not in theirs}
    kept = {slash.escrow_id for slash in own.slashes}
    gone = {slash.escrow_id for slash in view.slashes} - kept
    own.followed = [each for each in view.followed if each.earlier not in gone]
    # before[n]: the number of the run's slashes among the first n of all.
    before = list(accumulate(is_own, initial=0))
    own.restored_after = {
        escrow_id: before[count]
        for escrow_id, count in view.restored_after.items()
        if escrow_id in kept
    }
