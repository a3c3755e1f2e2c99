"""The tensors of supervised fine-tuning: a step whose loss is the cross-entropy of given tokens.

Axes: N trained tokens of a micro-batch, R some of them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muster.protocol.ids import Step
from muster.protocol.sft import SftRecipe, SftTraining
from muster.trainer.learn.logprob import Rows
from muster.trainer.learn.losses import TokenLoss
from muster.trainer.learn.packing import TrainingSample
from muster.trainer.learn.trained_model import (
    BatchLoss,
    PackedStep,
    RankWork,
    TrainedModel,
    even_parts,
)
from muster.trainer.measure.figures import StepFigures


class HeldOutLoss(NamedTuple):
    """The loss on rows that are not trained on."""

    loss: float
    """Mean cross-entropy of their tokens, in nats."""
    tokens: int
    """Number of these tokens."""


class SftLearner(TrainedModel[SftRecipe, PackedStep]):
    """A model in supervised fine-tuning."""

    def step(self, step: Step, last: Step, samples: Sequence[TrainingSample]) -> StepFigures:
        """Take optimiser step `step` of `last`; the same input gives the same weights."""
        rate = rate_of(self._recipe.training, step, last)
        sums = self._take_together(rate, [[[sample] for sample in samples]])
        return sums.figures(reward=0.0, samples=len(samples), dropped=Counter(), learning_rate=rate)

    def held_out(self, samples: Sequence[TrainingSample]) -> HeldOutLoss:
        """Return the loss on rows, computed by all ranks."""
        parts = even_parts(list(samples), self._ranks.groups)
        self._ranks.lead("measure", *parts)
        return self.measure(parts[0])

    def measure(self, samples: Sequence[TrainingSample]) -> HeldOutLoss:
        """Return the loss on all ranks' rows; on all ranks together."""
        with self._ranks.watch("measuring the loss"), torch.no_grad():
            self._passes.refresh()
            own = 0.0
            for batch in self._passes.pack(samples):
                logp_N = self._passes.current(batch)
                own -= float(logp_N.double().sum()) if batch.order else 0.0
            found = self._ranks.gather_groups((own, sum(sample.sampled for sample in samples)))
        self._passes.spent()
        tokens = sum(count for _, count in found)
        return HeldOutLoss(sum(loss for loss, _ in found) / max(1, tokens), tokens)

    def _temperature(self) -> float:
        return 1.0

    def _planned(self, work: Sequence[RankWork]) -> list[PackedStep]:
        self._passes.refresh()
        return [self._packed(share) for share in work]

    def _loss(self, step: PackedStep, number: int) -> BatchLoss:
        weight = 1 / step.totals.tokens

        def of_tokens(logp_R: Tensor, _entropy_R: Tensor, _rows: Rows) -> Tensor:
            return -logp_R * weight

        loss, logp_N, entropy_N = self._passes.objective(step.batches[number], of_tokens)
        is_bounded_N = torch.zeros_like(logp_N, dtype=torch.bool)
        parts = TokenLoss(-logp_N, torch.ones_like(logp_N), is_bounded_N, None)
        return BatchLoss(loss, parts, torch.zeros_like(logp_N), entropy_N)


def rate_of(training: SftTraining, step: Step, last: Step) -> float:
    """Return the learning rate of optimiser step `step`, from 1 to `last`.

    It rises linearly over the warm-up. From there it falls along a cosine, which would reach the
    final rate in the step after the last.
    """
    warm = training.warmup_steps
    if step <= warm:
        return training.learning_rate * step / warm
    if training.schedule == "constant":
        return training.learning_rate
    share = 0.5 * (1 + math.cos(math.pi * (step - 1 - warm) / max(1, last - warm)))
    return training.learning_rate * (training.final_rate + (1 - training.final_rate) * share)
