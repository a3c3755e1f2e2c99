"""What an audit can find wrong: every kind by name, with the rule that it breaks. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.chain import BatchView

MAX_LISTED = 1_000
"""Contradictions of one check that are kept; further ones are only counted."""
SHOWN_PROBLEMS = 5
"""Number of contradictions in a check's detail."""


class ProofLevel(StrEnum):
    """How much of the source is proven."""

    NONE = "none"
    """The endpoint is believed."""
    BLOCKS = "blocks"
    """Every event is in a block of the hash that is shown."""
    CHAIN = "chain"
    """Also, no event was left out of any block up to the head."""


class Kind(Enum):
    """What is wrong, and the rule that it breaks. The names are stable: programs match on them."""

    EVENT_ORDER = "every event follows from those before it"
    BATCH_ROOT = "a batch's root commits to its submissions, and accepted records repeat them"
    BATCH_UNITS = "a batch declares as many units as its submissions claim"
    BATCH_TERMS = "a batch is paid and punished by the terms that its run had when it was committed"
    BATCH_SPLIT = (
        "a submission that its worker takes out of an unjudged batch keeps run, terms and "
        "time, and counts once"
    )
    BATCH_VOID = (
        "a void batch has no outcomes, pays nobody, and gives back to its run the money that was "
        "set aside for it"
    )
    DIRECT_SIGNATURE = (
        "a direct submission is signed by a node of its worker, under a ticket of the run"
    )
    OUTCOMES_ROOT = "the outcomes root is the Merkle root over the records, in batch order"
    OUTCOME_SIGNATURE = (
        "signatures are canonical: 65 bytes, v 27 or 28, s in the lower half; the recorded seats "
        "are those of the signers"
    )
    OUTCOME_STRANGER = "a signer of outcomes has a seat in the run when they are posted"
    OUTCOME_QUORUM = (
        "outcomes carry signatures of at least the run's quorum, or are a ruling of the network's "
        "jurors about work that the run left unjudged"
    )
    OUTCOME_UNCALLED = (
        "a signer of outcomes was called to check the batch, by its order, by silence or by "
        "objections"
    )
    OUTCOME_MINORITY = (
        "outcomes that do not accept are signed by most of the validators that they call"
    )
    OUTCOME_UNCHECKED = "a signer of an accepted outcome has recomputed its hidden states"
    OUTCOME_DEADLINE = "a run's outcomes are posted before the outcome deadline"
    OUTCOME_UNITS = (
        "records hold no more units together than their batch was committed for, and the money of "
        "the others goes back to its run"
    )
    OUTCOME_REASON = "reason 0 is Accepted; every other reason has the verdicts of its check"
    WORKER_UNKNOWN = "a record names a registered worker, or nobody (0) when it is rejected"
    WORKER_INACTIVE = "accepted work is by an active member of its run"
    POLICY_UNPUBLISHED = "accepted work is of a policy published before it was committed"
    SLOT_TWICE = "a slot (run, worker, step, index) settles once"
    PAYMENT_RUN = "the run that pays exists"
    PAYMENT_PRICE = "a payment is units times the price that their batches were committed at"
    PAYMENT_UNDUE = "only accepted slots whose challenge window is over are paid, once"
    PAYMENT_UNEARNED = "paid work is confirmed by its own evidence"
    RUN_OVERDRAWN = "a run pays and sets aside no more than it was funded with"
    SLASH_UNFOUNDED = "a slash names what it punishes: an outcome, a case or two signatures"
    SLASH_OTHER_RUN = (
        "stake for a run is taken for an offence in that run only, a juror's for its duty on the "
        "bench only"
    )
    SLASH_VERDICT = "stake is gone when, and only when, a fraud verdict stands"
    SLASH_SHARE = (
        "a slash takes the share that its owner signed for, of active and of unbonding stake, "
        "rounded up"
    )
    SLASH_REPORTER = (
        "the reporter is nobody, or the first claimant of the ruling by which jurors overturned "
        "the record"
    )
    SLASH_SPLIT = "released stake is burned, except for insurance and the reporter's capped share"
    SLASH_FOLLOWED = (
        "when stake is given back, later offences take their share of it, as if it had been there"
    )
    ROLE_STAKE = (
        "workers, validators and jurors agreed to terms of the run and hold the stake that it "
        "requires"
    )
    CASE_UNFOUNDED = "a case is about a posted outcome, by its leaf, or about unjudged work"
    CASE_JUROR = (
        "jurors are drawn from the bench as it was when the case opened, by the hash of its draw "
        "block, without the run's owner, the worker and the run's validators"
    )
    CASE_VERDICT = "a closed case leaves the ruling that its votes decide"
    CASE_MONEY = (
        "right claims get their bond back, jurors who voted for the ruling get their fee, "
        "and the court pays no more than lost bonds and the run provide"
    )
    CONTRACT_STATE = "contracts hold what their events add up to"
    SOURCE_HEADER = "a block's hash is the Keccak-256 of its header"
    SOURCE_RECEIPTS = "a block's receipts hash to the receipts root of its header"
    SOURCE_LOGS = "the source shows all events of the receipts, and no others"
    SOURCE_CHAIN = "every block names the hash of the one before it"
    SOURCE_DISAGREES = "every honest source shows the same blocks"
    HISTORY_REWRITTEN = "a final block stays in the chain"
    EVIDENCE_ALTERED = "evidence has the hashes that were committed and pinned on chain"
    VERDICT_WRONG = "the same checks on the same evidence give the outcome that stands"
    LINEAGE = (
        "every version's manifest is the one on chain and continues the training stream "
        "where the version before it ended"
    )

    @property
    def rule(self) -> str:
        """The protocol's rule that it breaks."""
        return self.value

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class Contradiction:
    """One finding that contradicts a rule of the protocol."""

    kind: Kind
    """Its kind, with the rule."""
    detail: str
    """What was found, with the values that disagree."""
    tx: str | None = None
    """The transaction that caused it, if there is one."""
    block: int | None = None
    batch_id: int | None = None
    position: int | None = None
    """The place there."""

    def to_json(self) -> dict[str, Any]:
        """Return the contradiction and its rule as JSON values."""
        return {
            "kind": str(self.kind),
            "detail": self.detail,
            "rule": self.kind.rule,
            "tx": self.tx,
            "block": self.block,
            "batch_id": self.batch_id,
            "position": self.position,
        }

    @property
    def place(self) -> str:
        """Where it is, in words; empty when it has no particular place."""
        batch = None if self.batch_id is None else f"batch {self.batch_id}"
        position = None if self.position is None else f"position {self.position}"
        block = None if self.block is None else f"block {self.block}"
        return ", ".join(part for part in (batch, position, block, self.tx) if part)

    def __str__(self) -> str:
        return f"{self.detail} ({self.place})" if self.place else self.detail


def at_commitment(batch: BatchView, kind: Kind, detail: str) -> Contradiction:
    """Return a contradiction about the commitment of a batch."""
    return Contradiction(kind, detail, batch.tx_hash, batch.block_number, batch.batch_id)


def at_outcomes(
    batch: BatchView, kind: Kind, detail: str, position: int | None = None
) -> Contradiction:
    """Return a contradiction about the outcomes of a batch, or about the one at a position."""
    place = (batch.posted_tx, batch.posted_block, batch.batch_id, position)
    return Contradiction(kind, detail, *place)


@dataclass(frozen=True, slots=True)
class NotRerun:
    """An outcome that could not be run again, so it is neither confirmed nor contradicted."""

    batch_id: int
    position: int
    """Its place there."""
    why: str
    """What is missing."""
    how: str
    """What would make it possible; the same text for the same cause."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check."""

    name: str
    """What must hold."""
    passed: bool
    """Whether nothing contradicts it."""
    detail: str
    """What was compared, or what disagrees."""
    contradictions: tuple[Contradiction, ...] = ()
    """The contradictions, at most MAX_LISTED."""
    count: int = 0
    """Number of all contradictions."""
    notes: tuple[str, ...] = ()
    """What the check could not decide, at most MAX_LISTED; contradicts nothing."""
    not_rerun: tuple[NotRerun, ...] = ()
    """Outcomes that could not be run again."""
    is_open: bool = False
    """Whether part of it is undecided: then it is not called ok."""

    @property
    def word(self) -> str:
        """The result: ok, open or FAIL."""
        if not self.passed:
            return "FAIL"
        return "open" if self.is_open else "ok"

    def to_json(self) -> dict[str, Any]:
        """Return the check as JSON values, without the contradictions."""
        value: dict[str, Any] = {
            "name": self.name,
            "passed": self.passed,
            "open": self.is_open,
            "detail": self.detail,
            "notes": list(self.notes),
        }
        if self.not_rerun:
            value["not_rerun"] = [asdict(each) for each in self.not_rerun]
        return value


def summarise(
    name: str,
    found: Iterable[Contradiction],
    summary: str,
    *,
    notes: Iterable[str] = (),
    is_open: bool = False,
) -> Check:
    """Return a check that passes without contradictions, and otherwise names the first of them."""
    said = tuple(islice(notes, MAX_LISTED))
    remaining = iter(found)
    listed = tuple(islice(remaining, MAX_LISTED))
    if not listed:
        return Check(name, True, summary, notes=said, is_open=is_open)
    count = len(listed) + sum(1 for _ in remaining)
    more = count - SHOWN_PROBLEMS
    shown = "; ".join(map(str, listed[:SHOWN_PROBLEMS]))
    detail = shown + (f"; and {more} more" if more > 0 else "")
    return Check(name, False, detail, listed, count, said, is_open=is_open)
