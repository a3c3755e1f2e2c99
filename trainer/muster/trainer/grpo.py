"""GRPO as INTELLECT-2 uses it: advantages, the two-sided clip, KL and entropy. Pure functions.

Per completion token with ratio rho = exp(logp - behaviour logp) and its sample's advantage A:

    loss = -min(min(rho, delta) * A, clip(rho, 1 - eps, 1 + eps) * A) + kl * k3 - entropy * H

summed over tokens and divided by the number of completion tokens of the whole optimiser step
(token-level loss), so neither packing nor micro-batching changes the gradient. delta only bites for
A < 0, where plain GRPO leaves the ratio unbounded (INTELLECT-2, arXiv 2505.07291, section 3.4).

Departures from the report: KL is the k3 estimator to the base model with its real gradient; the
behaviour policy is the published version that sampled, not the trainer's weights at the step.

Axes: N completion tokens, G samples of a group.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as in prime-rl."""


def total_reward(task_reward: float, length: int, target_length: int, alpha: float) -> float:
    """Return the task reward minus `alpha` per token of distance to the target (-1: no target)."""
    if target_length < 0:
        return task_reward
    return task_reward - alpha * abs(target_length - length)


def group_advantages(rewards_G: Sequence[float]) -> list[float]:
    """Return (reward - mean) / (std + 1e-6), with the sample standard deviation (n - 1).

    All zero when the rewards are equal.
    """
    if max(rewards_G) == min(rewards_G):
        return [0.0] * len(rewards_G)
    mean, std = statistics.fmean(rewards_G), statistics.stdev(rewards_G)
    return [(reward - mean) / (std + STD_EPSILON) for reward in rewards_G]


@dataclass(frozen=True, slots=True)
class LossWeights:
    """The constants of the loss."""

    epsilon: float
    """Half-width of the clipped interval around 1."""
    delta: float
    """Upper bound of the ratio for negative advantages; above 1 + epsilon."""
    kl: float
    """Weight of the KL term; 0 leaves it out."""
    entropy: float
    """Weight of the entropy bonus; 0 leaves it out."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What the loss is made of, per token."""

    loss_N: Tensor
    """Contribution of each token, before division by the token count."""
    ratio_N: Tensor
    """Probability ratio to the behaviour policy, detached."""
    clipped_N: Tensor
    """Whether the clip cut the policy gradient of the token."""
    kl_N: Tensor | None
    """k3 estimate of the KL divergence to the reference, detached; none without one."""


def token_loss(
    logp_N: Tensor,
    behaviour_N: Tensor,
    advantage_N: Tensor,
    weights: LossWeights,
    *,
    entropy_N: Tensor | None = None,
    reference_N: Tensor | None = None,
) -> TokenLoss:
    """Return the loss of each completion token. `logp_N` and `entropy_N` carry gradient.

    `entropy_N` and `reference_N` are needed when their weights are not zero.
    """
    ratio_N = torch.exp(logp_N - behaviour_N)
    bounded_N = ratio_N.clamp(max=weights.delta) * advantage_N
    clipped_N = ratio_N.clamp(1 - weights.epsilon, 1 + weights.epsilon) * advantage_N
    loss_N = -torch.minimum(bounded_N, clipped_N)
    kl_N = None
    if weights.kl and reference_N is not None:
        kl_N = k3_divergence(logp_N, reference_N)
        loss_N = loss_N + weights.kl * kl_N
    if weights.entropy and entropy_N is not None:
        loss_N = loss_N - weights.entropy * entropy_N
    return TokenLoss(
        loss_N,
        ratio_N.detach(),
        _is_cut(ratio_N.detach(), advantage_N, weights),
        kl_N.detach() if kl_N is not None else None,
    )


def k3_divergence(logp_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return exp(d) - d - 1 with d = reference - logp: non-negative, unbiased for KL(pi || ref)."""
    difference_N = reference_N - logp_N
    return torch.exp(difference_N) - difference_N - 1


def _is_cut(ratio_N: Tensor, advantage_N: Tensor, weights: LossWeights) -> Tensor:
    too_high_N = (advantage_N > 0) & (ratio_N > 1 + weights.epsilon)
    too_low_N = (advantage_N < 0) & (ratio_N < 1 - weights.epsilon)
    beyond_N = (advantage_N < 0) & (ratio_N > weights.delta)
    return too_high_N | too_low_N | beyond_N
