"""The methods of the chain's connection that the orchestrator calls; test fakes have them too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from muster.chain import Batch, CourtTerms, Deployment, OutcomeProof, PauseCause, Poll
from muster.chain.doubles import Court
from muster.chain.structs import CommittedWork
from muster.protocol.eip712 import Domain
from muster.protocol.ids import Address, Hash32, RunId, Step


class MinedPort(Protocol):
    """A transaction that was mined."""

    @property
    def block_number(self) -> int:
        """The block it is in."""


class LedgerPort(Protocol):
    """The writes to the ledger, and its constants."""

    async def commit_batch(
        self, run_id: RunId, root: Hash32, count: int, units: int
    ) -> tuple[int, MinedPort]:
        """Commit a batch; returns its id and the receipt."""

    async def post_outcomes(self, batch: Batch, records: bytes, signatures: bytes) -> object:
        """Record a batch's outcomes; the signatures are joined."""

    async def execute_fraud(self, outcome: OutcomeProof, work: CommittedWork) -> object:
        """Slash, and jail or ban, the worker of a fraud outcome, on its own signed submission."""

    async def finalise_fraud(self, outcome: OutcomeProof) -> object:
        """Release the escrow of a fraud whose window is over."""

    async def void_batch(self, batch: Batch) -> object:
        """Release the money reserved for a batch that nobody judged."""

    async def appeal_time(self) -> int:
        """Return the seconds after the deadline until which workers may call judges."""

    async def challenge_window(self) -> int:
        """Return the seconds during which an outcome may be challenged."""

    async def outcome_deadline(self) -> int:
        """Return the seconds after the commitment by which outcomes are due."""

    async def stake_per_unit(self) -> int:
        """Return the wei of stake behind one unit in flight."""


class RunsPort(Protocol):
    """One write of the run registry, and one of its constants."""

    async def pause_slashing(
        self, run_id: RunId, cause: PauseCause, reason: int, evidence_hash: Hash32
    ) -> object:
        """Pause the run's fraud executions for a limited time."""

    async def slash_cooldown(self) -> int:
        """Return the minimum seconds between two pauses."""


class CourtPort(Protocol):
    """One query to the court of the network."""

    async def terms(self) -> CourtTerms:
        """Return its fixed rules for cases."""


class EscrowPort(Protocol):
    """One query to the reward escrow."""

    async def is_paid(self, run_id: RunId, worker: Address, step: Step, index: int) -> bool:
        """Return whether a slot was paid."""


class ChainPort(Protocol):
    """The connection to the chain."""

    chain_id: int
    """EIP-155 chain id."""
    deployment: Deployment
    """Addresses of the contracts."""

    @property
    def account(self) -> Address | None:
        """The orchestrator's account."""

    @property
    def ledger(self) -> LedgerPort:
        """The contribution ledger."""

    @property
    def faults(self) -> Court[object]:
        """The court of faults."""

    @property
    def runs(self) -> RunsPort:
        """The run registry."""

    @property
    def court(self) -> CourtPort:
        """The court of the network."""

    @property
    def escrow(self) -> EscrowPort:
        """The reward escrow."""

    def once(self, label: str) -> ChainPort:
        """Return the chain for one write named `label`, which is executed once even if repeated."""

    def domain(self, contract: str) -> Domain:
        """Return the EIP-712 domain of a contract."""

    async def now(self) -> int:
        """Return the latest block's time."""

    async def deploy_hash(self) -> Hash32:
        """Return the hash of the block in which the contracts were deployed."""

    async def pending_transactions(self) -> int:
        """Return how many transactions of the account were sent and are not mined."""


class ReaderPort(Protocol):
    """Reads the chain's events."""

    async def poll(self) -> Poll:
        """Return the events since the last call."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of a deployment; times in seconds."""

    stake_per_unit: int
    """Wei of active stake behind one unit in flight."""
    outcome_deadline_s: int
    """Seconds after a commitment by which outcomes are due."""
    appeal_s: int
    """Seconds after that deadline until which workers may call judges of the network."""
    challenge_s: int
    """Seconds during which an outcome may be challenged."""
    slash_cooldown_s: int
    """Minimum seconds between two pauses of slashing."""
    commit_time_s: int
    """Seconds after the opening of a case until which jurors may commit."""


async def read_constants(chain: ChainPort) -> Constants:
    """Return the constants of the contracts."""
    ledger = chain.ledger
    return Constants(
        stake_per_unit=await ledger.stake_per_unit(),
        outcome_deadline_s=await ledger.outcome_deadline(),
        appeal_s=await ledger.appeal_time(),
        challenge_s=await ledger.challenge_window(),
        slash_cooldown_s=await chain.runs.slash_cooldown(),
        commit_time_s=(await chain.court.terms()).commit_time,
    )
