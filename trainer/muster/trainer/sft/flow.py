"""Supervised fine-tuning, top to bottom; one process, or rank 0 of those that torchrun started.

 1. prepare   open the data set; encode its rows or leave them out                 job.prepare
 2. plan      plan the memory, build the learner                                  _make_learner
 3. resume    restore the newest state                                            _resume
 4. train     take a step on its rows, log it, save at intervals                  _train, _save
 5. evaluate  measure the loss on held-out rows, the reward on held-out problems  _evaluate
 6. write     write the model's folder, with its lineage                          _write

Learner, plan, optimiser, checkpoints and model folders are those of the trainer of a run.
"""

import json
import logging
import math
import shutil
import time
import warnings
from concurrent.futures import Future
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.errors import ConfigError, EngineError, NotYet
from muster.protocol.ids import PolicyVersion, Step
from muster.tasks import TaskSet, check_task_set
from muster.trainer.learn.follow import follow
from muster.trainer.learn.memory_plan import plan_memory, return_freed_buffers
from muster.trainer.learn.parallel import ONE_PROCESS, Team, join
from muster.trainer.learn.sft_learner import SftLearner
from muster.trainer.measure.evaluate import Evaluator
from muster.trainer.measure.figures import StepFigures, evaluation_entry
from muster.trainer.measure.metrics import MetricsLog
from muster.trainer.publish.policies import BASE, fresh_folder, policy_files
from muster.trainer.recover.checkpoint import Checkpoints, TrainerState
from muster.trainer.sft.job import Prepared, TuningJob, prepare
from muster.trainer.sft.lineage import LINEAGE, ModelLineage, model_hash
from muster.trainer.sft.rows import Order
from muster.trainer.stream.reader import Cursor

logger = logging.getLogger(__name__)

SAVED: Future[None] = Future()
"""A future that is already done, for when there is nothing to save."""
SAVED.set_result(None)
EVALUATED_ROWS = 256
"""Rows whose loss is computed at a time."""


def fine_tune(job: TuningJob) -> Path | None:
    """Train the model, or resume training; returns its folder, None on follower ranks.

    Raises MusterError. The same job always leads to the same bytes.
    """
    torch.set_num_threads(job.threads)
    return_freed_buffers()
    transformers_logging.disable_progress_bar()
    # A single process writes checkpoints without a process group; torch warns about that.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    device, context = torch.device(job.choices.device), job.choices.context_ranks
    team = join(device, job.rank_timeout_s, context)
    if team is not None and team.rank:
        follow(team, job.choices.device)
        return None
    ranks = team or ONE_PROCESS
    try:
        with ranks.beating():
            prepared = prepare(job)
        return FineTuning(prepared, team).run()
    finally:
        ranks.dismiss()


class FineTuning:
    """The steps from a base model to a fine-tuned one."""

    def __init__(self, prepared: Prepared, team: Team | None) -> None:
        self._prepared, self._job, self._team = prepared, prepared.job, team
        self._ranks = team or ONE_PROCESS
        self._shelf, self._rows = prepared.shelf, prepared.rows
        self._order = Order(prepared.rows, prepared.recipe.training)
        self._log = MetricsLog(self._job.state_dir / "metrics.jsonl")
        self._checkpoints = Checkpoints(
            self._job.state_dir / "checkpoints",
            prepared.identity,
            ranks=self._ranks,
            device=self._job.choices.device,
        )
        self._learner = self._make_learner()
        self._evaluator = self._make_evaluator()
        self._saved = SAVED

    def _make_learner(self) -> SftLearner:
        job, recipe, base = self._job, self._prepared.recipe, self._shelf.path(BASE)
        choices = replace(job.choices, ranks=self._ranks.size)
        with self._ranks.beating():
            plan = plan_memory(base, recipe, choices)
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
        """Begin to save a step, after the one before is saved."""
        self._saved.result()
        self._saved = self._checkpoints.save(
            TrainerState(PolicyVersion(step), Cursor(step), 0, 0),
            self._learner.state(),
            release=self._learner.hold(),
        )

    def _resume(self) -> Step:
        """Restore the newest state; returns its step, 0 when there is none."""
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
        """Evaluate the current weights if an evaluation is due and not in the log yet."""
        if not self._is_due(step) or step in self._log.evaluated():
            return
        found: dict[str, Any] = {"policy_version": int(step)}
        if len(self._rows.held_out):
            found |= self._held_out_loss()
        if self._evaluator is not None:
            folder = self._folder(step)
            with self._ranks.beating():
                found |= self._reward(self._evaluator, folder, step)
        if len(found) > 1:
            self._log.append({"eval": found})
            shown: dict[str, Any] = {
                n: round(found[n], 4) for n in ("loss", "reward") if found.get(n) is not None
            }
            logger.info("evaluated", extra={"step": step, **shown})

    def _reward(self, evaluator: Evaluator, folder: Path, step: Step) -> dict[str, Any]:
        """Return the results on held-out problems; nothing when this machine cannot measure
        them."""
        try:
            measured = evaluator.evaluate(folder, PolicyVersion(step))
        except (EngineError, NotYet) as error:
            logger.warning("reward not measured", extra={"step": step, "error": str(error)})
            return {}
        entry: dict[str, Any] = evaluation_entry(measured)["eval"]
        return entry

    def _held_out_loss(self) -> dict[str, float]:
        """Return the mean loss on held-out rows, computed in batches."""
        total, tokens, numbers = 0.0, 0, self._rows.held_out.tolist()
        for start in range(0, len(numbers), EVALUATED_ROWS):
            some = [self._rows.sample(row) for row in numbers[start : start + EVALUATED_ROWS]]
            found = self._learner.held_out(some)
            total, tokens = total + found.loss * found.tokens, tokens + found.tokens
        if not math.isfinite(total):
            raise ConfigError(
                f"the loss on held-out rows is {total / tokens}",
                hint="check the base model: its weights hold NaN, or are too large for its format",
            )
        return {"loss": total / tokens, "tokens": tokens}

    def _folder(self, step: Step) -> Path:
        """Return a folder with the current model; drop earlier ones except the base's."""
        version = PolicyVersion(step)
        if step and not self._shelf.has(version):
            # All ranks gather checkpoints and models in the same order.
            with self._ranks.beating():
                self._saved.result()
                self._shelf.drop_before(version)
                learner = self._learner
                self._shelf.writing(version, learner.weights(), learner.pieces)()
        return self._shelf.path(version)

    def _write(self, last: Step) -> Path:
        """Write the model's folder with its lineage, whole or not at all."""
        made, out = self._folder(last), self._job.out
        with self._ranks.beating():
            self._saved.result()
        # Copying and hashing may take longer than other ranks wait for a command.
        self._ranks.dismiss()
        with fresh_folder(out) as fresh:
            for name, path in policy_files(made).items():
                # The adapter is merged into the weights; its own file would need the base.
                if name != LINEAGE and path.suffix != ".peft":
                    shutil.copyfile(path, fresh / name)
            (fresh / LINEAGE).write_bytes(self._lineage(fresh, last).to_bytes())
        return out

    def _lineage(self, fresh: Path, last: Step) -> ModelLineage:
        prepared, before = self._prepared, self._prepared.before
        return ModelLineage(
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
