"""What the contracts' views return and take, as frozen types. Field order is the ABI's.

Amounts are token wei, times Unix seconds of the chain's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.chain.conversion import SolidityEnum, to_abi
from muster.protocol.encoding import abi_words, keccak
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Ticket, Verdict

ZERO_ADDRESS = Address("0x" + "00" * 20)
"""What Solidity returns for nobody."""
NO_HASH = Hash32(bytes(32))
"""What Solidity returns for no hash."""


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
    """When it began to leave; it answers for nothing that is committed later. 0 while it stays."""
    convictions: int
    """Fraud verdicts against it that stand."""
    exact_convictions: int
    """How many of them are exact."""
    status_before: WorkerStatus
    """Its status at the first of them."""


@dataclass(frozen=True, slots=True)
class NodeConsent:
    """A node key's consent to serve a worker; the zero address keeps the one that serves."""

    node: Address
    """The key."""
    deadline: int
    """Until when it holds."""
    signature: bytes
    """EIP-712 `NodeRegistration` by the key."""


@dataclass(frozen=True, slots=True)
class Permit:
    """An ERC-2612 permit for StakeVault; `v` 0 for none."""

    deadline: int = 0
    """Until when it holds."""
    v: int = 0
    """Of its signature."""
    r: Hash32 = NO_HASH
    """Of its signature."""
    s: Hash32 = NO_HASH
    """Of its signature."""


@dataclass(frozen=True, slots=True)
class StakeAccount:
    """What an account has staked for one run."""

    active_wei: int
    """Counts towards requirements."""
    unbonding_wei: int
    """Leaving, still slashable."""
    withdrawable_at: int
    """From when `unbonding_wei` may be withdrawn."""
    held: int
    """Fraud verdicts whose slash waits to be final."""


class Offence(SolidityEnum):
    """What stake is taken for."""

    NONE = "None"
    """Nothing."""
    FRAUD = "Fraud"
    """A statistical fraud."""
    EXACT_FRAUD = "ExactFraud"
    """A fraud that one look proves."""
    DOUBLE_SUBMISSION = "DoubleSubmission"
    """Two submissions for one slot."""
    WRONG_VERDICT = "WrongVerdict"
    """A signature on outcomes that a jury overturned."""
    DOUBLE_OUTCOME = "DoubleOutcome"
    """Two outcomes of one batch."""
    ABSENT_JUROR = "AbsentJuror"
    """A vote that was not cast."""


@dataclass(frozen=True, slots=True)
class SlashSubject:
    """Whose stake is taken, and what for."""

    run_id: RunId
    """The run it was staked for; 0 for the jurors' bench."""
    owner: Address
    """Whose."""
    offence: Offence
    """What for."""
    tag: int
    """For frauds and double submissions `step << 32 | index`, else the batch or the case."""
    batch_id: int
    """The batch of the outcome that a fraud is; else 0."""
    position: int
    """Its place there."""


@dataclass(frozen=True, slots=True)
class RunTerms:
    """What a run pays and punishes, and how many must agree."""

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
    """What a run is made of."""

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
    """Waits for its outcomes, and then for judges of the network or to be void."""
    JUDGED = "Judged"
    """A quorum of the run, or judges of the network, decided."""
    WITHHELD = "Withheld"
    """A quorum said that nothing of it can be had."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The header of a batch, which calls about it hand in: the ledger keeps its hash only."""

    batch_id: int
    """Its number."""
    run_id: RunId
    root: Hash32
    """Over its submissions until outcomes are posted, over its outcomes from then on."""
    count: int
    """Submissions."""
    units: int
    """Units they claim together."""
    price_per_unit: int
    """Token wei per unit, as it was at the commitment."""
    terms: int
    """Number of the run's terms at the commitment."""
    committed_at: int
    """When it was committed."""
    posted_at: int = 0
    """When its outcomes were posted, or it was called withheld; 0 before."""
    signers: int = 0
    """Seats of the validators that signed, as a bitmap; 0 when the network's judges decided."""
    status: BatchStatus = BatchStatus.COMMITTED
    """Where it stands."""

    def commitment(self) -> Hash32:
        """Return what the ledger keeps of it while nothing in it was challenged."""
        digest = keccak(abi_words(*to_abi(self)))
        return Hash32(digest[:-1] + bytes([digest[-1] & 0xFE]))


@dataclass(frozen=True, slots=True)
class LeasedWork:
    """A submission with all that proves it."""

    submission: Submission
    """The claim."""
    node_signature: bytes
    """Its worker's node's."""
    ticket: Ticket
    """The right to it."""
    ticket_signature: bytes
    """The run's orchestrator's."""


@dataclass(frozen=True, slots=True)
class OutcomeProof:
    """An outcome, its place and the proof that it stands."""

    batch: Batch
    position: int
    """Its place there."""
    record: bytes
    """The 56-byte record."""
    proof: tuple[Hash32, ...] | list[Hash32]
    """Siblings up to the batch's root."""


@dataclass(frozen=True, slots=True)
class RewardClaim:
    """Outcomes of one batch and the proof that they stand."""

    batch: Batch
    positions: tuple[int, ...] | list[int]
    """Their places there, ascending."""
    records: bytes
    """Their records, joined."""
    siblings: tuple[Hash32, ...] | list[Hash32]
    """Nodes that the records do not give, as `merkle_multi_proof` returns them."""


@dataclass(frozen=True, slots=True)
class StandingOutcome:
    """An outcome as it stands now."""

    outcome: OutcomeRecord
    leaf: Hash32
    """Its name in cases."""
    verdict: Verdict
    """The verdict that stands."""
    reason: Reason
    closes_at: int
    """When its challenge window closes."""
    is_final: bool
    """Whether the window is closed and no case is open."""


class CaseStatus(SolidityEnum):
    """Life of a case."""

    NONE = "None"
    """There is none."""
    OPEN = "Open"
    """A jury is drawn, or votes."""
    UPHELD = "Upheld"
    """What is recorded stands."""
    OVERTURNED = "Overturned"
    """The jury's ruling stands in its place."""


@dataclass(frozen=True, slots=True)
class CourtTerms:
    """What a deployment fixes about cases."""

    bond: int
    """Wei that a claimant, or a worker that submits by itself, puts up."""
    juror_fee: int
    """Wei that a juror of the prevailing ruling earns at most."""
    draw_delay: int
    """Blocks after the opening whose hash decides the jury."""
    jury_size: int
    """Jurors of a case, fewer when fewer may sit."""
    commit_time: int
    """Seconds after the opening until which jurors may commit."""
    reveal_time: int
    """Seconds after that until which they may reveal."""
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
    """A validator failed an item that it knows to be good."""
    OTHER = "Other"
    """Anything else, which the evidence says."""


@dataclass(frozen=True, slots=True)
class Funds:
    """A run's money in RewardEscrow."""

    available_wei: int
    """Free for batches to come."""
    reserved_wei: int
    """Set aside for batches committed and not yet paid."""


@dataclass(frozen=True, slots=True)
class BlockId:
    """A block that was seen."""

    number: int
    """Its height."""
    hash: Hash32
