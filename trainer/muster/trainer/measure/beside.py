"""Evaluation beside training: any machine measures a run's versions as they appear.

  1. due       the oldest version on chain that was not evaluated yet
  2. fetch     its files from relays, every byte checked against the root on chain
  3. evaluate  on held-out problems, with an engine of choice
  4. report    signed figures to the orchestrator, which says who signed them
  5. note      a line in evaluations.jsonl: where a later start goes on

Killed between 4 and 5 it evaluates the version again, with the same noise. A version that relays
have dropped is passed over. At most `KEPT` versions are on the disk.
"""

from __future__ import annotations

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
from muster.protocol.errors import ApiError, ConfigError, PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.recipe import Recipe
from muster.shardcast import Fetcher
from muster.tasks import TaskSet, check_task_set
from muster.trainer.measure.evaluate import Evaluation, Evaluator
from muster.trainer.measure.figures import evaluation_entry, flat
from muster.trainer.measure.metrics import MetricsLog

logger = logging.getLogger(__name__)

KEPT = 2
"""Versions whose files stay: the newest, and the one that its delta starts from."""
LOOK_S = 10.0
"""Longest pause before relays are asked again for what they did not have."""
RETRY_S = 5.0
"""Pause before an orchestrator that was away is asked again."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is evaluated, and with what."""

    run: RunId
    rpc: str
    deployments: Path
    orchestrator: str
    """Its URL: the recipe comes from it, figures go to it."""
    eval_set: Path
    """Task set of held-out problems."""
    state_dir: Path
    """Policies, and what was evaluated."""
    samples: int = 1
    """Samples per problem."""
    every: int = 1
    """Evaluate every so many versions; the last is always evaluated."""
    is_following: bool = False
    """Whether to stay for later versions, until the run is over."""
    relays: tuple[str, ...] = ()
    """Where versions come from; those that the orchestrator names without any."""
    poll_s: float = 1.0
    """Seconds between looks at the chain."""


@dataclass(frozen=True, slots=True)
class Follower:
    """Evaluates versions of one run, the oldest first."""

    run: Callable[[], RunView]
    """The run as the chain has it now."""
    last: int
    """The version that ends the run; 0 for none."""
    every: int
    """Every so many versions are evaluated, and the last."""
    fetch: Callable[[PolicyVersion, Hash32], Awaitable[Path]]
    """Returns a version's files; raises PolicyUnavailable."""
    evaluator: Evaluator
    report: Callable[[PolicyVersion, Hash32, Mapping[str, float]], Awaitable[None]]
    """Brings figures to the orchestrator; raises ApiError when they are refused."""
    log: MetricsLog
    """What was evaluated."""
    tell: Callable[[Evaluation], None] = lambda _: None
    """Is told of every evaluation."""
    passed_over: set[PolicyVersion] = field(default_factory=set)
    """Versions that no relay has any more."""

    @property
    def is_over(self) -> bool:
        """Whether no version can follow."""
        run = self.run()
        return bool(run.closed_at) or bool(self.last and self.last in run.checkpoints)

    def due(self) -> PolicyVersion | None:
        """Return the oldest version that is to be evaluated now."""
        done = self.log.evaluated() | self.passed_over
        waiting = (v for v in self.run().checkpoints if v not in done and self._is_wanted(v))
        return min(waiting, default=None)

    def _is_wanted(self, version: PolicyVersion) -> bool:
        newest = self.run().latest_version
        return version % self.every == 0 or (self.is_over and version == newest)

    async def evaluate_all(self) -> None:
        """Evaluate what is due, until nothing is, or nobody has it yet."""
        while (version := self.due()) is not None:
            root = self.run().checkpoints[version].manifest_root
            try:
                folder = await self.fetch(version, root)
            except PolicyUnavailable as error:
                logger.warning(
                    "version passed over", extra={"policy_version": version, "error": str(error)}
                )
                if version == self.run().latest_version:
                    return
                self.passed_over.add(version)
                continue
            await self._evaluate(version, root, folder)

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
        reward = round(evaluation.reward.value, 4)
        logger.info("evaluated", extra={"policy_version": version, "reward": reward})


async def evaluate_run(
    wish: Wish,
    engine: InferenceEngine,
    key: bytes | None,
    tell: Callable[[Evaluation], None] = lambda _: None,
) -> None:
    """Evaluate a run's versions; figures are reported with this key, without one only noted. `tell`
    is told of each.

    Raises ConfigError when there is no such run, ApiError when the orchestrator refuses the figures
    or has no recipe.
    """
    problems = TaskSet.open(wish.eval_set)
    check_task_set(problems)
    async with AsyncExitStack() as stack:
        chain = await stack.enter_async_context(await Chain.connect(wish.rpc, wish.deployments))
        view = ChainView()
        run = await find_run(chain, EventReader(chain), view, wish.run, pause_s=wish.poll_s)
        if run is None:
            raise ConfigError(
                f"there is no run {wish.run} on chain {chain.chain_id}",
                hint="check --run and --rpc",
            )
        api = await stack.enter_async_context(
            OrchestratorApi(
                wish.orchestrator,
                key=key,
                domain=chain.domain("ContributionLedger"),
                audience=run.config.orchestrator,
            )
        )
        recipe = Recipe.from_bytes(await api.document(run.config.recipe_hash))
        relays = wish.relays or (await api.run_info(wish.run)).policy_sources
        fetcher = await stack.enter_async_context(
            Fetcher(relays, wish.state_dir / "policies", keep=KEPT)
        )
        # Of another set, or with other samples, nothing was evaluated yet.
        name = f"evaluations-{problems.hash().hex()[:16]}-{wish.samples}.jsonl"
        follower = Follower(
            run=lambda: view.runs[wish.run],
            last=recipe.training.steps,
            every=wish.every,
            fetch=lambda version, root: fetcher.fetch(wish.run, version, root),
            evaluator=Evaluator(problems, engine, recipe, samples=wish.samples),
            report=_reports(api, wish.run) if key is not None else _not_reported,
            log=MetricsLog(wish.state_dir / name),
            tell=tell,
        )
        await _follow(wish, chain, view, follower)


async def _follow(wish: Wish, chain: Chain, view: ChainView, follower: Follower) -> None:
    """Evaluate what there is; with `is_following`, also what comes, until the run is over."""
    changed = asyncio.Event()

    async def note(_events: list[Event]) -> None:
        changed.set()

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(follow(chain, view, poll_s=wish.poll_s, on_change=note))
        await follower.evaluate_all()
        while wish.is_following and not (follower.is_over and follower.due() is None):
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await changed.wait()
            changed.clear()
            await follower.evaluate_all()
        reading.cancel()


def _reports(
    api: OrchestratorApi, run: RunId
) -> Callable[[PolicyVersion, Hash32, Mapping[str, float]], Awaitable[None]]:
    """Return what brings figures to an orchestrator, however long it is away."""

    async def report(version: PolicyVersion, root: Hash32, figures: Mapping[str, float]) -> None:
        while True:
            try:
                return await api.post_evaluation(run, version, root, figures)
            except ApiError as error:
                # The orchestrator may have read less of the chain than this process.
                if error.status < 500 and error.code != "version_unknown":
                    raise
                logger.warning("figures not reported yet", extra={"error": str(error)})
            await asyncio.sleep(RETRY_S)

    return report


async def _not_reported(version: PolicyVersion, root: Hash32, figures: Mapping[str, float]) -> None:
    """Do nothing."""
    del version, root, figures
