"""The context of a validator: what its loop and its duties share; tests can replace all of it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.errors import ApiError
from muster.protocol.ids import Address, RunId

if TYPE_CHECKING:
    from muster.api import OrchestratorApi
    from muster.chain import RunView
    from muster.client.chain_facts import HistoryView
    from muster.client.validator.batches import OtherSources
    from muster.client.validator.calls import Windows
    from muster.client.validator.checking_proofs import CheckingStore
    from muster.client.validator.decoding import FileDecoder
    from muster.client.validator.judging import Rules
    from muster.client.validator.records import ConductStore, EvidenceStore, OutcomeJournal
    from muster.inference import InferenceEngine
    from muster.protocol.checking import Checking, CheckReport
    from muster.protocol.eip712 import Domain
    from muster.protocol.messages import Outcomes
    from muster.shardcast import Fetcher

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ValidatorContext:
    """One validator of one run: its key, its connections and its stores."""

    run_id: RunId
    key: bytes
    """The validator's private key."""
    domain: Domain
    """EIP-712 domain of the ContributionLedger."""
    view: HistoryView
    """View of the chain, kept up to date by another task."""
    api: OrchestratorApi
    """The run's orchestrator."""
    fetcher: Fetcher
    """Fetches policies."""
    engine: InferenceEngine
    """Engine for the prefill."""
    rules: Rules
    """The run's documents."""
    decoder: FileDecoder
    """Parser of unjudged files."""
    journal: OutcomeJournal
    """Journal of signed outcomes."""
    evidence: EvidenceStore
    """Store of evidence."""
    poll_s: float
    """Minimum seconds between two polls for batches."""
    file_patience_s: float
    """Seconds for which a file that the orchestrator and all relays lack is requested."""
    windows: Windows
    """Time windows on chain."""
    now: Callable[[], Awaitable[int]]
    """Returns the chain's time."""
    checks_everything: bool = False
    """Whether it also judges batches that it is not called for, after the others."""
    keep_going: bool = False
    """Whether it keeps running when the run is over and nothing can be disputed any more."""
    checked: CheckingStore | None = None
    """Store of recomputations; without it there are no proofs of checking."""
    other_sources: OtherSources | None = None
    """Other sources for content that the orchestrator does not show."""
    conducts: ConductStore | None = None
    """Measurements of workers' earlier submissions; without it each submission is judged alone."""
    clock: Callable[[], float] = time.monotonic
    """Clock in seconds, for deadlines and pauses."""

    def __repr__(self) -> str:
        return f"ValidatorContext(run_id={self.run_id})"

    @property
    def run(self) -> RunView:
        """The run's state on chain."""
        return self.view.runs[self.run_id]

    @property
    def fingerprinted(self) -> list[Address]:
        """Validators whose fingerprints are recomputed: itself and the run's others."""
        if self.checked is None:
            return []
        return sorted({address_of(self.key), *self.run.validators})

    async def from_any_source(
        self, asked: Awaitable[T], ask: Callable[[OtherSources], Awaitable[T]]
    ) -> T:
        """Return the answer of the orchestrator, `asked` already, else that of the other sources.

        Raises the orchestrator's ApiError when no source has an answer.
        """
        try:
            return await asked
        except ApiError as refused:
            if self.other_sources is None:
                raise
            try:
                return await ask(self.other_sources)
            except ApiError:
                raise refused from None

    def sign(self, message: Outcomes | Checking | CheckReport) -> bytes:
        """Return the validator's signature of a message."""
        return sign(digest(self.domain, message.struct_hash()), self.key)
