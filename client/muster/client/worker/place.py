"""What a worker works with. Nothing of it belongs to the loop, all of it can be faked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.api import OrchestratorApi
from muster.client.worker.journal import SubmissionJournal
from muster.inference import InferenceEngine
from muster.protocol.eip712 import Domain
from muster.protocol.ids import Address, RunId
from muster.protocol.recipe import Recipe
from muster.shardcast import Fetcher
from muster.tasks import TaskSet
from muster.toploc import Calibration

if TYPE_CHECKING:
    from muster.client.facts import HistoryView


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Everything a worker works with."""

    run_id: RunId
    """The run."""
    worker: Address
    """The staking wallet it works for."""
    key: bytes
    """The node's private key."""
    domain: Domain
    """Of the ContributionLedger."""
    view: HistoryView
    """The chain, kept current by someone else."""
    now: Callable[[], Awaitable[int]]
    """Unix seconds of the chain's clock."""
    api: OrchestratorApi
    """The run's orchestrator."""
    fetcher: Fetcher
    """Where policies come from."""
    engine: InferenceEngine
    """What generates."""
    recipe: Recipe
    """The run's recipe."""
    calibration: Calibration
    """The limits that the run's validators apply."""
    task_set: TaskSet
    """The run's problems."""
    journal: SubmissionJournal
    """What was signed before."""
    poll_s: float
    """Shortest pause between two looks for work."""
    heartbeat_s: float
    """Seconds between signs of life."""
    keep_going: bool = False
    """Whether it stays when the run is over."""

    def __repr__(self) -> str:
        return f"WorkerPlace(run_id={self.run_id}, worker={self.worker!r})"
