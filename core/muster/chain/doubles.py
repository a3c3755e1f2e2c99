"""Faults that prove themselves, and that anyone may show to FaultCourt.

Doubles are two signatures where one was allowed: a validator may sign one set of outcomes of a
batch, a worker's node one submission for a slot. A validator that first called a batch withheld
and judged it later does not contradict itself. A misrecord is one signature over a batch's root and
over records that contradict what the batch holds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from muster.chain.structs import Batch, CommittedWork, Offence, OutcomeProof
from muster.chain.view_parts import BatchView, RunView, WorkerView
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.ids import Address, Hash32, to_hash32
from muster.protocol.merkle import batch_proof, batch_root
from muster.protocol.messages import OutcomeRecord, Outcomes, Submission

WITHHELD = keccak(b"")
"""The hash of no records, which says that a batch's data cannot be obtained."""

MAX_ROLLOUTS = (1 << 16) - 1
"""Most rollouts that a record has room for."""

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
        work: CommittedWork,
        second: Submission,
        second_signature: bytes,
    ) -> Awaitable[R_co]:
        """Slash and ban a worker whose node signed another submission for a judged slot."""

    def prove_misrecord(
        self, outcome: OutcomeProof, work: CommittedWork, validator: Address
    ) -> Awaitable[R_co]:
        """Slash a validator that signed a record which contradicts what the batch holds."""


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
        second = self.second
        return await court.prove_double_submission(
            self.batch.prove(self.position),
            # The record names the first submission, so the batch's proof is not needed.
            CommittedWork(self.first.submission, self.first.signature, ()),
            second.submission,
            second.signature,
        )


@dataclass(frozen=True, slots=True)
class Misrecord:
    """A record that contradicts what its batch holds, signed by a validator."""

    owner: Address
    """The validator, whose stake is slashed."""
    batch: BatchView
    position: int
    """The record's place in the batch."""
    work: CommittedWork
    """The submission at that place."""

    offence = Offence.MISRECORD

    @property
    def filed(self) -> tuple[Address, Offence, int]:
        """Owner of the slashed stake, offence and tag, which identify the slash."""
        return self.owner, self.offence, self.batch.batch_id

    @property
    def words(self) -> str:
        """Description of the fault."""
        place = f"{self.batch.batch_id}:{self.position}"
        return f"validator {self.owner} signed a record of {place} that contradicts its batch"

    async def prove(self, court: Court[R]) -> R:
        """Send the record and the submission to the court; raises ContractRevert."""
        proof = self.batch.prove(self.position)
        return await court.prove_misrecord(proof, self.work, self.owner)


Fault: TypeAlias = DoubleOutcome | DoubleSubmission | Misrecord
"""A fault that FaultCourt accepts as proven."""


def each_once(faults: Iterable[Fault]) -> list[Fault]:
    """Return the faults without repetitions, and one double submission of each worker: the first
    that is proven bans it, and another costs a banned worker nothing.
    """
    of_worker = Offence.DOUBLE_SUBMISSION
    return list({f.owner if f.offence is of_worker else f.filed: f for f in faults}.values())


def find_misrecords(
    batch: BatchView,
    works: Sequence[SignedWork],
    run: RunView,
    workers: Mapping[int, WorkerView],
    domain: Domain,
) -> list[Misrecord]:
    """Return a misrecord for each signer of a judged batch if one of its records contradicts what
    it holds, else nothing. `works` are its submissions in order; none where they are not its own.
    `domain` is the ledger's.
    """
    if batch.records is None or not batch.signers or len(works) != batch.count:
        return []
    wrong = [
        place
        for place, (record, work) in enumerate(zip(batch.records, works, strict=True))
        if not is_record_of(record, work.submission, workers)
        and _is_signed(batch, work, run, domain)
    ]
    leaves = [work.submission.leaf() for work in works]
    if not wrong or batch_root(leaves) != batch.root:
        return []
    place = wrong[0]
    work = works[place]
    held = CommittedWork(work.submission, work.signature, tuple(batch_proof(leaves, place)))
    return [Misrecord(who, batch, place, held) for who in batch.signed_by(run.seats)]


def is_record_of(
    record: OutcomeRecord, submission: Submission, workers: Mapping[int, WorkerView]
) -> bool:
    """Return whether a record says of a submission what it says of itself: no more units, and its
    count of rollouts as far as a record has room for it. A record of worker 0 names nobody.
    """
    worker = workers.get(record.worker_id)
    is_worker = record.worker_id == 0 or (
        worker is not None and worker.address == submission.worker
    )
    said = (record.step, record.index, record.policy_version, record.file_hash, record.rollouts)
    slot = (submission.step, submission.index, submission.policy_version, submission.file_hash)
    rollouts = min(submission.rollouts, MAX_ROLLOUTS)
    return is_worker and said == (*slot, rollouts) and record.units <= submission.units


def _is_signed(batch: BatchView, work: SignedWork, run: RunView, domain: Domain) -> bool:
    """Return whether a key of its worker's, which may have been given up before, signed work of the
    batch's run.
    """
    member = run.members.get(work.submission.worker)
    node = signer_of(domain, work.submission, work.signature)
    if member is None or node is None or work.submission.run_id != batch.run_id:
        return False
    return member.answers_for(node, 0)


def tag_of(submission: Submission) -> int:
    """Return the tag of a submission's slot in slashes."""
    return submission.step << 32 | submission.index
