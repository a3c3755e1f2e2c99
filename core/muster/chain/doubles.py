"""Doubles: two signatures where one was allowed. They prove themselves, and anyone may show them.

A validator may sign one set of outcomes of a batch, a worker's node one submission for a slot.
FaultCourt punishes signers of two. A validator that first called a batch withheld and judged it
later does not contradict itself.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from muster.chain.structs import Batch, Offence, OutcomeProof
from muster.chain.view_parts import BatchView
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.ids import Address, Hash32, to_hash32
from muster.protocol.messages import Outcomes, Submission

WITHHELD = keccak(b"")
"""The hash of no records, which says that a batch's data cannot be obtained."""

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class Court(Protocol[R_co]):
    """FaultCourt, with any type of answer."""

    def prove_double_outcome(
        self,
        batch: Batch,
        first: Outcomes,
        first_signature: bytes,
        second: Outcomes,
        second_signature: bytes,
    ) -> Awaitable[R_co]:
        """Slash a validator that signed two different outcomes of one batch."""

    def prove_double_submission(
        self,
        outcome: OutcomeProof,
        first: Submission,
        first_signature: bytes,
        second: Submission,
        second_signature: bytes,
    ) -> Awaitable[R_co]:
        """Slash and ban a worker whose node signed another submission for a judged slot."""


@dataclass(frozen=True, slots=True)
class SignedRecords:
    """A validator's signed outcomes of a batch."""

    records_hash: Hash32
    """Keccak-256 of the records."""
    signature: bytes
    """EIP-712 `Outcomes`."""

    def contradicts(self, other: SignedRecords) -> bool:
        """Return whether signing both is an offence."""
        hashes = {self.records_hash, other.records_hash}
        return len(hashes) == 2 and WITHHELD not in hashes

    def of(self, batch: BatchView) -> Outcomes:
        """Return the signed message."""
        return Outcomes(batch.batch_id, batch.root, self.records_hash)

    def to_json(self) -> dict[str, str]:
        """Return it as JSON values."""
        return {"records_hash": hex0x(self.records_hash), "signature": hex0x(self.signature)}

    @classmethod
    def from_json(cls, value: dict[str, str]) -> SignedRecords:
        """Return it from JSON values."""
        return cls(to_hash32(value["records_hash"]), bytes.fromhex(value["signature"][2:]))


@dataclass(frozen=True, slots=True)
class SignedWork:
    """A submission that a node signed."""

    submission: Submission
    signature: bytes
    """EIP-712 `Submission`."""


@dataclass(frozen=True, slots=True)
class DoubleOutcome:
    """Two different outcomes of one batch, signed by one validator."""

    owner: Address
    """The validator, whose stake is slashed."""
    batch: BatchView
    first: SignedRecords
    second: SignedRecords

    offence = Offence.DOUBLE_OUTCOME

    @property
    def filed(self) -> tuple[Address, Offence, int]:
        """Owner of the slashed stake, offence and tag, which identify the slash."""
        return self.owner, self.offence, self.batch.batch_id

    @property
    def words(self) -> str:
        """Description of the double."""
        return f"validator {self.owner} signed two outcomes of batch {self.batch.batch_id}"

    async def prove(self, court: Court[R]) -> R:
        """Send both to the court; raises ContractRevert."""
        batch, first, second = self.batch, self.first, self.second
        return await court.prove_double_outcome(
            batch.header(), first.of(batch), first.signature, second.of(batch), second.signature
        )


@dataclass(frozen=True, slots=True)
class DoubleSubmission:
    """Two submissions for one slot, signed by one worker's node; the first of them was judged."""

    batch: BatchView
    """The batch of the first submission."""
    position: int
    """Its place there."""
    first: SignedWork
    second: SignedWork

    offence = Offence.DOUBLE_SUBMISSION

    @property
    def owner(self) -> Address:
        """The worker, whose stake is slashed."""
        return self.first.submission.worker

    @property
    def filed(self) -> tuple[Address, Offence, int]:
        """Owner of the slashed stake, offence and tag, which identify the slash."""
        return self.owner, self.offence, tag_of(self.first.submission)

    @property
    def words(self) -> str:
        """Description of the double."""
        slot = self.first.submission
        return (
            f"worker {self.owner} signed two submissions for step {slot.step}, index {slot.index}"
        )

    async def prove(self, court: Court[R]) -> R:
        """Send both to the court; raises ContractRevert."""
        first, second = self.first, self.second
        proof = self.batch.prove(self.position)
        return await court.prove_double_submission(
            proof, first.submission, first.signature, second.submission, second.signature
        )


Double: TypeAlias = DoubleOutcome | DoubleSubmission
"""Two contradicting signatures that FaultCourt accepts as proof."""


def tag_of(submission: Submission) -> int:
    """Return the tag of a submission's slot in slashes."""
    return submission.step << 32 | submission.index
