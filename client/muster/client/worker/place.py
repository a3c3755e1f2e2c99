"""What a worker works with. Its loop and its duties share it; all of it can be faked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muster.client.worker.station import Held, Station
from muster.protocol.eip712 import digest, sign
from muster.protocol.ids import Address, RunId

if TYPE_CHECKING:
    from muster.api import OrchestratorApi
    from muster.chain import ChainView, RunView
    from muster.client.chain_facts import HistoryView
    from muster.client.validator.judging import Rules
    from muster.client.worker.journal import SubmissionJournal
    from muster.inference import InferenceEngine
    from muster.protocol.eip712 import Domain
    from muster.protocol.messages import Submission
    from muster.shardcast import Fetcher


@dataclass(frozen=True, slots=True)
class NodePlace:
    """One node of a worker in a run: enough to see to work that was signed before."""

    run_id: RunId
    worker: Address
    """The staking wallet it works for."""
    key: bytes
    """The node's private key."""
    domain: Domain
    """Of the ContributionLedger."""
    view: ChainView
    """The chain, kept current by someone else."""
    api: OrchestratorApi | None
    """The run's orchestrator, if it is asked."""
    journal: SubmissionJournal
    """What was signed before."""
    poll_s: float
    """Shortest pause between two looks for work."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run_id={self.run_id}, worker={self.worker!r})"

    @property
    def run(self) -> RunView:
        """The run as the chain has it."""
        return self.view.runs[self.run_id]

    def sign(self, submission: Submission) -> bytes:
        """Return the node's signature of a submission."""
        return sign(digest(self.domain, submission.struct_hash()), self.key)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class WorkerPlace(NodePlace):
    """A node that generates."""

    view: HistoryView
    """The chain, with how workers stood in earlier blocks."""
    api: OrchestratorApi
    """The run's orchestrator."""
    now: Callable[[], Awaitable[int]]
    """Unix seconds of the chain's clock."""
    fetcher: Fetcher
    """Where policies come from."""
    engine: InferenceEngine
    """What generates."""
    rules: Rules
    """What the run's documents say."""
    heartbeat_s: float
    """Seconds between signs of life."""
    keep_going: bool = False
    """Whether it stays when the run is over."""
    tickets_per_engine: int = 1
    """Loops that share an engine."""
    station: Station = field(default_factory=Station)
    """Who shares the engine."""
    held: Held = field(default_factory=Held)
    """The tickets that the node's loops work on."""
