"""What the contracts' views return and take, as frozen types. Field order is the ABI's.

Amounts are token wei, times Unix seconds of the chain's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Self

from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.messages import OutcomeRecord, Verdict

ZERO_ADDRESS = Address("0x" + "00" * 20)
"""What Solidity returns for nobody."""


class WorkerStatus(StrEnum):
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


STATUSES = tuple(WorkerStatus)
"""By their number in Solidity."""


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


@dataclass(frozen=True, slots=True)
class StakeAccount:
    """An account's stake."""

    active_wei: int
    """Counts towards requirements."""
    unbonding_wei: int
    """Leaving, still slashable."""
    withdrawable_at: int
    """From when `unbonding_wei` may be withdrawn."""


@dataclass(frozen=True, slots=True)
class Escrow:
    """Stake held for one offence."""

    owner: Address
    """Whose stake it was."""
    reporter: Address
    """Who reported it; the zero address for nobody."""
    amount_wei: int
    """What is held; zero once settled."""


@dataclass(frozen=True, slots=True)
class StakeTotals:
    """Sums over all accounts of StakeVault."""

    active_wei: int
    """Active stake."""
    unbonding_wei: int
    """Unbonding stake."""
    escrowed_wei: int
    """Stake held for offences."""


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
    price_per_unit: int
    """Token wei per unit."""
    fraud_ppm: int
    """Millionths of the stake slashed for fraud."""
    quorum: int
    """Validators that must sign an outcome."""
    validators: tuple[Address, ...]
    """The validators."""


@dataclass(frozen=True, slots=True)
class RunTerms:
    """The part of a run that other contracts ask for."""

    orchestrator: Address
    """Commits batches."""
    fraud_ppm: int
    """Millionths of the stake slashed for fraud."""
    quorum: int
    """Validators that must sign an outcome."""
    paused: bool
    """Whether submissions are paused."""


@dataclass(frozen=True, slots=True)
class Seat:
    """An account's place among a run's validators."""

    number: int
    """Bit in sets of signers."""
    seated: bool
    """Whether it validates now."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """How some accounts stand to a run's quorum."""

    quorum: int
    """Validators that must sign an outcome."""
    seats: int
    """Seats of those accounts that validate now, as a bitmap."""
    stranger: Address | None
    """The first account that does not."""


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
    """A committed batch."""

    root: Hash32
    """Over its submissions; zero once outcomes are posted (its event keeps it)."""
    outcomes_root: Hash32
    """Over its outcomes; zero before."""
    run_id: RunId
    """The run; 0 for an unknown batch."""
    count: int
    """Submissions."""
    committed_at: int
    """When it was committed."""
    posted_at: int
    """When its outcomes were posted; 0 before."""


@dataclass(frozen=True, slots=True)
class OutcomeProof:
    """An outcome, its place and the proof that it was posted."""

    batch_id: int
    """The batch."""
    position: int
    """Its place there."""
    record: bytes
    """The 56-byte record."""
    proof: tuple[Hash32, ...] | list[Hash32]
    """Siblings up to the outcomes root."""


@dataclass(frozen=True, slots=True)
class SettledOutcome:
    """A posted outcome with the verdict that stands."""

    run_id: RunId
    """Its run."""
    record: OutcomeRecord
    """The outcome, with the verdict that stands."""
    is_final: bool
    """Whether the window is over and no case is open."""


@dataclass(frozen=True, slots=True)
class Case:
    """A dispute."""

    challenger: Address
    """Who challenged; the zero address when there is no case."""
    run_id: RunId
    """Whose validators vote."""
    voting_ends_at: int
    """Until when votes count."""
    votes_to_overturn: int
    """Votes for the challenger."""
    votes_to_uphold: int
    """Votes for the recorded verdict."""
    recorded_verdict: Verdict
    """As recorded."""
    claimed_verdict: Verdict
    """As the challenger claims."""
    closed: bool
    """Whether it is over."""
    overturned: bool
    """Whether the challenger won."""
    bond_wei: int
    """What the challenger put up."""


@dataclass(frozen=True, slots=True)
class Funds:
    """A run's money in RewardEscrow."""

    funded_wei: int
    """Received."""
    paid_wei: int
    """Paid out."""


@dataclass(frozen=True, slots=True)
class BlockId:
    """A block that was seen."""

    number: int
    """Its height."""
    hash: Hash32
    """Its hash."""


def abi_tuple(value: Any) -> tuple[Any, ...]:
    """Return a dataclass's fields as the tuple that the ABI encodes as a struct."""
    return tuple(getattr(value, field.name) for field in fields(value))


@dataclass(frozen=True, slots=True)
class LatestBlock:
    """The chain's head."""

    number: int
    """Its height."""
    hash: Hash32
    """Its hash."""
    timestamp: int
    """Its time."""

    @classmethod
    def from_rpc(cls, block: Any) -> Self:
        """Parse what `eth_getBlockByNumber` answers."""
        return cls(
            number=int(block["number"], 16),
            hash=Hash32(bytes.fromhex(block["hash"][2:])),
            timestamp=int(block["timestamp"], 16),
        )


def version_or_none(version: int, exists: bool) -> PolicyVersion | None:
    """Return a policy version, or None when there is none."""
    return PolicyVersion(version) if exists else None
