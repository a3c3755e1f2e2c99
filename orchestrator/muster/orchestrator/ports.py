"""What the orchestrator needs of the chain, as protocols: `muster.chain` fits, so do test fakes.

Only reading and the four ledger writes are here. Nothing else of the chain is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from muster.protocol.eip712 import Domain
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.messages import OutcomeRecord, Submission


class WorkerPort(Protocol):
    """A worker as the chain has it."""

    @property
    def address(self) -> Address:
        """The staking wallet."""

    @property
    def worker_id(self) -> int:
        """Its number in outcome records."""

    @property
    def node(self) -> Address:
        """The hot key that signs for it."""

    @property
    def status(self) -> str:
        """Active, Jailed, Exiting or Banned."""

    @property
    def active_from(self) -> int:
        """First block in which it counts as active."""

    @property
    def active_wei(self) -> int:
        """Its stake that is not unbonding."""


class ConfigPort(Protocol):
    """A run's configuration, the part the orchestrator reads."""

    @property
    def trainer(self) -> Address:
        """Publishes checkpoints."""

    @property
    def orchestrator(self) -> Address:
        """Commits batches, signs tickets."""

    @property
    def task_set_hash(self) -> Hash32:
        """Hash of the task set."""

    @property
    def recipe_hash(self) -> Hash32:
        """Hash of the recipe."""

    @property
    def calibration_hash(self) -> Hash32:
        """Hash of the calibration."""

    @property
    def price_per_unit(self) -> int:
        """Token wei per unit."""

    @property
    def quorum(self) -> int:
        """Validators that must agree."""


class CheckpointPort(Protocol):
    """A published policy version."""

    @property
    def version(self) -> PolicyVersion:
        """Its number."""

    @property
    def manifest_root(self) -> Hash32:
        """Root of its manifest."""

    @property
    def beacon(self) -> Hash32:
        """Hash of the publishing block."""

    @property
    def block_number(self) -> int:
        """The publishing block."""


class RunPort(Protocol):
    """A run as the chain has it."""

    @property
    def config(self) -> ConfigPort:
        """What it was created with."""

    @property
    def validators(self) -> Sequence[Address]:
        """The current validators."""

    @property
    def paused(self) -> bool:
        """Whether submissions are paused."""

    @property
    def funded_wei(self) -> int:
        """Reward deposited."""

    @property
    def paid_wei(self) -> int:
        """Reward paid out."""

    @property
    def checkpoints(self) -> Mapping[PolicyVersion, CheckpointPort]:
        """Published versions."""

    @property
    def latest_version(self) -> PolicyVersion | None:
        """The newest version."""


class BatchPort(Protocol):
    """A committed batch."""

    @property
    def batch_id(self) -> int:
        """Its number."""

    @property
    def run_id(self) -> RunId:
        """Its run."""

    @property
    def root(self) -> Hash32:
        """Root over its submissions."""

    @property
    def count(self) -> int:
        """Submissions."""

    @property
    def committed_at(self) -> int:
        """Chain time of the commitment."""

    @property
    def tx_hash(self) -> str:
        """The committing transaction."""

    @property
    def records(self) -> Sequence[OutcomeRecord] | None:
        """Outcomes in batch order, once posted."""

    @property
    def posted_at(self) -> int | None:
        """Chain time of the outcomes, once posted."""

    @property
    def posted_tx(self) -> str | None:
        """The transaction that posted them."""


class SlashPort(Protocol):
    """An executed fraud verdict."""

    @property
    def worker(self) -> Address:
        """Who lost stake."""

    @property
    def amount_wei(self) -> int:
        """How much."""

    @property
    def tx_hash(self) -> str:
        """The executing transaction."""

    @property
    def batch_id(self) -> int | None:
        """The batch of the outcome."""

    @property
    def position(self) -> int | None:
        """Its place in the batch."""

    @property
    def state(self) -> str:
        """Escrowed, released or restored."""


class PaymentPort(Protocol):
    """A claim that was paid."""

    @property
    def run_id(self) -> RunId:
        """The run that paid."""

    @property
    def worker(self) -> Address:
        """Who was paid."""

    @property
    def units(self) -> int:
        """For how many units."""

    @property
    def amount_wei(self) -> int:
        """How much."""


class ViewPort(Protocol):
    """The projection of the chain's events."""

    @property
    def workers(self) -> Mapping[Address, WorkerPort]:
        """By staking wallet."""

    @property
    def worker_by_node(self) -> Mapping[Address, WorkerPort]:
        """By hot key."""

    @property
    def runs(self) -> Mapping[RunId, RunPort]:
        """By run id."""

    @property
    def batches(self) -> Mapping[int, BatchPort]:
        """By batch id."""

    @property
    def slashes(self) -> Sequence[SlashPort]:
        """In chain order."""

    @property
    def payments(self) -> Sequence[PaymentPort]:
        """In chain order."""

    def apply(self, event: Any) -> None:
        """Take in one event."""

    def rewind(self, block_number: int) -> None:
        """Drop everything after a block."""

    def slot_used(self, run_id: RunId, worker_id: int, step: int, index: int) -> bool:
        """Return whether the slot has an outcome."""


class EventPort(Protocol):
    """One contract event."""

    @property
    def name(self) -> str:
        """Its name in the ABI."""

    @property
    def args(self) -> Mapping[str, Any]:
        """Its arguments, snake_case."""


class LedgerPort(Protocol):
    """The four writes of the orchestrator, and two constants."""

    async def commit_batch(
        self, run_id: RunId, root: Hash32, count: int, units: int
    ) -> tuple[int, object]:
        """Commit a batch; returns its id and the receipt."""

    async def post_outcomes(
        self, batch_id: int, records: bytes, signatures: Sequence[bytes]
    ) -> object:
        """Record a batch's outcomes."""

    async def execute_fraud(
        self, outcome: Any, submission: Submission, node_signature: bytes
    ) -> object:
        """Slash and ban the worker of a fraud outcome, on its own signed submission."""

    async def finalise_fraud(self, outcome: Any) -> object:
        """Release the escrow of a fraud whose window is over."""

    async def challenge_window(self) -> int:
        """Return the seconds during which an outcome may be challenged."""

    async def outcome_deadline(self) -> int:
        """Return the seconds after the commitment by which outcomes are due."""


class ChainPort(Protocol):
    """The connection to the chain."""

    @property
    def chain_id(self) -> int:
        """EIP-155 chain id."""

    @property
    def account(self) -> Address | None:
        """The orchestrator's account."""

    @property
    def ledger(self) -> LedgerPort:
        """The contribution ledger."""

    def domain(self, contract: str) -> Domain:
        """Return the EIP-712 domain of a contract."""

    async def now(self) -> int:
        """Return the latest block's time."""


class PollPort(Protocol):
    """What has happened on chain since the last read."""

    @property
    def events(self) -> Sequence[EventPort]:
        """In chain order."""

    @property
    def rewound_to(self) -> int | None:
        """The block after which earlier events are void, after a reorg."""


class ReaderPort(Protocol):
    """Reads the chain's events."""

    async def poll(self) -> PollPort:
        """Return the events since the last call."""
