"""What a validator works with. Its loop and its duties share it; all of it can be faked."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.ids import Address, RunId

if TYPE_CHECKING:
    from muster.api import OrchestratorApi
    from muster.chain import RunView
    from muster.client.chain_facts import HistoryView
    from muster.client.validator.batches import Elsewhere
    from muster.client.validator.calls import Windows
    from muster.client.validator.checking import CheckingStore
    from muster.client.validator.decoding import FileDecoder
    from muster.client.validator.judging import Rules
    from muster.client.validator.records import ConductStore, EvidenceStore, OutcomeJournal
    from muster.inference import InferenceEngine
    from muster.protocol.checking import Checking, CheckReport
    from muster.protocol.eip712 import Domain
    from muster.protocol.messages import Outcomes
    from muster.shardcast import Fetcher


@dataclass(frozen=True, slots=True)
class ValidatorPlace:
    """One validator of one run: its key, what it asks, and what it keeps."""

    run_id: RunId
    key: bytes
    """The validator's private key."""
    domain: Domain
    """Of the ContributionLedger."""
    view: HistoryView
    """The chain, kept current by someone else."""
    api: OrchestratorApi
    """The run's orchestrator."""
    fetcher: Fetcher
    """Where policies come from."""
    engine: InferenceEngine
    """What prefills."""
    rules: Rules
    """What the run's documents say."""
    decoder: FileDecoder
    """What parses files nobody has judged."""
    journal: OutcomeJournal
    """What was signed before."""
    evidence: EvidenceStore
    """Where evidence goes."""
    poll_s: float
    """Shortest pause between two looks for batches."""
    file_patience_s: float
    """How long a file that the orchestrator does not have is asked for."""
    windows: Windows
    """How long the chain gives."""
    now: Callable[[], Awaitable[int]]
    """The chain's time."""
    checks_everything: bool = False
    """Whether it also judges what it is not called for, after the rest."""
    keep_going: bool = False
    """Whether it stays when the run is over and nothing of it can be disputed any more."""
    checked: CheckingStore | None = None
    """What it recomputed. Without a store it proves nothing about that."""
    elsewhere: Elsewhere | None = None
    """Shows what the orchestrator does not."""
    conducts: ConductStore | None = None
    """What is remembered of workers' submissions. Without it each is judged by itself."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, for patience and pauses."""

    def __repr__(self) -> str:
        return f"ValidatorPlace(run_id={self.run_id})"

    @property
    def run(self) -> RunView:
        """The run as the chain has it."""
        return self.view.runs[self.run_id]

    @property
    def fingerprinted(self) -> list[Address]:
        """Whose fingerprints are recomputed: its own and those of the run's other validators."""
        if self.checked is None:
            return []
        return sorted({address_of(self.key), *self.run.validators})

    def sign(self, message: Outcomes | Checking | CheckReport) -> bytes:
        """Return the validator's signature of a message."""
        return sign(digest(self.domain, message.struct_hash()), self.key)
