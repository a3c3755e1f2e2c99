"""The tensors of a training step: policy, optimiser, behaviour and reference policies.

Owns torch and nothing else: no network, no chain, no clock. Blocking; the loop runs it in a thread.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.trainer.accumulation import Given, accumulate
from muster.trainer.figures import StepFigures, Sums
from muster.trainer.filters import Kept, keep_informative, without_mismatch
from muster.trainer.losses import Totals
from muster.trainer.packing import MicroBatch, Sample
from muster.trainer.passes import Passes
from muster.trainer.persistence import (
    Weights,
    load_weights,
    named_weights,
    restore_state,
    state_template,
    training_state,
)
from muster.trainer.precision import ComputeType

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _OptimizerStep:
    samples: list[Sample]
    batches: list[MicroBatch]
    proximal: list[Tensor] = field(default_factory=list)
    """Log-probabilities before the training step, per micro-batch; empty where not needed."""


class Learner:
    """A policy in training."""

    def __init__(
        self,
        model_folder: Path,
        recipe: Recipe,
        *,
        published: Callable[[PolicyVersion], Weights],
        micro_batch_tokens: int = 16_384,
        device: str = "cpu",
        compute_dtype: ComputeType = "float32",
    ) -> None:
        """`published` gives a published version's weights, exactly as workers got them."""
        self._recipe = recipe
        self._device = torch.device(device)
        self.learning_rate_scale = 1.0
        """Factor on the recipe's learning rate."""
        self.model = _load(model_folder, self._device).train()
        self._passes = Passes(
            self.model,
            _load(model_folder, self._device),
            published,
            temperature=recipe.sampling.temperature,
            micro_batch_tokens=micro_batch_tokens,
            compute_dtype=compute_dtype,
        )
        training = recipe.training
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            weight_decay=training.weight_decay,
            fused=True,
        )

    def step(self, step: Step, groups: Sequence[Sequence[Rollout]]) -> StepFigures:
        """Take the optimiser steps of one training step; the same input gives the same weights."""
        kept = self._without_mismatch(keep_informative(groups, self._recipe.training))
        rewards = [rollout.task_reward for group in groups for rollout in group]
        learning_rate = self._set_learning_rate(step)
        sums = Sums()
        steps = self._planned(
            _mini_batches(kept.samples, self._recipe.training.optimizer_steps, step)
        )
        for i, planned in enumerate(steps):
            self._optimizer_step(planned, sums, is_first=i == 0)
        return sums.figures(
            reward=sum(rewards) / max(1, len(rewards)),
            samples=sum(map(len, kept.samples)),
            dropped=kept.dropped,
            learning_rate=learning_rate,
        )

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's parameters and buffers, tied ones once."""
        return named_weights(self.model)

    def load(self, weights: Weights) -> None:
        """Continue from a policy's weights, with the optimiser as it is."""
        load_weights(self.model, weights)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that the next step depends on, by name; live, not copies."""
        return training_state(self.model, self.optimizer)

    def like(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return tensors to read a saved state of these sizes into."""
        return state_template(self.model, sizes)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state as `state` returned it, also in a process before this one."""
        restore_state(self.model, self.optimizer, state)

    def _without_mismatch(self, kept: Kept) -> Kept:
        limit = self._recipe.filters.max_mismatch
        if not limit:
            return kept
        samples = [sample for group in kept.samples for sample in group]
        return without_mismatch(kept, self._passes.surprise(samples), limit)

    def _set_learning_rate(self, step: Step) -> float:
        training = self._recipe.training
        warm = min(1.0, step / training.warmup_steps) if training.warmup_steps else 1.0
        rate = training.learning_rate * warm * self.learning_rate_scale
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _planned(self, mini_batches: list[list[Sample]]) -> list[_OptimizerStep]:
        """Pack each optimiser step's samples; a decoupled objective fixes its proximal policy."""
        self._passes.refresh()
        steps = [_OptimizerStep(samples, self._passes.pack(samples)) for samples in mini_batches]
        if self._recipe.training.decoupled:
            # The first optimiser step still has the proximal policy's weights.
            for step in steps[1:]:
                step.proximal = [self._passes.current(batch) for batch in step.batches]
        return steps

    def _optimizer_step(self, step: _OptimizerStep, sums: Sums, *, is_first: bool) -> None:
        self._passes.refresh()
        behaviour = self._passes.behaviour(step.samples, step.batches)
        totals = Totals(
            tokens=sum(len(sample.completion_tokens) for sample in step.samples),
            samples=len(step.samples),
        )
        objective, longest = self._recipe.training, self._recipe.sampling.max_new_tokens
        self.optimizer.zero_grad(set_to_none=True)
        is_finite = True
        for i, batch in enumerate(step.batches):
            advantage_B = torch.tensor([step.samples[j].advantage for j in batch.order])
            given = Given(
                behaviour[i],
                advantage_B[batch.row_N].to(self._device),
                batch.row_N.to(self._device),
                step.proximal[i] if step.proximal else None,
                self._passes.reference(batch) if objective.kl_coefficient else None,
            )
            parts, entropy_N = accumulate(self._passes, batch, given, totals, objective, longest)
            sums.add(parts, given.advantage_N, entropy_N, is_first=is_first)
            # A clip has slope 0 where the ratio is nan: the gradient alone would not show it.
            is_finite &= bool(parts.loss_N.isfinite().all())
        self._descend(sums, is_finite=is_finite)

    def _descend(self, sums: Sums, *, is_finite: bool) -> None:
        """Take the optimiser step, unless the loss or the gradient is not finite."""
        norm = float(
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self._recipe.training.max_grad_norm
            )
        )
        if not (is_finite and math.isfinite(norm)):
            sums.skipped += 1
            logger.error("optimiser step skipped: loss or gradient is not finite")
            self.optimizer.zero_grad(set_to_none=True)
            return
        sums.grad_norm = max(sums.grad_norm, norm)
        self.optimizer.step()


def _load(folder: Path, device: torch.device) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)


def _mini_batches(groups: list[list[Sample]], count: int, step: Step) -> list[list[Sample]]:
    """Deal whole groups to `count` mini-batches of about equal size; none of them is empty."""
    order = list(groups)
    random.Random(f"step {step}").shuffle(order)
    dealt = [[sample for group in order[i::count] for sample in group] for i in range(count)]
    return [samples for samples in dealt if samples]
