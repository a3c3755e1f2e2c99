"""The tensors of a training step: policy, optimiser, behaviour and reference policies.

Owns torch and nothing else: no network, no chain, no clock. Blocking; the loop runs it in a thread.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.trainer.filters import Drop, keep_informative
from muster.trainer.grpo import LossWeights, TokenLoss, token_loss
from muster.trainer.logprob import head_of, token_logprobs
from muster.trainer.packing import MicroBatch, Sample, pack

logger = logging.getLogger(__name__)

BASE = PolicyVersion(0)
"""The reference policy of the KL term."""

Weights = Mapping[str, Tensor]
"""A policy's parameters by name, as saved."""


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
    """Mean loss per token."""
    grad_norm: float
    """Largest gradient norm of the step's optimiser steps, before clipping."""
    entropy: float
    """Mean entropy of the policy at the trained tokens, in nats."""
    clip_fraction: float
    """Share of tokens whose policy gradient the clip cut."""
    max_ratio: float
    """Largest probability ratio to the behaviour policy."""
    kl: float
    """Mean k3 divergence from the base model; 0 when the recipe has no KL term."""
    learning_rate: float
    """Of the optimiser steps."""
    skipped: int
    """Optimiser steps left out because loss or gradient were not finite."""


@dataclass(slots=True)
class _Sums:
    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    max_ratio: float = 0.0
    grad_norm: float = 0.0
    skipped: int = 0


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
    ) -> None:
        """`published` gives a published version's weights, exactly as workers got them."""
        self._recipe = recipe
        self._published = published
        self._micro_batch_tokens = micro_batch_tokens
        self._device = torch.device(device)
        self.model = _load(model_folder, self._device).train()
        # The behaviour policies and the reference take turns in it.
        self._frozen = _load(model_folder, self._device).eval().requires_grad_(False)
        training = recipe.training
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=training.learning_rate,
            betas=(training.adam_beta1, training.adam_beta2),
            weight_decay=training.weight_decay,
        )

    def step(self, step: Step, groups: Sequence[Sequence[Rollout]]) -> StepFigures:
        """Take the optimiser steps of one training step; the same input gives the same weights."""
        kept = keep_informative(groups, self._recipe.training)
        rewards = [rollout.task_reward for group in groups for rollout in group]
        learning_rate = self._set_learning_rate(step)
        sums = _Sums()
        for mini_batch in _mini_batches(kept.samples, self._recipe.training.optimizer_steps, step):
            self._optimizer_step(mini_batch, sums)
        tokens = max(1, sums.tokens)
        return StepFigures(
            reward=sum(rewards) / len(rewards),
            samples=sum(map(len, kept.samples)),
            tokens=sums.tokens,
            dropped=kept.dropped,
            loss=sums.loss / tokens,
            grad_norm=sums.grad_norm,
            entropy=sums.entropy / tokens,
            clip_fraction=sums.clipped / tokens,
            max_ratio=sums.max_ratio,
            kl=sums.kl / tokens,
            learning_rate=learning_rate,
            skipped=sums.skipped,
        )

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's parameters and buffers, tied ones once."""
        return named_weights(self.model)

    def restore(self, weights: Weights, optimizer: dict[str, Any]) -> None:
        """Continue from saved weights and optimiser state; an empty one starts afresh."""
        load_weights(self.model, weights)
        if optimizer:
            self.optimizer.load_state_dict(optimizer)

    def _set_learning_rate(self, step: Step) -> float:
        training = self._recipe.training
        warm = min(1.0, step / training.warmup_steps) if training.warmup_steps else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = training.learning_rate * warm
        return training.learning_rate * warm

    def _optimizer_step(self, samples: list[Sample], sums: _Sums) -> None:
        micro_batches = pack(samples, self._micro_batch_tokens)
        behaviour = self._behaviour_logprobs(samples, micro_batches)
        reference = self._reference_logprobs(micro_batches)
        tokens = sum(len(sample.completion_tokens) for sample in samples)
        self.optimizer.zero_grad(set_to_none=True)
        for i, batch in enumerate(micro_batches):
            advantages = torch.tensor([samples[j].advantage for j in batch.order])
            self._accumulate(batch, behaviour[i], reference[i], advantages, tokens, sums)
        self._descend(sums)

    def _accumulate(
        self,
        batch: MicroBatch,
        behaviour_N: Tensor,
        reference_N: Tensor | None,
        advantage_B: Tensor,
        tokens: int,
        sums: _Sums,
    ) -> None:
        training = self._recipe.training
        logp_N, entropy_N = self._logprobs(self.model, batch)
        parts = token_loss(
            logp_N,
            behaviour_N,
            advantage_B[batch.row_N].to(logp_N.device),
            LossWeights(
                training.clip_epsilon,
                training.clip_delta,
                training.kl_coefficient,
                training.entropy_coefficient,
            ),
            entropy_N=entropy_N,
            reference_N=reference_N,
        )
        (parts.loss_N.sum() / tokens).backward()  # type: ignore[no-untyped-call]  # torch's stub
        _count(sums, parts, entropy_N.detach())

    def _descend(self, sums: _Sums) -> None:
        """Take the optimiser step, unless the gradient is not finite."""
        norm = float(
            torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self._recipe.training.max_grad_norm
            )
        )
        if not math.isfinite(norm):
            sums.skipped += 1
            logger.error("optimiser step skipped: the gradient is not finite")
            self.optimizer.zero_grad(set_to_none=True)
            return
        sums.grad_norm = max(sums.grad_norm, norm)
        self.optimizer.step()

    def _behaviour_logprobs(
        self, samples: list[Sample], batches: Sequence[MicroBatch]
    ) -> list[Tensor]:
        """Return each token's log-probability under the policy version that sampled it."""
        versions = {PolicyVersion(sample.policy_version) for sample in samples}
        found = [torch.empty(len(batch.targets_N), device=self._device) for batch in batches]
        for version in sorted(versions):
            self._freeze(version)
            for batch, logp_N in zip(batches, found, strict=True):
                rows = [samples[i].policy_version == version for i in batch.order]
                mask_N = torch.tensor(rows)[batch.row_N]
                if mask_N.any():
                    logp_N[mask_N] = self._frozen_logprobs(batch)[mask_N]
        return found

    def _reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        if not self._recipe.training.kl_coefficient:
            return [None] * len(batches)
        self._freeze(BASE)
        return [self._frozen_logprobs(batch) for batch in batches]

    def _freeze(self, version: PolicyVersion) -> None:
        load_weights(self._frozen, self._published(version))

    @torch.no_grad()
    def _frozen_logprobs(self, batch: MicroBatch) -> Tensor:
        return self._logprobs(self._frozen, batch)[0]

    def _logprobs(self, model: Any, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            batch.hidden(model),
            head_of(model),
            batch.targets_N.to(self._device),
            self._recipe.sampling.temperature,
        )


def named_weights(model: Any) -> dict[str, Tensor]:
    """Return a model's parameters and saved buffers by name; tied ones once."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    return {name: value for name, value in model.state_dict().items() if name not in tied}


def load_weights(model: Any, weights: Weights) -> None:
    """Copy weights, as `named_weights` returns them, into a model of the same architecture."""
    own = named_weights(model)
    if own.keys() != weights.keys():
        raise ValueError(f"weights differ in {sorted(own.keys() ^ weights.keys())[:5]}")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(weights[name])


def _load(folder: Path, device: torch.device) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)


def _mini_batches(groups: list[list[Sample]], count: int, step: Step) -> list[list[Sample]]:
    """Deal whole groups to `count` mini-batches of about equal size; none of them is empty."""
    order = list(groups)
    random.Random(f"step {step}").shuffle(order)
    dealt = [[sample for group in order[i::count] for sample in group] for i in range(count)]
    return [samples for samples in dealt if samples]


def _count(sums: _Sums, parts: TokenLoss, entropy_N: Tensor) -> None:
    sums.tokens += len(parts.loss_N)
    sums.loss += float(parts.loss_N.detach().sum())
    sums.entropy += float(entropy_N.sum())
    sums.clipped += float(parts.clipped_N.sum())
    sums.max_ratio = max(sums.max_ratio, float(parts.ratio_N.max()))
    if parts.kl_N is not None:
        sums.kl += float(parts.kl_N.sum())
