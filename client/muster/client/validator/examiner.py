"""One claim at a time on one engine: its file, its policy, the ordered checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.api import OrchestratorApi
from muster.client.validator.checking import CheckingDuty
from muster.client.validator.checks import Claim, Finding, check_claim, check_file, unreadable
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.elsewhere import Elsewhere
from muster.client.validator.judging import Judgement, Rules, examine, unread
from muster.client.validator.soundness import judge_generated
from muster.inference import InferenceEngine
from muster.lifecycle import ComputeThread
from muster.protocol.errors import ApiError, EncodingError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import Ticket
from muster.protocol.rollouts import Rollout
from muster.shardcast import Fetcher

_LASTINGLY_MISSING = frozenset({404, 410})
"""Answers that say a file is not there."""


@dataclass
class Examiner:
    """Judges claims; batches and cases come side by side, and its engine holds one policy."""

    run_id: RunId
    """The run."""
    api: OrchestratorApi
    """Where files come from."""
    fetcher: Fetcher
    """Where policies come from."""
    engine: InferenceEngine
    """What prefills."""
    rules: Rules
    """What the run's documents say."""
    decoder: FileDecoder
    """What parses files nobody has judged."""
    checking: CheckingDuty | None
    """For whom fingerprints of what is recomputed are taken."""
    file_patience_s: float
    """How long a file that the orchestrator does not have is asked for."""
    failing_since: dict[object, float]
    """When what cannot be had first failed, by what it is."""
    clock: Callable[[], float]
    """Seconds."""
    elsewhere: Elsewhere | None = None
    """Shows files that the orchestrator does not."""
    version: PolicyVersion | None = None
    """The policy version that is loaded."""
    _root: Hash32 | None = None
    _compute: ComputeThread = field(default_factory=ComputeThread)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def close(self) -> None:
        """Stop computing."""
        self._compute.close()

    async def judge(self, claim: Claim) -> tuple[Judgement, bytes | None]:
        """Return the judgement on a claim, and its file if it was read."""
        if finding := check_claim(claim):
            return unread(claim, finding), None
        data = await self.file(claim.submission.file_hash)
        if finding := check_file(data):
            return unread(claim, finding), None
        assert data is not None  # check_file
        try:
            rows = await self.rows(data)
        except EncodingError as error:
            return unread(claim, unreadable(str(error))), data
        policy = claim.terms.policies[claim.submission.policy_version]
        async with self._turn:
            await self.load(claim.submission.policy_version, policy.root)
            seats = self.checking.seats() if self.checking else ()
            judged = await self._compute.run(examine, claim, rows, self.rules, self.engine, seats)
            return judged, data

    async def judge_own(self, ticket: Ticket) -> Finding | None:
        """Return what it would find in work that it generates itself, see `soundness`."""
        async with self._turn:
            await self.load(ticket.policy_version, ticket.policy_root)
            return await self._compute.run(judge_generated, ticket, self.rules, self.engine)

    async def file(self, name: Hash32) -> bytes | None:
        """Return a submission's file; None once the orchestrator has lacked it for long enough, and
        nobody else shows it.
        """
        try:
            data = await self._shown(name)
        except ApiError as error:
            since = self.failing_since.setdefault(name, self.clock())
            waited_s = self.clock() - since
            if error.status in _LASTINGLY_MISSING and waited_s >= self.file_patience_s:
                return None
            raise
        self.failing_since.pop(name, None)
        return data

    async def _shown(self, name: Hash32) -> bytes:
        try:
            return await self.api.file(name)
        except ApiError as refused:
            if self.elsewhere is None:
                raise
            try:
                return await self.elsewhere.file(name)
            except ApiError:
                raise refused from None

    async def rows(self, data: bytes) -> list[Rollout]:
        """Return a file's rows; raises EncodingError when it is none of a submission."""
        sampling = self.rules.recipe.sampling
        most = sampling.problems_per_submission * sampling.samples_per_problem
        return await self.decoder.decode(data, max_rows=most)

    async def load(self, version: PolicyVersion, root: Hash32) -> None:
        """Load a policy version, verified against the root on chain."""
        if (self.version, self._root) == (version, root):
            return
        folder = await self.fetcher.fetch(self.run_id, version, root)
        # A load that fails leaves the engine without any policy.
        self.version = self._root = None
        await self._compute.run(self.engine.load_policy, folder, version)
        self.version, self._root = version, root
