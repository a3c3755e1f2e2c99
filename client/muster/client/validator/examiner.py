"""Examiner: judges one claim at a time for a validator: its file, its policy, the checks in order.

A claim whose file or policy cannot be had now is not judged: ApiError or PolicyUnavailable is
raised, and the validator tries again. Policies are fetched in the background, so a slow source of
one version delays no batch of another. Only a file that the orchestrator and all relays said to
lack, at the beginning and at the end of `file_patience_s`, counts as missing, which the check of
the file rejects (`check_file`). A relay that is silent may have it, and is awaited for longer.

Before a policy is loaded, its weights are looked at. If they are not finite, its work is rejected,
like every sample that cannot be prefilled: workers refuse such a policy. So what an engine makes of
it on some machine decides nothing. When the engine fails, its policy is loaded anew the next time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from muster.client.finite_policies import FinitePolicies
from muster.client.sources import LACKING
from muster.client.validator.checks import (
    ClaimedWork,
    FailedCheck,
    check_claim,
    check_file,
    check_size,
    unreadable,
)
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.judging import (
    Judgement,
    Rules,
    bounds_of,
    say_list_fault,
    unread,
    without_prefill,
)
from muster.client.validator.soundness import examine_surely, judge_generated, own_trouble
from muster.inference.engine import set_aside_in
from muster.lifecycle import ComputeThread
from muster.protocol.errors import (
    ApiError,
    EncodingError,
    EngineError,
    PolicyBroken,
    PolicyUnavailable,
)
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import Ticket
from muster.protocol.rollouts import Rollout
from muster.protocol.set_aside import NOTHING, SetAside

if TYPE_CHECKING:
    from muster.client.validator.context import ValidatorContext

FETCH_WAIT_S = 3.0
"""Seconds that a claim waits for the fetch of its policy version, which then goes on."""
FETCH_TURN_S = 60.0
"""Seconds after which a fetch makes way for another version; its verified chunks are kept."""
FETCH_REST_S = 10.0
"""Seconds after the start of a fetch that failed before the version is requested again."""
MOST_FETCHES = 4
"""Most versions that are fetched at the same time."""
logger = logging.getLogger(__name__)

SILENT_SHARE = 0.5
"""Share of the outcome deadline for which a file is requested while a relay is silent: the rest is
left to judge the batch."""


async def read_rows(
    claim: ClaimedWork, data: bytes, rules: Rules, decoder: FileDecoder, listed: SetAside
) -> list[Rollout] | Judgement:
    """Return the rows of a claim's file, or the judgement if the file is too large for the recipe
    or malformed; `listed` is the list of the claimed policy.
    """
    bounds = await asyncio.to_thread(bounds_of, claim, rules, listed)
    if finding := check_size(data, bounds.file_bytes):
        return unread(claim, finding)
    try:
        return await decoder.decode(data, bounds)
    except EncodingError as error:
        return unread(claim, unreadable(str(error)))


_Policy = tuple[PolicyVersion, Hash32]
"""A policy version, and the root of its manifest."""


class _Fetches:
    """Fetches policy versions in the background."""

    def __init__(self, context: ValidatorContext, fetched: Callable[[], object]) -> None:
        self._context = context
        self._fetched = fetched
        self._running: dict[_Policy, tuple[float, asyncio.Task[Path]]] = {}
        """By policy, when its fetch began; oldest first."""

    @property
    def versions(self) -> set[PolicyVersion]:
        """The versions that are being fetched, or were fetched and not used yet."""
        return {version for version, _ in self._running}

    def close(self) -> None:
        """Stop fetching."""
        for _, task in self._running.values():
            task.cancel()

    async def folder(self, policy: _Policy) -> Path:
        """Return a version's folder; raises PolicyUnavailable while it is still being fetched."""
        began, task = self._running.get(policy, (0.0, None))
        # A failure is repeated for a while: every batch of the version would wait for the next.
        is_old = self._context.clock() - began >= FETCH_REST_S
        # After a success, the fetcher looks whether the folder is still on the disk.
        if task is None or (task.done() and (is_old or not _has_failed(task))):
            self._running.pop(policy, None)
            task = await self._begin(policy)
        if not task.done() or task.cancelled():
            raise PolicyUnavailable(
                f"policy version {policy[0]} is still being fetched",
                hint="other versions are judged meanwhile; check the relays if it lasts",
            )
        if not _has_failed(task):
            self._running.pop(policy, None)
        return task.result()

    async def _begin(self, policy: _Policy) -> asyncio.Task[Path]:
        now = self._context.clock()
        over = [each for each, (_, task) in self._running.items() if task.done()]
        for each in over if len(self._running) >= MOST_FETCHES else ():
            del self._running[each]
        if len(self._running) >= MOST_FETCHES:
            longest = next(iter(self._running))
            began, displaced = self._running[longest]
            if now - began < FETCH_TURN_S:
                raise PolicyUnavailable(f"policy version {policy[0]} waits for other fetches")
            del self._running[longest]
            displaced.cancel()
        task = asyncio.create_task(self._fetch(*policy))
        task.add_done_callback(self._note)
        self._running[policy] = (now, task)
        await asyncio.wait([task], timeout=FETCH_WAIT_S)
        return task

    async def _fetch(self, version: PolicyVersion, root: Hash32) -> Path:
        context, longest_s = self._context, self._context.windows.outcome_deadline_s
        try:
            async with asyncio.timeout(longest_s):
                return await context.fetcher.fetch(context.run_id, version, root)
        except TimeoutError as error:
            raise PolicyUnavailable(
                f"policy version {version} did not arrive in {longest_s} s",
                hint="give faster relays with --relay URL",
            ) from error

    def _note(self, task: asyncio.Task[Path]) -> None:
        # The result must be retrieved even when nobody asks again.
        if not task.cancelled() and task.exception() is None:
            self._fetched()


def _has_failed(task: asyncio.Task[Path]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class Examiner:
    """Judges claims for one validator, one at a time: its engine holds one policy."""

    def __init__(
        self,
        context: ValidatorContext,
        failing_since: dict[object, float],
        fetched: Callable[[], object] = lambda: None,
    ) -> None:
        """`failing_since` maps each unavailable thing to the clock time of its first failure;
        `fetched` is called when a policy version has arrived.
        """
        self.context = context
        self.version: PolicyVersion | None = None
        """The policy version that is loaded."""
        self._failing_since = failing_since
        self._lacked_since: dict[Hash32, float] = {}
        """By file, when the orchestrator and all relays first said that they lack it."""
        self._policies = FinitePolicies()
        self._root: Hash32 | None = None
        self._compute = ComputeThread()
        self._turn = asyncio.Lock()
        self._fetches = _Fetches(context, fetched)
        self._used = Counter[PolicyVersion]()
        context.fetcher.named = self.in_use

    @property
    def broken(self) -> Collection[Hash32]:
        """Roots of policies whose weights are not finite."""
        return self._policies.broken

    def close(self) -> None:
        """Stop fetching and computing."""
        self._fetches.close()
        self._compute.close()

    def in_use(self, _run_id: RunId) -> set[PolicyVersion]:
        """Return the policy versions whose folders must stay on the disk."""
        loaded = () if self.version is None else (self.version,)
        return {*loaded, *+self._used} | self._fetches.versions

    @contextmanager
    def _using(self, version: PolicyVersion) -> Iterator[None]:
        self._used[version] += 1
        try:
            yield
        finally:
            self._used[version] -= 1

    async def judge(
        self, claim: ClaimedWork, *, proofs_first: bool = False
    ) -> tuple[Judgement, bytes | None]:
        """Return the judgement on a claim, and its file if it was read; `proofs_first` as for
        `examine`.

        Raises ValidatorDisturbed, and judges nothing, when this machine lacks resources.
        """
        with own_trouble():
            return await self._judge(claim, proofs_first)

    async def _judge(
        self, claim: ClaimedWork, proofs_first: bool
    ) -> tuple[Judgement, bytes | None]:
        if finding := check_claim(claim):
            return unread(claim, finding), None
        context, submission = self.context, claim.submission
        data = await self.file(submission.file_hash)
        if finding := check_file(data):
            return unread(claim, finding), None
        assert data is not None  # check_file
        policy = claim.terms.policies[submission.policy_version]
        listed = await self._listed(submission.policy_version, policy.root)
        rows = await read_rows(claim, data, context.rules, context.decoder, listed)
        if isinstance(rows, Judgement):
            return rows, data
        try:
            async with self.holding((submission.policy_version, policy.root)):
                judged = await self._compute.run(
                    examine_surely,
                    claim,
                    rows,
                    context.rules,
                    context.engine,
                    context.fingerprinted,
                    proofs_first=proofs_first,
                )
        except PolicyBroken as error:
            logger.error("a policy is broken, its work is rejected", extra={"error": str(error)})
            judged = unread(claim, without_prefill(error))
        return judged, data

    async def judge_own(self, ticket: Ticket) -> FailedCheck | None:
        """Return the failed check of an item that it generates itself, or None; then the policy is
        loaded anew the next time. Raises PolicyBroken when its weights are not finite.
        """
        policy = ticket.policy_version, ticket.policy_root
        rules, engine = self.context.rules, self.context.engine
        with own_trouble():
            async with self.holding(policy):
                finding = await self._compute.run(judge_generated, ticket, rules, engine)
                if finding is not None:
                    self.version = self._root = None
                return finding

    async def file(self, name: Hash32) -> bytes | None:
        """Return a submission's file; None once it is missing."""
        try:
            data = await self.context.from_any_source(
                self.context.api.file(name), lambda other: other.file(name)
            )
        except ApiError as error:
            if error.status in LACKING and self._is_missing(name):
                return None
            raise
        self._failing_since.pop(name, None)
        self._lacked_since.pop(name, None)
        return data

    def _is_missing(self, name: Hash32) -> bool:
        """Return whether a file that the orchestrator lacks was requested for long enough."""
        context, now = self.context, self.context.clock()
        others = context.other_sources
        silent_s = None if others is None else others.silent_s(name)
        waited_s = now - self._failing_since.setdefault(name, now)
        if silent_s is None:
            lacked_s = now - self._lacked_since.setdefault(name, now)
            return lacked_s >= context.file_patience_s
        # One relay that stays silent delays the first file so long, and later ones less.
        is_long = max(silent_s, waited_s) >= SILENT_SHARE * context.windows.outcome_deadline_s
        return is_long and waited_s >= context.file_patience_s

    async def _listed(self, version: PolicyVersion, root: Hash32) -> SetAside:
        """Return the list of a policy version, which need not be loaded."""
        if not self.context.rules.recipe.skips_problems:
            return NOTHING
        with self._using(version):
            folder = await self._fetches.folder((version, root))
            return await asyncio.to_thread(set_aside_in, folder)

    @asynccontextmanager
    async def holding(self, policy: _Policy) -> AsyncIterator[None]:
        """Hold the engine with a policy version, verified against the root on chain. Raises
        PolicyBroken when its weights are not finite.
        """
        with self._using(policy[0]):
            # Fetched before its turn, so that others can use the engine.
            folder = None if self._has(policy) else await self._fetches.folder(policy)
            async with self._turn:
                try:
                    if not self._has(policy):
                        await self._load(policy, folder or await self._fetches.folder(policy))
                    yield
                except EngineError:
                    # Memory may be corrupted.
                    self.version = self._root = None
                    raise

    def _has(self, policy: _Policy) -> bool:
        # An engine in its own process loses its policy when the process dies.
        has_lost_it = self.context.engine.policy_version != policy[0]
        return (self.version, self._root) == policy and not has_lost_it

    async def _load(self, policy: _Policy, folder: Path) -> None:
        version, root = policy
        await self._policies.require(root, version, folder)
        engine = self.context.engine
        # A failed load leaves the engine without a policy.
        self.version = self._root = None
        await self._compute.run(engine.load_policy, folder, version)
        say_list_fault(self.context.rules, engine)
        self.version, self._root = policy
