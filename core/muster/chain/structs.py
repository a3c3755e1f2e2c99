"""Structs that the contracts' views return and take, as frozen types. Field order is the ABI's.

Amounts are in token wei, times in Unix seconds of the chain's clock.
"""

from dataclasses import dataclass

from muster.chain.conversion import SolidityEnum, to_abi
from muster.protocol.encoding import abi_words, keccak
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Ticket, Verdict

ZERO_ADDRESS = Address("0x" + "00" * 20)
"""Solidity's value for no account."""
NO_HASH = Hash32(bytes(32))
"""Solidity's value for no hash."""


class WorkerStatus(SolidityEnum):
    """Life of a worker in a run."""

    NONE = "None"
    """Never joined it."""
    ACTIVE = "Active"
    """May submit from its activation block on."""
    JAILED = "Jailed"
    """May not submit until it comes back."""
    EXITING = "Exiting"
    """Leaves; all its stake in the run unbonds."""
    BANNED = "Banned"
    """Excluded for fraud."""


@dataclass(frozen=True, slots=True)
class WorkerAccount:
    """A worker in the whole network, as WorkerRegistry has it."""

    worker_id: int
    """Number in outcome records; 0 when it joined no run yet."""
    node: Address
    """The hot key that signs for it."""


@dataclass(frozen=True, slots=True)
class Member:
    """A worker in one run, as WorkerRegistry has it."""

    status: WorkerStatus
    """Life cycle."""
    active_from: int
    """First block in which it counts as active."""
    jailed_until: int
    """Before this time it stays jailed."""
    left_at: int
    """Time at which it began to leave, 0 while it stays; it is not responsible for later
    commitments."""
    convictions: int
    """Fraud verdicts against it that stand."""
    exact_convictions: int
    """Number of them that are exact frauds."""
    status_before: WorkerStatus
    """Its status before the first of these verdicts."""


@dataclass(frozen=True, slots=True)
class NodeConsent:
    """A node key's consent to serve a worker; the zero address keeps the present node."""

    node: Address
    """The key."""
    deadline: int
    """Time until which it is valid."""
    signature: bytes
    """EIP-712 `NodeRegistration` by the key."""


@dataclass(frozen=True, slots=True)
class Permit:
    """An ERC-2612 permit for StakeVault; `v` 0 for none."""

    deadline: int = 0
    """Time until which it is valid."""
    v: int = 0
    """Part of its signature."""
    r: Hash32 = NO_HASH
    """Part of its signature."""
    s: Hash32 = NO_HASH
    """Part of its signature."""


@dataclass(frozen=True, slots=True)
class StakeAccount:
    """The stake of an account in one run."""

    active_wei: int
    """Counts towards requirements."""
    unbonding_wei: int
    """Leaving, still slashable."""
    withdrawable_at: int
    """Time from which `unbonding_wei` may be withdrawn."""
    held: int
    """Fraud verdicts whose slash is not final yet."""


class Offence(SolidityEnum):
    """Offences for which stake is slashed."""

    NONE = "None"
    """Nothing."""
    FRAUD = "Fraud"
    """A statistical fraud."""
    EXACT_FRAUD = "ExactFraud"
    """A fraud that a single check proves."""
    DOUBLE_SUBMISSION = "DoubleSubmission"
    """Two submissions for one slot."""
    WRONG_VERDICT = "WrongVerdict"
    """A signature on outcomes that a jury overturned."""
    DOUBLE_OUTCOME = "DoubleOutcome"
    """Two outcomes of one batch."""
    ABSENT_JUROR = "AbsentJuror"
    """A juror's missing vote."""
    MISRECORD = "Misrecord"
    """A signature on a record that contradicts what its batch holds."""


@dataclass(frozen=True, slots=True)
class SlashSubject:
    """The subject of a slash: a stake and an offence."""

    run_id: RunId
    """The run it was staked for; 0 for the jurors' bench."""
    owner: Address
    """Owner of the stake."""
    offence: Offence
    """The offence."""
    tag: int
    """For frauds and double submissions `step << 32 | index`, else the batch or the case."""
    batch_id: int
    """The batch of the fraud's outcome; 0 for other offences."""
    position: int
    """Its place in the batch."""


@dataclass(frozen=True, slots=True)
class RunTerms:
    """A run's price, slashes and quorum."""

    price_per_unit: int
    """Token wei per unit."""
    fraud_ppm: int
    """Millionths of the stake slashed for a first statistical fraud."""
    exact_fraud_ppm: int
    """Millionths of the stake slashed for an exact fraud."""
    quorum: int
    """Validators that must sign an outcome."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The configuration of a run."""

    trainer: Address
    """Publishes checkpoints."""
    orchestrator: Address
    """Commits batches, signs tickets."""
    base_model_hash: Hash32
    """State hash of version 0's manifest."""
    task_set_hash: Hash32
    recipe_hash: Hash32
    calibration_hash: Hash32
    terms: RunTerms
    """Price, slashes, quorum."""
    validators: tuple[Address, ...]
    """The validators that are invited."""


@dataclass(frozen=True, slots=True)
class PolicyCheckpoint:
    """A published policy version."""

    manifest_root: Hash32
    """Keccak-256 of the manifest; zero when never published."""
    block_number: int
    """The publishing block."""


class BatchStatus(SolidityEnum):
    """Life of a batch."""

    COMMITTED = "Committed"
    """Waiting for its outcomes; after the deadline for judges of the network, or to be void."""
    JUDGED = "Judged"
    """A quorum of the run, or judges of the network, decided."""
    WITHHELD = "Withheld"
    """A quorum said that its data cannot be obtained."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The header of a batch. Calls about the batch pass it: the ledger stores only its hash."""

    batch_id: int
    """Its number."""
    run_id: RunId
    root: Hash32
    """Merkle root of its submissions, in order."""
    outcomes_root: Hash32
    """Merkle root of its outcomes; zero until these are posted."""
    count: int
    """Submissions."""
    units: int
    """Units that its submissions claim together."""
    price_per_unit: int
    """Token wei per unit, as it was at the commitment."""
    terms: int
    """Number of the run's terms at the commitment."""
    committed_at: int
    """Time of its commitment."""
    posted_at: int = 0
    """Time at which its outcomes were posted, or it was called withheld; 0 before."""
    signers: int = 0
    """Seats of the validators that signed, as a bitmap; 0 when the network's judges decided."""
    status: BatchStatus = BatchStatus.COMMITTED
    """Its status."""

    def commitment(self) -> Hash32:
        """Return the hash that the ledger stores for it while nothing in it has been challenged."""
        digest = keccak(abi_words(*to_abi(self)))
        return Hash32(digest[:-1] + bytes([digest[-1] & 0xFE]))


@dataclass(frozen=True, slots=True)
class LeasedWork:
    """A submission with its signatures and its ticket."""

    submission: Submission
    """The submission."""
    node_signature: bytes
    """Signature of the worker's node."""
    ticket: Ticket
    """The ticket that allows it."""
    ticket_signature: bytes
    """Signature of the run's orchestrator."""


@dataclass(frozen=True, slots=True)
class CommittedWork:
    """A submission, and the proof that a batch holds it."""

    submission: Submission
    """The submission."""
    node_signature: bytes
    """Signature of the worker's node."""
    proof: tuple[Hash32, ...]
    """Siblings of its leaf up to the batch's root; empty without a proof, or in a batch of one."""


@dataclass(frozen=True, slots=True)
class OutcomeProof:
    """An outcome, its place and the proof that it is recorded."""

    batch: Batch
    position: int
    """Its place in the batch."""
    record: bytes
    """The 56-byte record."""
    proof: tuple[Hash32, ...] | list[Hash32]
    """Siblings up to the root of the batch's outcomes."""


@dataclass(frozen=True, slots=True)
class RewardClaim:
    """Outcomes of one batch and the proof that they are recorded."""

    batch: Batch
    positions: tuple[int, ...] | list[int]
    """Their places in the batch, ascending."""
    records: bytes
    """Their records, joined."""
    siblings: tuple[Hash32, ...] | list[Hash32]
    """Tree nodes that do not follow from the records, as `merkle_multi_proof` returns them."""


@dataclass(frozen=True, slots=True)
class StandingOutcome:
    """An outcome in its present state."""

    outcome: OutcomeRecord
    leaf: Hash32
    """Its name in cases."""
    verdict: Verdict
    """The verdict that stands."""
    reason: Reason
    closes_at: int
    """Time at which its challenge window closes."""
    is_final: bool
    """Whether the window is closed and no case is open."""


class CaseStatus(SolidityEnum):
    """Life of a case."""

    NONE = "None"
    """There is none."""
    OPEN = "Open"
    """A jury is drawn, or votes."""
    UPHELD = "Upheld"
    """The recorded outcome stands."""
    OVERTURNED = "Overturned"
    """The jury's ruling replaces it."""


@dataclass(frozen=True, slots=True)
class CourtTerms:
    """A deployment's fixed rules for cases."""

    bond: int
    """Bond of a claimant, or of a worker that submits directly, in wei."""
    juror_fee: int
    """Most wei that a juror of the prevailing ruling earns."""
    draw_delay: int
    """Blocks from the opening to the block whose hash decides the jury."""
    jury_size: int
    """Jurors of a case; fewer if fewer are eligible."""
    commit_time: int
    """Seconds after the opening until which jurors may commit."""
    reveal_time: int
    """Further seconds in which they may reveal."""
    wrong_verdict_ppm: int
    """Millionths of its stake that a signer loses for outcomes that a jury overturned."""
    absence_ppm: int
    """Millionths of its stake that a juror loses for a vote that it did not cast."""

    @property
    def jury_time(self) -> int:
        """Seconds after which a case can be closed, even if no juror did anything."""
        return self.commit_time + self.reveal_time


class PauseCause(SolidityEnum):
    """Why the slashing of a run pauses."""

    CORRELATED_FAILURES = "CorrelatedFailures"
    """Too many independent workers failed one check."""
    KNOWN_GOOD_ITEM = "KnownGoodItem"
    """A validator's check failed on an item that is known to be good."""
    OTHER = "Other"
    """Another cause, described in the evidence."""


@dataclass(frozen=True, slots=True)
class Funds:
    """A run's money in RewardEscrow."""

    available_wei: int
    """Free for future batches."""
    reserved_wei: int
    """Reserved for committed batches that are not yet paid."""


@dataclass(frozen=True, slots=True)
class BlockId:
    """A block's number and hash."""

    number: int
    """Its height."""
    hash: Hash32
