"""The trainer process: connects, restores, serves the origin, trains, stops cleanly."""

import asyncio
import logging
import math
import warnings
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from muster.api import OrchestratorApi
from muster.chain import Chain, ChainView, RunConfig, follow
from muster.inference.transformers_engine import TransformersEngine
from muster.lifecycle import ComputeThread, Proxies, first_error
from muster.lifecycle.files import write_durably
from muster.lifecycle.outage import await_orchestrator
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, ContractRevert
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.recipe import Recipe
from muster.shardcast import ChunkStore, ServerLimits, ShardServer
from muster.tasks import TaskSet, check_task_set, has_root
from muster.tasks.document import MAX_TASK_SET_BYTES
from muster.trainer.config import TrainerSettings
from muster.trainer.learn.follow import follow as follow_leader
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.memory_plan import (
    MemoryChoices,
    MemoryPlan,
    Planner,
    planner_of,
    return_freed_buffers,
)
from muster.trainer.learn.parallel import ONE_PROCESS, Team, join
from muster.trainer.loop import Parts, Trainer
from muster.trainer.measure.evaluate import Evaluator
from muster.trainer.measure.figures import shortage_figures
from muster.trainer.measure.metrics import (
    Export,
    MetricsLog,
    MetricsPoster,
    Unshown,
    log_to_wandb,
    serve_prometheus,
)
from muster.trainer.measure.throughput import measure_peak_flops
from muster.trainer.ports import ChainLedger, Files, PolicyRoots
from muster.trainer.publish.policies import BASE, PolicyShelf, eos_token_ids, open_shelf, vocab_size
from muster.trainer.publish.publisher import Publisher, Unpublished, hand_over
from muster.trainer.recover.checkpoint import Checkpoints, Identity
from muster.trainer.recover.collapse import AlarmLimits, Guard
from muster.trainer.recover.recovery import catch_up, provide_base_model
from muster.trainer.sites.meeting import Meeting, MeetingPlace, site_secret
from muster.trainer.sites.site_learner import OuterStep, SiteLearner
from muster.trainer.stream.listing import Lists
from muster.trainer.stream.reader import FileBuffer, StreamReader

logger = logging.getLogger(__name__)

DISMISSAL_S = 2.0
"""Seconds that the other ranks may take to hear that the run is over."""
CLOSED_LOOK_S = 5.0
"""Longest pause in seconds between two checks whether the run was closed."""


async def serve(settings: TrainerSettings, key: bytes | None) -> None:
    """Train the run until it is complete; raises MusterError when it cannot.

    `key` is the trainer's, None on the ranks that follow rank 0.
    """
    torch.set_num_threads(settings.threads)
    return_freed_buffers()
    transformers_logging.disable_progress_bar()
    # A single process writes checkpoints without a process group; torch warns about that.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    run_id = RunId(settings.run)
    compute = ComputeThread()
    async with AsyncExitStack() as stack:
        stack.callback(compute.close)
        device = torch.device(settings.device)
        team = await compute.run(join, device, settings.rank_timeout_s, settings.context_ranks)
        if team is not None and team.rank:
            await compute.run(follow_leader, team, settings.device)
            return
        assert key is not None  # this rank leads
        if team is not None:
            stack.push_async_callback(_dismiss, team, compute, within_s=DISMISSAL_S)
        with (team or ONE_PROCESS).beating():
            chain = await stack.enter_async_context(
                await Chain.connect(
                    settings.rpc,
                    settings.deployments,
                    key=key,
                    journal=settings.state_dir / "transactions.sqlite3",
                )
            )
            config = await _run_config(chain, run_id, key)
            view = ChainView()
            ledger = ChainLedger(view, run_id)
            hold_s = settings.hold_s
            store = ChunkStore(
                settings.store,
                keep=settings.keep,
                hold_s=await chain.longest_open_s() if hold_s is None else hold_s,
            )
            limits = ServerLimits(proxies=Proxies(settings.trusted_proxies))
            server = await stack.enter_async_context(
                ShardServer(store, settings.host, settings.port, limits=limits)
            )
            _announce(server.url, settings.ready_file)
            api = await stack.enter_async_context(
                OrchestratorApi(
                    settings.orchestrator,
                    key=key,
                    domain=chain.domain("ContributionLedger"),
                    audience=lambda: ledger.orchestrator or config.orchestrator,
                )
            )
            recipe = await _load_recipe(settings, config.recipe_hash, api)
            lists = await _make_lists(settings, recipe, config.task_set_hash, api)
            policy_roots = PolicyRoots(chain, run_id)
            recent = await policy_roots.recent_roots(recipe.training.max_async_level)
        make = _Assembly(settings, run_id, recipe, store, chain, key, team)
        parts = await compute.run(make.parts, config, ledger, policy_roots, recent, api, compute)
        parts = replace(parts, lists=lists, exports=_exports(settings, recipe, stack))
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(
                follow(
                    chain,
                    view,
                    poll_s=settings.poll_s,
                    confirmations=settings.confirmations,
                    on_change=ledger.on_change,
                )
            )
            beating = tasks.create_task(_beat(team, compute))
            trainer = Trainer(parts, steps=settings.steps or recipe.training.steps)
            await train(trainer, ledger)
            beating.cancel()
            await _hand_over(settings, parts.publisher, policy_roots, api, team, compute)
            following.cancel()
    logger.info("run complete")


def _exports(settings: TrainerSettings, recipe: Recipe, stack: AsyncExitStack) -> list[Export]:
    """Open the exports of figures; `stack` closes them."""
    exports: list[Export] = []
    if settings.metrics_port is not None:
        endpoint = serve_prometheus(settings.metrics_host, settings.metrics_port)
        exports.append(stack.enter_context(endpoint).report)
    if settings.wandb_project:
        name = f"run-{settings.run}"
        log = log_to_wandb(settings.wandb_project, name, recipe.model_dump(mode="json"))
        exports.append(stack.enter_context(log))
    return exports


async def _beat(team: Team | None, compute: ComputeThread) -> None:
    """Send signs of life to the follower ranks while this one waits for records."""
    while team is not None:
        await asyncio.sleep(team.beat_s)
        await compute.run(team.lead, "beat")


async def _dismiss(team: Team, compute: ComputeThread, *, within_s: float | None = None) -> None:
    """Let the follower ranks end, once nothing is being computed."""
    with suppress(TimeoutError):
        await asyncio.wait_for(compute.run(team.dismiss), within_s)


async def _hand_over(
    settings: TrainerSettings,
    publisher: Publisher | Unpublished,
    policy_roots: PolicyRoots,
    api: OrchestratorApi,
    team: Team | None,
    compute: ComputeThread,
) -> None:
    """Bring the last version to relays, after the follower ranks, which nobody needs for it."""
    if team is not None:
        await _dismiss(team, compute)
    if isinstance(publisher, Unpublished):
        return
    # A node behind the endpoint may not know what was published a moment ago.
    last = publisher.newest if publisher.newest is not None else await policy_roots.newest()
    if last is None:
        return
    async with asyncio.TaskGroup() as tasks:
        # Relays wait for confirmations: a reorganisation could still remove it.
        standing_by = tasks.create_task(publisher.stand_by())
        await hand_over(api, RunId(settings.run), last, within_s=settings.hand_over_s)
        standing_by.cancel()


async def _run_config(chain: Chain, run_id: RunId, key: bytes) -> RunConfig:
    """Return the run's configuration; raises ConfigError when this key is not its trainer's."""
    try:
        config = await chain.runs.config_of(run_id)
    except ContractRevert as revert:
        raise ConfigError(
            f"there is no run {run_id} on chain {chain.chain_id}",
            hint="create it with `muster run create`",
        ) from revert
    if address_of(key) != config.trainer:
        raise ConfigError(
            f"the key is of {address_of(key)}, but the trainer of run {run_id} is {config.trainer}",
            hint="give that account's keystore with --keystore",
        )
    return config


async def _load_recipe(settings: TrainerSettings, pinned: Hash32, api: OrchestratorApi) -> Recipe:
    """Return the pinned recipe from the documents folder, else from the orchestrator, which may be
    away for a while. Raises ApiError when the orchestrator refuses it."""
    if settings.documents is None:
        return Recipe.from_bytes(await await_orchestrator(lambda: api.document(pinned)))
    path = settings.documents / pinned.hex()
    if not path.is_file():
        raise ConfigError(
            f"the run's recipe {pinned.hex()} is not in {settings.documents}",
            hint="`muster run create` wrote it (--documents); without the flag it is downloaded",
        )
    data = path.read_bytes()
    if keccak(data) != pinned:
        raise ConfigError(f"{path} is not the recipe that the chain pins")
    return Recipe.from_bytes(data)


async def _make_lists(
    settings: TrainerSettings, recipe: Recipe, pinned: Hash32, api: OrchestratorApi
) -> Lists:
    """Return the maker of lists of set-aside problems. A list names problems by their place in the
    pinned task set, which is in the documents folder or the state folder, or is downloaded to
    there.
    """
    if not recipe.skips_problems:
        return Lists()
    folder = settings.documents or settings.state_dir
    path = folder / pinned.hex()
    if settings.documents is None and not await asyncio.to_thread(has_root, path, pinned):
        folder.mkdir(parents=True, exist_ok=True)
        await await_orchestrator(lambda: api.download(pinned, path, max_bytes=MAX_TASK_SET_BYTES))
    if not await asyncio.to_thread(has_root, path, pinned):
        if settings.documents is None:
            path.unlink(missing_ok=True)
        raise ConfigError(
            f"{path} is not the task set that the chain pins",
            hint="`muster run create` wrote it (--documents); without the flag it is downloaded",
        )
    return await asyncio.to_thread(lambda: Lists.over(recipe, TaskSet.open(path)))


async def train(trainer: Trainer, ledger: ChainLedger) -> None:
    """Train to the last step, or until the run's owner closes the run."""
    training = asyncio.ensure_future(trainer.run())
    try:
        while not training.done() and not ledger.is_closed:
            changing = asyncio.ensure_future(ledger.changed())
            either = asyncio.FIRST_COMPLETED
            await asyncio.wait([training, changing], timeout=CLOSED_LOOK_S, return_when=either)
            changing.cancel()
        if training.done():
            training.result()
        else:
            _say_closed(trainer)
    except (ContractRevert, BaseExceptionGroup) as error:
        cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(cause, ContractRevert) or cause.name != "RunEnded":
            raise
        _say_closed(trainer)
    finally:
        training.cancel()
        await asyncio.wait([training])


def _say_closed(trainer: Trainer) -> None:
    logger.warning("the run was closed by its owner", extra={"made": trainer.version})


@dataclass(frozen=True, slots=True)
class _Assembly:
    """Puts the trainer's parts together."""

    settings: TrainerSettings
    run_id: RunId
    recipe: Recipe
    store: ChunkStore
    chain: Chain
    key: bytes
    team: Team | None = None

    def parts(
        self,
        config: RunConfig,
        ledger: ChainLedger,
        policy_roots: PolicyRoots,
        recent: dict[PolicyVersion, Hash32],
        api: OrchestratorApi,
        compute: ComputeThread,
    ) -> Parts:
        """Return the parts, restored to the state of the run; blocking: loads models."""
        settings, recipe = self.settings, self.recipe
        shelf = open_shelf(settings.state_dir / "policies", recipe, dtype=settings.publish_dtype)
        identity = Identity(self.run_id, config.recipe_hash, self.chain.chain_id)
        ranks, base = self.team or ONE_PROCESS, shelf.path(BASE)
        with ranks.beating():
            provide_base_model(
                shelf, settings.model, self.store, self.run_id, config.base_model_hash
            )
            planner = self._planner(base)
            plan = _planned(planner)
        checkpoints = Checkpoints(
            settings.state_dir / "checkpoints",
            identity,
            keep=settings.keep_checkpoints,
            ranks=ranks,
            device=settings.device,
        )
        inner = Learner(
            base,
            recipe,
            published=shelf.weights,
            micro_batch_tokens=plan.micro_batch_tokens,
            recomputed=plan.recompute,
            compute_dtype=settings.compute_dtype,
            optimizer_state=settings.optimizer_state,
            offload=settings.state_dir / "offload" if settings.offload else None,
            device=settings.device,
            team=self.team,
        )
        learner: Learner | SiteLearner = inner
        if settings.sites > 1:
            learner = self._among_sites(inner, checkpoints, shelf)
        if isinstance(learner, SiteLearner) and settings.site:
            learner.join()
        else:
            self._catch_up(checkpoints, shelf, recent, learner)
        buffer = FileBuffer(
            settings.state_dir / "files",
            Files(api, self.run_id),
            ledger,
            # Sites must read the same: one that goes on by itself would train on other records.
            patience_s=settings.file_patience_s if settings.sites == 1 else math.inf,
        )
        poster = MetricsPoster(api if settings.site == 0 else Unshown())
        return Parts(
            recipe=recipe,
            stream=StreamReader(
                ledger,
                buffer,
                recipe,
                vocab_size=vocab_size(base),
                eos=eos_token_ids(base),
                seed_of=ledger.seed_of,
                on_short=lambda shortage: poster.post(shortage.step, shortage_figures(shortage)),
            ),
            learner=learner,
            shelf=shelf,
            checkpoints=checkpoints,
            buffer=buffer,
            publisher=self._publisher(policy_roots) if settings.site == 0 else Unpublished(),
            log=MetricsLog(settings.state_dir / "metrics.jsonl"),
            poster=poster,
            compute=compute,
            require_room=partial(planner.require_room, plan),
            guard=_guard(settings),
            peak_flops=self._peak_flops(),
            evaluator=self._evaluator(),
            eval_every=settings.eval_every,
        )

    def _planner(self, base: Path) -> Planner:
        """Return the planner of the memory that training will take."""
        settings = self.settings
        choices = MemoryChoices(
            ranks=self.team.size if self.team else 1,
            context_ranks=settings.context_ranks,
            device=settings.device,
            compute_dtype=settings.compute_dtype,
            micro_batch_tokens=settings.micro_batch_tokens,
            recompute=settings.recompute,
            optimizer_state=settings.optimizer_state,
            offload=settings.offload,
            memory_gb=settings.memory_gb,
            evaluates=settings.eval_set is not None,
            sites=settings.sites,
        )
        return planner_of(base, self.recipe, choices)

    def _peak_flops(self) -> float:
        """Return the operations per second of all ranks together, assuming that all are like this
        one."""
        settings = self.settings
        peak = (
            measure_peak_flops(settings.device, settings.compute_dtype)
            if settings.peak_tflops is None
            else settings.peak_tflops * 1e12
        )
        logger.info("peak of this machine", extra={"tflops": round(peak / 1e12, 3)})
        return peak * (self.team.size if self.team else 1)

    def _publisher(self, policy_roots: PolicyRoots) -> Publisher:
        return Publisher(
            self.store,
            policy_roots,
            run_id=self.run_id,
            domain=self.chain.domain("RunRegistry"),
            key=self.key,
            anchor_every=self.settings.anchor_every,
        )

    def _among_sites(
        self, learner: Learner, checkpoints: Checkpoints, shelf: PolicyShelf
    ) -> SiteLearner:
        settings, training = self.settings, self.recipe.training
        if settings.on_collapse != "log":
            # Each site sees only its own samples, so the sites would decide differently.
            raise ConfigError(
                f"--on-collapse {settings.on_collapse} does not work with --sites",
                hint="use --on-collapse log",
            )
        host, port = settings.meeting_place
        place = MeetingPlace(
            settings.site,
            host,
            port,
            alive_s=settings.site_alive_s,
            wait_s=settings.site_wait_s,
        )
        return SiteLearner(
            learner,
            Meeting(
                place,
                expected=settings.sites,
                secret=site_secret(self.key, self.run_id, self.chain.chain_id),
            ),
            OuterStep(training.outer_learning_rate, training.outer_momentum),
            checkpoints,
            shelf,
            max_async_level=training.max_async_level,
        )

    def _catch_up(
        self,
        checkpoints: Checkpoints,
        shelf: PolicyShelf,
        recent: dict[PolicyVersion, Hash32],
        learner: Learner | SiteLearner,
    ) -> None:
        """If the saved state is older than the newest published policy, replace it by that
        policy."""
        saved = checkpoints.newest()
        # A GPU may add in another order, and other sites may take part in a repeated step.
        repeats = torch.device(self.settings.device).type == "cpu" and self.settings.sites == 1
        with (self.team or ONE_PROCESS).beating():
            state = catch_up(saved, recent, self.store, shelf, self.run_id, repeats=repeats)
        if state is None:
            return
        if saved is not None:
            learner.restore(checkpoints.read(saved.folder, learner))
        learner.load(shelf.learned(state.version))
        guard = _guard(self.settings)
        guard.restore(state.kept.get("guard", {}))
        checkpoints.retained = frozenset(guard.good)
        checkpoints.save(state, learner.state()).result()

    def _evaluator(self) -> Evaluator | None:
        settings = self.settings
        if settings.eval_set is None:
            return None
        task_set = TaskSet.open(settings.eval_set)
        check_task_set(task_set)
        engine = TransformersEngine(
            settings.compute_dtype, threads=settings.threads, device=settings.device
        )
        return Evaluator(task_set, engine, self.recipe, samples=settings.eval_samples)


def _guard(settings: TrainerSettings) -> Guard:
    limits = AlarmLimits(
        window=settings.alarm_window,
        grad_growth=settings.alarm_grad_growth,
        entropy_rise=settings.alarm_entropy_rise,
        reward_fall=settings.alarm_reward_fall,
        patience=settings.alarm_patience,
    )
    return Guard(
        limits,
        action=settings.on_collapse,
        slowdown=settings.rollback_slowdown,
        most=0 if settings.sites > 1 else settings.max_rollbacks,
    )


def _planned(planner: Planner) -> MemoryPlan:
    """Return and log the plan of the memory; raises MemoryShort when training does not fit."""
    plan = planner.plan()
    for line in plan.table().splitlines():
        logger.info("%s", line)
    return plan


def _announce(url: str, ready_file: Path | None) -> None:
    logger.info("origin listens", extra={"url": url})
    if ready_file is not None:
        write_durably(ready_file, url.encode() + b"\n")
