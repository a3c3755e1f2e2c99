"""What a training step did: sums over its tokens, and the figures made of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from muster.trainer.filters import Drop
from muster.trainer.losses import TokenLoss


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a training step did."""

    reward: float
    """Mean task reward of all samples, those left out included."""
    samples: int
    """Samples trained on."""
    tokens: int
    """Completion tokens trained on."""
    dropped: Counter[Drop]
    """Samples left out, by reason."""
    loss: float
    """Mean of the loss over tokens, whatever the aggregation."""
    grad_norm: float
    """Largest gradient norm of the step's optimiser steps, before clipping."""
    entropy: float
    """Mean entropy of the policy at the trained tokens, in nats."""
    clip_fraction: float
    """Share of tokens whose part in the loss was bounded."""
    clip_low: float
    """Share of tokens with negative advantage whose part was bounded."""
    clip_high: float
    """Share of tokens with positive advantage whose part was bounded."""
    mean_ratio: float
    """Mean probability ratio to the behaviour policy."""
    max_ratio: float
    """Largest probability ratio to the behaviour policy."""
    mismatch_kl: float
    """KL divergence of the policy before the step from the behaviour policies, per token: the mean
    of ratio - 1 - log(ratio) in the first optimiser step."""
    mismatch_max: float
    """Largest absolute log-ratio to the behaviour policy in the first optimiser step."""
    kl: float
    """Mean estimate of the divergence from the base model; 0 when the recipe has no KL term."""
    learning_rate: float
    """Of the optimiser steps."""
    skipped: int
    """Optimiser steps left out because loss or gradient were not finite."""


@dataclass(slots=True)
class Sums:
    """Sums and maxima over the tokens of a training step."""

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clip_low: float = 0.0
    clip_high: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0
    max_ratio: float = 0.0
    grad_norm: float = 0.0
    skipped: int = 0
    first_tokens: int = 0
    mismatch_kl: float = 0.0
    mismatch_max: float = 0.0

    def add(
        self, parts: TokenLoss, advantage_N: Tensor, entropy_N: Tensor, *, is_first: bool
    ) -> None:
        """Count a micro-batch; `is_first` when no optimiser step was taken before it."""
        ratio_N = parts.ratio_N
        self.tokens += len(ratio_N)
        self.loss += float(parts.loss_N.detach().sum())
        self.entropy += float(entropy_N.detach().sum())
        self.clip_low += float((parts.clipped_N & (advantage_N < 0)).sum())
        self.clip_high += float((parts.clipped_N & (advantage_N > 0)).sum())
        self.ratio += float(ratio_N.sum())
        self.max_ratio = max(self.max_ratio, float(ratio_N.max()))
        if parts.kl_N is not None:
            self.kl += float(parts.kl_N.sum())
        if is_first:
            log_ratio_N = ratio_N.log()
            self.first_tokens += len(ratio_N)
            self.mismatch_kl += float((ratio_N - 1 - log_ratio_N).sum())
            self.mismatch_max = max(self.mismatch_max, float(log_ratio_N.abs().max()))

    def include(self, other: Sums, largest: frozenset[str]) -> None:
        """Add what another sum counted; of the fields named in `largest`, the larger is kept."""
        for name in self.__slots__:
            own, more = getattr(self, name), getattr(other, name)
            setattr(self, name, max(own, more) if name in largest else own + more)

    def figures(
        self, *, reward: float, samples: int, dropped: Counter[Drop], learning_rate: float
    ) -> StepFigures:
        """Return the step's figures; those per token are 0 when nothing was trained on."""
        tokens = max(1, self.tokens)
        return StepFigures(
            reward=reward,
            samples=samples,
            tokens=self.tokens,
            dropped=dropped,
            loss=self.loss / tokens,
            grad_norm=self.grad_norm,
            entropy=self.entropy / tokens,
            clip_fraction=(self.clip_low + self.clip_high) / tokens,
            clip_low=self.clip_low / tokens,
            clip_high=self.clip_high / tokens,
            mean_ratio=self.ratio / tokens,
            max_ratio=self.max_ratio,
            mismatch_kl=self.mismatch_kl / max(1, self.first_tokens),
            mismatch_max=self.mismatch_max,
            kl=self.kl / tokens,
            learning_rate=learning_rate,
            skipped=self.skipped,
        )
