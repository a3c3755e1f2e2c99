"""Supervised fine-tuning, top to bottom; one process, or rank 0 of those that torchrun started.

 1. open      the data set's files are hashed, the prompt's frame is rendered     fine_tune
 2. encode    rows become tokens on disk, or are left out and counted             _rows
 3. plan      memory is planned, the learner built, the newest state taken over   _learner, _resume
 4. train     a step takes its rows, is logged, and now and then saved            FineTuning.run
 5. evaluate  the loss on held-out rows, the reward on held-out problems          _evaluate
 6. write     the model's folder, with its lineage                                _write

Learner, plan, optimiser, checkpoints and model folders are those of the trainer of a run.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from muster.inference.framing import pin_prompt
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.encoding import canonical_json, hex0x
from muster.protocol.errors import ConfigError
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.protocol.sft import SftRecipe
from muster.shardcast import state_hash
from muster.tasks import TaskSet, check_task_set
from muster.telemetry import progress
from muster.trainer.learn.follow import follow
from muster.trainer.learn.parallel import ONE_PROCESS, RankLost, Team, join
from muster.trainer.learn.plan import Choices, plan_memory, return_freed_buffers
from muster.trainer.learn.sft_learner import SftLearner
from muster.trainer.measure.evaluate import Evaluator
from muster.trainer.measure.figures import StepFigures, evaluation_entry
from muster.trainer.measure.metrics import MetricsLog
from muster.trainer.publish.policies import (
    BASE,
    PolicyShelf,
    fresh_folder,
    open_shelf,
    policy_files,
)
from muster.trainer.recover.checkpoint import Checkpoints, TrainerState
from muster.trainer.sft.encoding import RowEncoder
from muster.trainer.sft.lineage import (
    LINEAGE,
    Lineage,
    model_hash,
    read_lineage,
    write_lineage,
)
from muster.trainer.sft.rows import Order, TokenRows, write_rows
from muster.trainer.sft.source import Source, open_source
from muster.trainer.stream.reader import Cursor

logger = logging.getLogger(__name__)

SAVED: Future[None] = Future()
"""A future that is already done: nothing is left to save."""
SAVED.set_result(None)
EVALUATED_ROWS = 256
"""Rows whose loss is computed at a time."""
IDENTITY = "identity.json"
"""Says whose a state folder is."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be made of what, and how."""

    data: Path
    """The data set: a folder or a file."""
    model: Path
    """The base model's folder."""
    recipe: SftRecipe
    """The recipe; its prompt's frame is filled in."""
    out: Path
    """Receives the model's folder."""
    state_dir: Path
    """What is needed to go on after an interruption, and the figures."""
    choices: Choices
    """Settings that decide about memory."""
    save_every: int = 100
    """Steps between two states that survive the process."""
    eval_every: int = 0
    """Steps between two evaluations besides the first and the last; 0 for those two only."""
    eval_set: Path | None = None
    """Task set of held-out problems."""
    eval_samples: int = 1
    """Samples of each."""
    threads: int = 1
    """CPU threads."""
    rank_timeout_s: float = 600.0
    """Under torchrun: longest wait for the other ranks."""


@dataclass(frozen=True, slots=True)
class SftIdentity:
    """Whose state a checkpoint is."""

    recipe_hash: str
    data_root: str
    base: str

    def to_json(self) -> dict[str, Any]:
        """Return what a checkpoint says of it."""
        return {"recipe_hash": self.recipe_hash, "data_root": self.data_root, "base": self.base}

    def described(self, found: Mapping[str, Any]) -> str:
        """Return whose state another checkpoint is, by what it says."""
        own = self.to_json()
        return "a fine-tuning with " + ", ".join(
            f"{name} {value}" for name, value in found.items() if value != own[name]
        )


def fine_tune(job: Job) -> Path | None:
    """Make the model, or go on making it; returns its folder, None on ranks that follow.

    Raises MusterError. Called again with the same job, it leads to the same bytes.
    """
    torch.set_num_threads(job.threads)
    return_freed_buffers()
    transformers_logging.disable_progress_bar()
    # One process saves its checkpoints as one; torch would rather have a process group.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    team = join(torch.device(job.choices.device), job.rank_timeout_s)
    if team is not None and team.rank:
        follow(team, job.choices.device)
        return None
    try:
        with _beating(team):
            prepared = _prepare(job)
        return FineTuning(prepared, team).run()
    finally:
        if team is not None:
            with suppress(RankLost):
                team.lead("stop")


@contextmanager
def _beating(team: Team | None) -> Iterator[None]:
    """Tell ranks that follow that this one is there, while it leads them to nothing."""
    if team is None:
        yield
        return
    over = threading.Event()

    def beat() -> None:
        while not over.wait(team.beat_s):
            team.lead("beat")

    thread = threading.Thread(target=beat, name="beat")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A job with all that is known before the first step."""

    job: Job
    recipe: SftRecipe
    asked: Recipe
    """The recipe by which the model is asked at evaluations."""
    source: Source
    rows: TokenRows
    identity: SftIdentity
    shelf: PolicyShelf


def _prepare(job: Job) -> _Prepared:
    base = hex0x(state_hash(policy_files(job.model)))
    _require_positions(job)
    asked = pin_prompt(_asked(job.recipe), job.model)
    recipe = job.recipe.model_copy(update={"prompt": asked.prompt})
    source = open_source(job.data)
    identity = SftIdentity(hex0x(recipe.hash()), source.root, base)
    _require_own_target(job, identity)
    _require_own_state(job.state_dir, identity)
    shelf = open_shelf(job.state_dir / "policies", recipe, dtype="base")
    if not shelf.has(BASE):
        shelf.adopt(job.model)
    rows = _rows(job, recipe, source)
    logger.info("rows encoded", extra={"rows": str(rows.counts)})
    return _Prepared(job, recipe, asked, source, rows, identity, shelf)


def _asked(recipe: SftRecipe) -> Recipe:
    """Return the recipe of a run by which a model is asked as the fine-tuning says."""
    sampling = SamplingRecipe(
        problems_per_submission=1,
        samples_per_problem=2,
        temperature=recipe.sampling.temperature,
        max_new_tokens=recipe.sampling.max_new_tokens,
    )
    training = TrainingRecipe(submissions_per_step=1)
    return Recipe(name=recipe.name, sampling=sampling, prompt=recipe.prompt, training=training)


def _require_positions(job: Job) -> None:
    """Raise ConfigError when rows may be longer than the model can read."""
    config = AutoConfig.from_pretrained(job.model, local_files_only=True, trust_remote_code=False)
    positions = getattr(config, "max_position_embeddings", None)
    if positions and job.recipe.rows.max_tokens > positions:
        raise ConfigError(
            f"rows may have {job.recipe.rows.max_tokens} tokens, the model reads {positions}",
            hint=f"set rows.max_tokens to {positions}, or less",
        )


def _require_own_target(job: Job, identity: SftIdentity) -> None:
    """Raise ConfigError when the model's folder would replace something else."""
    if not job.out.exists():
        return
    found = read_lineage(job.out)
    if found is None:
        if not job.out.is_dir() or any(job.out.iterdir()):
            raise ConfigError(f"{job.out} is not empty", hint="choose another --out")
    elif SftIdentity(found.recipe_hash, found.data_root, found.base) != identity:
        raise ConfigError(
            f"{job.out} holds a model of another recipe, data set or base",
            hint="choose another --out",
        )


def _require_own_state(folder: Path, identity: SftIdentity) -> None:
    """Note whose the state folder is; raises ConfigError when it is another fine-tuning's."""
    path = folder / IDENTITY
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(canonical_json(identity.to_json()))
        return
    found = json.loads(path.read_bytes())
    if found != identity.to_json():
        raise ConfigError(
            f"{folder} belongs to {identity.described(found)}",
            hint="choose another --state-dir, or remove it to begin anew",
        )


def _rows(job: Job, recipe: SftRecipe, source: Source) -> TokenRows:
    """Return the data set's rows as tokens, encoded now unless they were before."""
    folder = job.state_dir / "rows"
    if not folder.is_dir():
        with progress("rows encoded") as on_progress:
            encoder = RowEncoder(recipe, job.model)
            write_rows(folder, source, encoder, recipe.rows.held_out_share, on_progress)
    return TokenRows(folder)


class FineTuning:
    """The steps from a base model to a fine-tuned one."""

    def __init__(self, prepared: _Prepared, team: Team | None) -> None:
        self._prepared, self._job, self._team = prepared, prepared.job, team
        self._shelf, self._rows = prepared.shelf, prepared.rows
        self._order = Order(prepared.rows, prepared.recipe.training)
        self._log = MetricsLog(self._job.state_dir / "metrics.jsonl")
        self._checkpoints = Checkpoints(
            self._job.state_dir / "checkpoints", prepared.identity, ranks=team or ONE_PROCESS
        )
        self._learner = self._make_learner()
        self._evaluator = self._make_evaluator()
        self._saved = SAVED

    def _make_learner(self) -> SftLearner:
        job, recipe, base = self._job, self._prepared.recipe, self._shelf.path(BASE)
        plan = plan_memory(base, recipe, job.choices)
        for line in plan.table().splitlines():
            logger.info("%s", line)
        return SftLearner(
            base,
            recipe,
            published=self._shelf.weights,
            micro_batch_tokens=plan.micro_batch_tokens,
            recomputed=plan.recompute,
            compute_dtype=job.choices.compute_dtype,
            optimizer_state=job.choices.optimizer_state,
            offload=job.state_dir / "offload" if job.choices.offload else None,
            device=job.choices.device,
            team=self._team,
        )

    def _make_evaluator(self) -> Evaluator | None:
        job = self._job
        if job.eval_set is None:
            return None
        task_set = TaskSet.open(job.eval_set)
        check_task_set(task_set)
        engine = TransformersEngine(
            job.choices.compute_dtype, threads=job.threads, device=job.choices.device
        )
        return Evaluator(task_set, engine, self._prepared.asked, samples=job.eval_samples)

    def run(self) -> Path:
        """Train from where the state folder stands to the last step; returns the model's folder."""
        step, last = self._resume(), self._order.last
        try:
            self._evaluate(step)
            while step < last:
                step = Step(step + 1)
                self._train(step, last)
                if step == last or not step % self._job.save_every or self._is_due(step):
                    self._save(step)
                self._evaluate(step)
            return self._write(last)
        finally:
            self._checkpoints.close()

    def _train(self, step: Step, last: Step) -> None:
        began = time.monotonic()
        figures = self._learner.step(step, last, self._order.samples(step))
        wall_s = max(time.monotonic() - began, 1e-9)
        epoch = self._order.epoch_of(step)
        self._log.append(_entry(step, epoch, figures, wall_s))
        logger.info(
            "fine-tuning step",
            extra={"step": step, "of": last, "loss": round(figures.loss, 4)},
        )

    def _save(self, step: Step) -> None:
        """Begin to make a step durable, after the one before."""
        self._saved.result()
        self._saved = self._checkpoints.save(
            TrainerState(PolicyVersion(step), Cursor(step), 0, 0),
            self._learner.state(),
            release=self._learner.hold(),
        )

    def _resume(self) -> Step:
        """Take the newest state over; returns its step, 0 where there is none."""
        saved = self._checkpoints.newest()
        step = Step(saved.state.version) if saved else Step(0)
        self._log.forget_after(PolicyVersion(step))
        if saved is not None:
            self._learner.restore(self._checkpoints.read(saved.folder, self._learner))
            logger.info("resumed", extra={"step": step})
        return step

    def _is_due(self, step: Step) -> bool:
        every = self._job.eval_every
        return step in (0, self._order.last) or bool(every and not step % every)

    def _evaluate(self, step: Step) -> None:
        """Measure the weights as they are when that is due and not in the log."""
        if not self._is_due(step) or step in self._log.evaluated():
            return
        found: dict[str, Any] = {"policy_version": int(step)}
        if len(self._rows.held_out):
            found |= self._held_out_loss()
        if self._evaluator is not None:
            folder = self._folder(step)
            with _beating(self._team):
                measured = self._evaluator.evaluate(folder, PolicyVersion(step))
            found |= evaluation_entry(measured)["eval"]
        if len(found) > 1:
            self._log.append({"eval": found})
            shown: dict[str, Any] = {
                n: round(found[n], 4) for n in ("loss", "reward") if n in found
            }
            logger.info("evaluated", extra={"step": step, **shown})

    def _held_out_loss(self) -> dict[str, float]:
        """Return the mean loss on held-out rows, some of them at a time."""
        total, tokens, numbers = 0.0, 0, self._rows.held_out.tolist()
        for start in range(0, len(numbers), EVALUATED_ROWS):
            some = [self._rows.sample(row) for row in numbers[start : start + EVALUATED_ROWS]]
            found = self._learner.held_out(some)
            total, tokens = total + found.loss * found.tokens, tokens + found.tokens
        if not math.isfinite(total):
            raise ConfigError(
                f"the loss on held-out rows is {total / tokens}",
                hint="weights of the base model are no numbers, or too large for its format",
            )
        return {"loss": total / tokens, "tokens": tokens}

    def _folder(self, step: Step) -> Path:
        """Return the folder of the model as it is; others' than the base's are dropped."""
        version = PolicyVersion(step)
        if step and not self._shelf.has(version):
            # Ranks send checkpoints and models in one order.
            self._saved.result()
            self._shelf.drop_before(version)
            learner = self._learner
            self._shelf.writing(version, learner.weights(), learner.pieces)()
        return self._shelf.path(version)

    def _write(self, last: Step) -> Path:
        """Write the model's folder with its lineage, whole or not at all."""
        made, out = self._folder(last), self._job.out
        self._saved.result()
        with fresh_folder(out) as fresh:
            for name, path in policy_files(made).items():
                # An adapter is merged in; by itself it belongs to the base.
                if name != LINEAGE and path.suffix != ".peft":
                    shutil.copyfile(path, fresh / name)
            write_lineage(fresh, self._lineage(fresh, last))
        return out

    def _lineage(self, fresh: Path, last: Step) -> Lineage:
        prepared = self._prepared
        before = read_lineage(self._shelf.path(BASE))
        return Lineage(
            software=metadata.version("muster-rl"),
            recipe=json.loads(prepared.recipe.to_bytes()),
            recipe_hash=prepared.identity.recipe_hash,
            data_root=prepared.source.root,
            data_files={each.name: each.sha256 for each in prepared.source.files},
            data_origin=prepared.source.origin,
            rows=prepared.rows.counts.to_json(),
            steps=int(last),
            base=prepared.identity.base,
            base_lineage=None if before is None else json.loads(before.to_bytes()),
            model=model_hash(fresh),
        )


def _entry(step: Step, epoch: int, figures: StepFigures, wall_s: float) -> dict[str, Any]:
    """Return the log's line of a step."""
    return {
        "step": int(step),
        "policy_version": int(step),
        "epoch": epoch,
        # Unknown, not 0, where the step was skipped.
        "loss": figures.loss if figures.tokens else None,
        "grad_norm": figures.grad_norm,
        "entropy": figures.entropy if figures.tokens else None,
        "learning_rate": figures.learning_rate,
        "samples": figures.samples,
        "tokens": figures.tokens,
        "skipped": figures.skipped,
        "wall_s": round(wall_s, 4),
        **{name: round(value, 4) for name, value in figures.seconds.items()},
        "tokens_per_s": figures.tokens / wall_s,
        "tflops": figures.flops / wall_s / 1e12,
        "memory_gb": figures.memory_bytes / 1e9,
    }
