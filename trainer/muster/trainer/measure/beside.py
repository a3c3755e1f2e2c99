"""Evaluation beside training: any machine measures a run's versions as they appear.

  1. due       find the oldest version on chain that was not evaluated yet
  2. fetch     get its files from relays; check every byte against the root on chain
  3. evaluate  sample held-out problems, with an engine of choice
  4. report    send signed figures to the orchestrator, which shows who signed them
  5. note      write a line to evaluations.jsonl, from which a restart resumes

If it is killed between 4 and 5, it evaluates the version again, with the same noise. A version that
cannot be fetched is skipped if a relay offers a newer one, and one with which the engine failed
twice if a newer one is due; else both are tried again. At most `KEPT` versions are on the disk.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.api import OrchestratorApi
from muster.chain import Chain, ChainView, Event, EventReader, RunView, find_run, follow
from muster.inference import InferenceEngine
from muster.lifecycle import ComputeThread
from muster.protocol.errors import ApiError, EngineError, NotYet, PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.recipe import Recipe
from muster.shardcast import Fetcher, TrustedRoot
from muster.tasks import TaskSet, check_task_set
from muster.trainer.measure.evaluate import Evaluation, Evaluator
from muster.trainer.measure.figures import evaluation_entry, flat
from muster.trainer.measure.metrics import MetricsLog

logger = logging.getLogger(__name__)

KEPT = 2
"""Versions whose files are kept: the newest, and the one that its delta starts from."""
LOOK_S = 10.0
"""Longest pause in seconds before relays are asked again for a version."""
RETRY_S = 5.0
"""Seconds before an unreachable orchestrator is tried again."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What to evaluate, and how."""

    run: RunId
    rpc: str
    deployments: Path
    orchestrator: str
    """URL of the orchestrator: the recipe comes from it, figures go to it."""
    eval_set: Path
    """Task set of held-out problems."""
    state_dir: Path
    """Folder of the policies and the log of evaluations."""
    samples: int = 1
    """Samples per problem."""
    every: int = 1
    """Evaluate every N-th version; the last is always evaluated."""
    is_following: bool = False
    """Whether to stay for later versions, until the run is over."""
    relays: tuple[str, ...] = ()
    """URLs of relays; if empty, those that the orchestrator names."""
    poll_s: float = 1.0
    """Seconds between two polls of the chain."""


@dataclass(frozen=True, slots=True)
class Follower:
    """Evaluates versions of one run, the oldest first."""

    run: Callable[[], RunView]
    """The run as the chain has it now."""
    last: int
    """The version that ends the run; 0 for none."""
    every: int
    """Every N-th version is evaluated, and the last."""
    fetch: Callable[[PolicyVersion, Hash32], Awaitable[Path]]
    """Returns the folder of a version's files; raises PolicyUnavailable."""
    offers_newer: Callable[[PolicyVersion], Awaitable[bool]]
    """Tells whether a relay offers a newer version."""
    evaluator: Evaluator
    report: Callable[[PolicyVersion, Hash32, Mapping[str, float]], Awaitable[None]]
    """Sends figures to the orchestrator; raises ApiError when it refuses them."""
    log: MetricsLog
    """Log of the evaluations."""
    tell: Callable[[Evaluation], None] = lambda _: None
    """Called with every evaluation."""
    passed_over: set[PolicyVersion] = field(default_factory=set)
    """Versions that this process skips: no relay has them any more, or the engine failed twice."""
    failed: set[PolicyVersion] = field(default_factory=set)
    """Versions with which the engine failed."""

    @property
    def is_over(self) -> bool:
        """Whether no version can follow."""
        run = self.run()
        return bool(run.closed_at) or bool(self.last and self.last in run.checkpoints)

    def due(self) -> PolicyVersion | None:
        """Return the oldest version that still has to be evaluated."""
        return min(self._waiting(), default=None)

    def _waiting(self) -> list[PolicyVersion]:
        done = self.log.evaluated() | self.passed_over
        return [v for v in self.run().checkpoints if v not in done and self._is_wanted(v)]

    def _is_wanted(self, version: PolicyVersion) -> bool:
        newest = self.run().latest_version
        return version % self.every == 0 or (self.is_over and version == newest)

    async def evaluate_all(self) -> PolicyVersion | None:
        """Evaluate versions until none is due; return the version that must be tried again later,
        if there is one.
        """
        self.log.forget_unfinished()
        while (version := self.due()) is not None:
            root = self.run().checkpoints[version].manifest_root
            try:
                folder = await self.fetch(version, root)
            except PolicyUnavailable as error:
                said = {"policy_version": version, "error": str(error)}
                if not await self.offers_newer(version):
                    logger.warning("version not fetched yet", extra=said)
                    return version
                logger.warning("version skipped", extra=said)
                self.passed_over.add(version)
                continue
            try:
                await self._evaluate(version, root, folder)
            except (EngineError, NotYet) as error:
                said = {"policy_version": version, "error": str(error)}
                if not self._may_pass(version, error):
                    logger.warning("version not evaluated yet", extra=said)
                    return version
                logger.warning("version skipped", extra=said)
                self.passed_over.add(version)
        return None

    def _may_pass(self, version: PolicyVersion, error: EngineError | NotYet) -> bool:
        """Note a failure; tell whether a newer version comes first. A machine that grades nothing
        (NotYet) would grade nothing of that one either."""
        if isinstance(error, NotYet):
            return False
        is_repeated = version in self.failed
        self.failed.add(version)
        return is_repeated and version < max(self._waiting())

    async def _evaluate(self, version: PolicyVersion, root: Hash32, folder: Path) -> None:
        thread = ComputeThread()
        try:
            evaluation = await thread.run(self.evaluator.evaluate, folder, version)
        finally:
            thread.close()
        entry: dict[str, Any] = evaluation_entry(evaluation)
        await self.report(version, root, flat(entry))
        self.log.append(entry)
        self.tell(evaluation)
        reward = evaluation.reward and round(evaluation.reward.value, 4)
        logger.info("evaluated", extra={"policy_version": version, "reward": reward})


async def evaluate_run(
    wish: Wish,
    engine: InferenceEngine,
    key: bytes | None,
    tell: Callable[[Evaluation], None] = lambda _: None,
) -> None:
    """Evaluate a run's versions and call `tell` with each evaluation. Figures are signed with the
    key and reported; without a key they are only logged.

    Raises ConfigError when there is no such run, ApiError when the orchestrator refuses the figures
    or has no recipe. Without `is_following` it raises NotYet when a version must be tried again.
    """
    problems = TaskSet.open(wish.eval_set)
    check_task_set(problems)
    async with AsyncExitStack() as stack:
        chain = await stack.enter_async_context(await Chain.connect(wish.rpc, wish.deployments))
        view = ChainView()
        run = await find_run(chain, EventReader(chain), view, wish.run, pause_s=wish.poll_s)
        api = await stack.enter_async_context(
            OrchestratorApi(
                wish.orchestrator,
                key=key,
                domain=chain.domain("ContributionLedger"),
                audience=lambda: view.runs[wish.run].config.orchestrator,
            )
        )
        recipe = Recipe.from_bytes(await api.document(run.config.recipe_hash))
        relays = wish.relays or (await api.run_info(wish.run)).policy_sources
        fetcher = await stack.enter_async_context(
            Fetcher(
                relays,
                wish.state_dir / "policies",
                keep=KEPT,
                connects_to=None if wish.relays else api.connects_to,
            )
        )

        async def trust(_run: RunId, version: PolicyVersion) -> TrustedRoot | None:
            found = view.runs[wish.run].checkpoints.get(version)
            if found is None:
                return None
            return TrustedRoot(found.manifest_root, None, chain.domain("RunRegistry"))

        async def offers_newer(version: PolicyVersion) -> bool:
            return await fetcher.newest(wish.run, trust, after=version) is not None

        # Evaluations on another set, or with another number of samples, do not count.
        name = f"evaluations-{problems.hash().hex()[:16]}-{wish.samples}.jsonl"
        follower = Follower(
            run=lambda: view.runs[wish.run],
            last=recipe.training.steps,
            every=wish.every,
            fetch=lambda version, root: fetcher.fetch(wish.run, version, root),
            offers_newer=offers_newer,
            evaluator=Evaluator(problems, engine, recipe, samples=wish.samples),
            report=_reports(api, wish.run) if key is not None else _not_reported,
            log=MetricsLog(wish.state_dir / name),
            tell=tell,
        )
        await _follow(wish, chain, view, follower)


async def _follow(wish: Wish, chain: Chain, view: ChainView, follower: Follower) -> None:
    """Evaluate the versions on chain; with `is_following`, also later ones until the run is
    over."""
    changed = asyncio.Event()

    async def note(_events: list[Event]) -> None:
        changed.set()

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(follow(chain, view, poll_s=wish.poll_s, on_change=note))
        waiting = await follower.evaluate_all()
        while wish.is_following and not (follower.is_over and follower.due() is None):
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await changed.wait()
            changed.clear()
            await follower.evaluate_all()
        reading.cancel()
    if not wish.is_following and waiting is not None:
        raise NotYet(
            f"version {waiting} of run {wish.run} could not be evaluated yet",
            hint="start again later, or wait for it with --follow",
        )


def _reports(
    api: OrchestratorApi, run: RunId
) -> Callable[[PolicyVersion, Hash32, Mapping[str, float]], Awaitable[None]]:
    """Return a function that reports figures, and retries while the orchestrator is unreachable."""

    async def report(version: PolicyVersion, root: Hash32, figures: Mapping[str, float]) -> None:
        while True:
            try:
                return await api.post_evaluation(run, version, root, figures)
            except ApiError as error:
                # The orchestrator may be some blocks behind this process.
                if error.status < 500 and error.code != "version_unknown":
                    raise
                logger.warning("figures not reported yet", extra={"error": str(error)})
            await asyncio.sleep(RETRY_S)

    return report


async def _not_reported(version: PolicyVersion, root: Hash32, figures: Mapping[str, float]) -> None:
    """Do nothing."""
    del version, root, figures
