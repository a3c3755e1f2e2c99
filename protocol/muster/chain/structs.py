"""What the contracts' views return and take, as frozen types. Field order is the ABI's.

Amounts are token wei, times Unix seconds of the chain's clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.chain.conversion import SolidityEnum, to_abi
from muster.protocol.encoding import abi_words, keccak
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import OutcomeRecord, Verdict

ZERO_ADDRESS = Address("0x" + "00" * 20)
"""What Solidity returns for nobody."""


class WorkerStatus(SolidityEnum):
    """Life of a worker."""

    NONE = "None"
    """Not registered."""
    ACTIVE = "Active"
    """May submit from its activation block on."""
    JAILED = "Jailed"
    """May not submit until it unjails."""
    EXITING = "Exiting"
    """Leaves; all stake unbonds."""
    BANNED = "Banned"
    """Excluded for fraud."""


@dataclass(frozen=True, slots=True)
class WorkerAccount:
    """A worker, as WorkerRegistry has it."""

    node: Address
    """The hot key that signs."""
    worker_id: int
    """Number in outcome records; 0 when not registered."""
    status: WorkerStatus
    """Life cycle."""
    active_from: int
    """First block in which it counts as active."""
    jailed_until: int
    """Before this time it stays jailed."""
    convictions: int
    """Fraud verdicts against it that stand."""


@dataclass(frozen=True, slots=True)
class StakeAccount:
    """An account's stake."""

    active_wei: int
    """Counts towards requirements."""
    unbonding_wei: int
    """Leaving, still slashable."""
    withdrawable_at: int
    """From when `unbonding_wei` may be withdrawn."""
    held_until: int
    """Before this time it is held back nevertheless, for one more unbonding period at most."""
    open_cases: int
    """Cases that hold it back in the same way."""


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
    """Hash of the task set."""
    recipe_hash: Hash32
    """Hash of the recipe."""
    calibration_hash: Hash32
    """Hash of the calibration."""
    terms: RunTerms
    """Price, slashes, quorum."""
    validators: tuple[Address, ...]
    """The validators."""


@dataclass(frozen=True, slots=True)
class PolicyCheckpoint:
    """A published policy version."""

    manifest_root: Hash32
    """Keccak-256 of the manifest; zero when never published."""
    beacon: Hash32
    """Hash of the publishing block, once recorded; zero before."""
    block_number: int
    """The publishing block."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The header of a batch, which calls about it hand in: the ledger keeps its hash only."""

    batch_id: int
    """Its number."""
    run_id: RunId
    """The run."""
    root: Hash32
    """Over its submissions until outcomes are posted, over its outcomes from then on."""
    count: int
    """Submissions."""
    units: int
    """Units they claim together."""
    price_per_unit: int
    """Token wei per unit, as it was at the commitment."""
    committed_at: int
    """When it was committed."""
    posted_at: int = 0
    """When its outcomes were posted; 0 before."""
    signers: int = 0
    """Seats of the validators that signed them, as a bitmap."""

    def commitment(self) -> Hash32:
        """Return what the ledger keeps of it while nothing in it was challenged."""
        digest = keccak(abi_words(*to_abi(self)))
        return Hash32(digest[:-1] + bytes([digest[-1] & 0xFE]))


@dataclass(frozen=True, slots=True)
class OutcomeProof:
    """An outcome, its place and the proof that it stands."""

    batch: Batch
    """The batch."""
    position: int
    """Its place there."""
    record: bytes
    """The 56-byte record."""
    proof: tuple[Hash32, ...] | list[Hash32]
    """Siblings up to the batch's root."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Outcomes of one batch and the proof that they stand."""

    batch: Batch
    """The batch."""
    positions: tuple[int, ...] | list[int]
    """Their places there, ascending."""
    records: bytes
    """Their records, joined."""
    siblings: tuple[Hash32, ...] | list[Hash32]
    """Nodes that the records do not give, as `merkle_multi_proof` returns them."""


@dataclass(frozen=True, slots=True)
class Standing:
    """An outcome as it stands now."""

    outcome: OutcomeRecord
    """As recorded."""
    leaf: Hash32
    """Its name in cases."""
    offence: Hash32
    """The file's name in slashes."""
    verdict: Verdict
    """The verdict that stands."""
    closes_at: int
    """When its challenge window closes."""
    is_final: bool
    """Whether the window is closed and no case is open."""


@dataclass(frozen=True, slots=True)
class CourtTerms:
    """What a deployment fixes about disputes."""

    challenge_bond: int
    """Wei that a challenger puts up."""
    draw_delay: int
    """Blocks after the challenge whose hash decides the jury."""
    jury_size: int
    """Jurors of a case, fewer when there are fewer that may sit."""
    commit_time: int
    """Seconds after the challenge until which jurors may commit."""
    reveal_time: int
    """Seconds after that until which they may reveal."""


class PauseCause(SolidityEnum):
    """Why the slashing of a run pauses."""

    CORRELATED_FAILURES = "CorrelatedFailures"
    """Too many independent workers failed one check."""
    KNOWN_GOOD_ITEM = "KnownGoodItem"
    """A validator failed an item that it knows to be good."""
    OTHER = "Other"
    """Anything else, which the evidence says."""


class Fault(SolidityEnum):
    """What a validator is punished for."""

    WRONG_VERDICT = "WrongVerdict"
    """It signed an outcome that a jury overturned."""
    ABSENT_JUROR = "AbsentJuror"
    """It did not reveal a vote."""
    MISSED_DEADLINE = "MissedDeadline"
    """A batch waited in vain for its outcomes."""
    DOUBLE_OUTCOME = "DoubleOutcome"
    """It signed two outcomes of one batch."""


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
    """Its hash."""
