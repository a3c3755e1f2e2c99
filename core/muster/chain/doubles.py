"""Doubles: two signatures where one was allowed. They prove themselves, and anyone may show them.

A validator signs one set of outcomes of a batch, a worker's node one submission for a slot. The
court of faults punishes who signed two. A validator that called a batch withheld and judged it
later contradicts nothing.
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
"""The hash of no records: that nothing of a batch can be had."""

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class Court(Protocol[R_co]):
    """The court of faults, and what it answers."""

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
    """A validator's word on a batch."""

    records_hash: Hash32
    """Keccak-256 of the records."""
    signature: bytes
    """EIP-712 `Outcomes`."""

    def contradicts(self, other: SignedRecords) -> bool:
        """Return whether nobody may sign both."""
        hashes = {self.records_hash, other.records_hash}
        return len(hashes) == 2 and WITHHELD not in hashes

    def of(self, batch: BatchView) -> Outcomes:
        """Return what was signed."""
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
    """A node's word on a slot."""

    submission: Submission
    signature: bytes
    """EIP-712 `Submission`."""


@dataclass(frozen=True, slots=True)
class DoubleOutcome:
    """Two different outcomes of one batch, signed by one validator."""

    owner: Address
    """The validator, whose stake it costs."""
    batch: BatchView
    first: SignedRecords
    second: SignedRecords

    offence = Offence.DOUBLE_OUTCOME

    @property
    def filed(self) -> tuple[Address, Offence, int]:
        """Whose stake it costs, and the offence and tag that the slash is filed under."""
        return self.owner, self.offence, self.batch.batch_id

    @property
    def words(self) -> str:
        """What it is, in words."""
        return f"validator {self.owner} signed two outcomes of batch {self.batch.batch_id}"

    async def prove(self, court: Court[R]) -> R:
        """Show both; raises ContractRevert."""
        batch, first, second = self.batch, self.first, self.second
        return await court.prove_double_outcome(
            batch.header(), first.of(batch), first.signature, second.of(batch), second.signature
        )


@dataclass(frozen=True, slots=True)
class DoubleSubmission:
    """Two submissions for one slot, signed by one worker's node; the first of them was judged."""

    batch: BatchView
    """The batch of the first."""
    position: int
    """Its place there."""
    first: SignedWork
    second: SignedWork

    offence = Offence.DOUBLE_SUBMISSION

    @property
    def owner(self) -> Address:
        """The worker, whose stake it costs."""
        return self.first.submission.worker

    @property
    def filed(self) -> tuple[Address, Offence, int]:
        """Whose stake it costs, and the offence and tag that the slash is filed under."""
        return self.owner, self.offence, tag_of(self.first.submission)

    @property
    def words(self) -> str:
        """What it is, in words."""
        slot = self.first.submission
        return (
            f"worker {self.owner} signed two submissions for step {slot.step}, index {slot.index}"
        )

    async def prove(self, court: Court[R]) -> R:
        """Show both; raises ContractRevert."""
        first, second = self.first, self.second
        proof = self.batch.prove(self.position)
        return await court.prove_double_submission(
            proof, first.submission, first.signature, second.submission, second.signature
        )


Double: TypeAlias = DoubleOutcome | DoubleSubmission
"""Two signatures that can be shown to the court of faults."""


def tag_of(submission: Submission) -> int:
    """Return the number of a slot in slashes."""
    return submission.step << 32 | submission.index
