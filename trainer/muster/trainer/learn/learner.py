"""The tensors of a reinforcement learning step: the policy in training, the policies that sampled,
and the reference.

Axes: N completion tokens of a micro-batch, R some of them.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from muster.protocol.ids import Step
from muster.protocol.objective import ObjectiveRecipe
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.advantages import Kept, keep_informative, without_mismatch
from muster.trainer.learn.logprob import Rows
from muster.trainer.learn.losses import (
    TokenLoss,
    Tokens,
    Totals,
    is_token_level,
    token_loss,
    weights,
)
from muster.trainer.learn.packing import MicroBatch, TrainingSample
from muster.trainer.learn.passes import Known, Passes
from muster.trainer.learn.persistence import Weights, adapter_weights, start_of
from muster.trainer.learn.trained_model import (
    LARGEST,
    BatchLoss,
    PackedStep,
    RankWork,
    TrainedModel,
    even_parts,
)
from muster.trainer.measure.figures import StepFigures, Sums


@dataclass(slots=True)
class _PolicyStep(PackedStep):
    known: list[Known]
    """Log-probabilities of each sample under fixed policies."""
    proximal: list[Tensor] = field(default_factory=list)
    """Log-probabilities before the training step, per micro-batch; empty where not needed."""


class Learner(TrainedModel[Recipe, _PolicyStep]):
    """A policy in reinforcement learning."""

    learning_rate_scale = 1.0
    """Factor on the recipe's learning rate."""

    def step(self, step: Step, groups: Sequence[Sequence[Rollout]]) -> StepFigures:
        """Take the optimiser steps of one training step; the same input gives the same weights."""
        looking = Sums()
        with self._watch.during(looking, "policies_s"):
            kept = self._without_mismatch(keep_informative(groups, self._recipe.training))
        rewards = [rollout.task_reward for group in groups for rollout in group]
        mini_batches = _mini_batches(kept.samples, self._recipe.training.optimizer_steps, step)
        rate = self._learning_rate(step)
        sums = self._take_together(rate, mini_batches)
        if sums.skipped and not self._recipe.filters.max_mismatch:
            with self._watch.during(looking, "policies_s"):
                kept = without_mismatch(kept, self._surprise_of(kept), math.inf)
            broken, rest = _parted(mini_batches, kept.samples)
            sums.skipped -= broken
            sums.include(self._take_together(rate, rest), LARGEST | {"memory_bytes"})
        sums.include(looking, LARGEST | {"memory_bytes"})
        return sums.figures(
            reward=sum(rewards) / max(1, len(rewards)),
            samples=sum(map(len, kept.samples)),
            dropped=kept.dropped,
            learning_rate=rate,
        )

    def start_again(self, base: Weights) -> None:
        """Continue from version 0, the base model's weights, with a fresh optimiser."""
        self.load(start_of(adapter_weights(self.model)) or base, is_fresh=True)

    def surprise(self, samples: Sequence[TrainingSample]) -> list[float]:
        """Return the mismatch of all ranks' samples on rank 0; on all ranks together."""
        with self._ranks.watch("looking for mismatch"):
            self._await_shards()
            parts = self._ranks.gather_groups(self._passes.surprise(samples))
            return [excess for part in parts for excess in part]

    def _without_mismatch(self, kept: Kept) -> Kept:
        limit = self._recipe.filters.max_mismatch
        if not limit:
            return kept
        return without_mismatch(kept, self._surprise_of(kept), limit)

    def _surprise_of(self, kept: Kept) -> list[float]:
        """Return `Passes.surprise` of all samples in order, computed by all ranks."""
        samples = [sample for group in kept.samples for sample in group]
        parts = even_parts(samples, self._ranks.groups)
        self._ranks.lead("surprise", *parts)
        return self.surprise(parts[0])

    def _learning_rate(self, step: Step) -> float:
        training = self._recipe.training
        warm = min(1.0, step / training.warmup_steps) if training.warmup_steps else 1.0
        return training.learning_rate * warm * self.learning_rate_scale

    def _temperature(self) -> float:
        return self._recipe.sampling.temperature

    def _planned(self, work: Sequence[RankWork]) -> list[_PolicyStep]:
        """Pack each optimiser step's samples and compute their values under fixed policies."""
        self._passes.refresh()
        self._await_shards()
        known = self._passes.read_policies(
            [share.samples for share in work],
            with_reference=self._recipe.training.kl_coefficient > 0,
        )
        steps = [
            _PolicyStep(share.samples, share.totals, self._passes.pack(share.samples), own)
            for share, own in zip(work, known, strict=True)
        ]
        if self._recipe.training.decoupled:
            # The first optimiser step still has the proximal policy's weights.
            for step in steps[1:]:
                step.proximal = [self._passes.current(batch) for batch in step.batches]
        return steps

    def _loss(self, step: _PolicyStep, number: int) -> BatchLoss:
        batch = step.batches[number]
        advantage_B = torch.tensor([step.samples[j].advantage for j in batch.order])
        given = LossInputs(
            self._behaviour(step, batch),
            advantage_B[batch.row_N].to(self._device),
            batch.row_N.to(self._device),
            step.proximal[number] if step.proximal else None,
            _joined([step.known[j].reference for j in batch.order]),
        )
        objective, longest = self._recipe.training, self._recipe.sampling.max_new_tokens
        loss, parts, entropy_N = loss_of(
            self._passes, batch, given, step.totals, objective, longest
        )
        return BatchLoss(loss, parts, given.advantage_N, entropy_N)

    def _behaviour(self, step: _PolicyStep, batch: MicroBatch) -> Tensor | None:
        """Return log-probabilities [N] under the versions that sampled; None if all are current.

        A micro-batch may mix the current policy with earlier versions.
        """
        parts = [step.known[j].behaviour for j in batch.order]
        if any(part is not None for part in parts) and any(part is None for part in parts):
            own = torch.split(self._passes.current(batch), batch.row_N.bincount().tolist())
            parts = [o if p is None else p for o, p in zip(own, parts, strict=True)]
        return _joined(parts)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a micro-batch's loss besides the policy in training; all [N]."""

    behaviour_N: Tensor | None
    """Log-probabilities under the versions that sampled; none when that is the policy itself."""
    advantage_N: Tensor
    """The advantage of each token's sample."""
    sample_N: Tensor
    """Number of the sample that each token belongs to."""
    proximal_N: Tensor | None
    """Log-probabilities before the training step; none when that is the policy itself."""
    reference_N: Tensor | None
    """Log-probabilities under the base model, if the loss has a KL term."""

    def tokens(self, logp_R: Tensor, entropy_R: Tensor, rows: Rows = slice(None)) -> Tokens:
        """Return the inputs of a loss for some tokens."""
        own_R = logp_R.detach()
        return Tokens(
            logp_R,
            own_R if self.behaviour_N is None else self.behaviour_N[rows],
            self.advantage_N[rows],
            self.sample_N[rows],
            proximal_N=own_R if self.proximal_N is None else self.proximal_N[rows],
            entropy_N=entropy_R,
            reference_N=None if self.reference_N is None else self.reference_N[rows],
        )


def loss_of(
    passes: Passes,
    batch: MicroBatch,
    given: LossInputs,
    totals: Totals,
    objective: ObjectiveRecipe,
    longest: int,
) -> tuple[Tensor, TokenLoss, Tensor]:
    """Return a micro-batch's loss with its gradient, its parts, and the entropy [N].

    Losses that look at one token at a time get their slopes while the log-probabilities are made,
    in one pass; losses with a ratio or weight per sample need all of its tokens first, and
    recompute the logits. Both give the same gradient.

    `longest` is the recipe's max_new_tokens.
    """
    weight_N = weights(given.sample_N, totals, objective, longest).float()
    if is_token_level(objective):

        def of_tokens(logp_R: Tensor, entropy_R: Tensor, rows: Rows) -> Tensor:
            tokens = given.tokens(logp_R, entropy_R, rows)
            return token_loss(tokens, objective).loss_N * weight_N[rows]

        loss, logp_N, entropy_N = passes.objective(batch, of_tokens)
        parts = token_loss(given.tokens(logp_N, entropy_N), objective)
    else:
        logp_N, entropy_N = passes.logprobs(batch)
        parts = token_loss(given.tokens(logp_N, entropy_N), objective)
        loss = (parts.loss_N * weight_N).sum()
    return loss, parts, entropy_N.detach()


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return the parts that exist in one tensor; None if no part exists."""
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None


def _mini_batches(
    groups: list[list[TrainingSample]], count: int, step: Step
) -> list[list[list[TrainingSample]]]:
    """Deal whole groups to `count` mini-batches of about equal size; none of them is empty."""
    order = list(groups)
    random.Random(f"step {step}").shuffle(order)
    return [dealt for dealt in (order[i::count] for i in range(count)) if dealt]


def _parted(
    mini_batches: list[list[list[TrainingSample]]], kept: list[list[TrainingSample]]
) -> tuple[int, list[list[list[TrainingSample]]]]:
    """Return how many mini-batches lost samples, and what is left of those mini-batches."""
    whole = {id(sample) for group in kept for sample in group}
    left = [[[s for s in group if id(s) in whole] for group in groups] for groups in mini_batches]
    broken = [part for part, all_of in zip(left, mini_batches, strict=True) if part != all_of]
    rest = [[group for group in groups if group] for groups in broken]
    return len(broken), [groups for groups in rest if groups]
