"""The policy losses and their regularisers: pure functions of token log-probabilities.

All of them take the same tensors (`Tokens`) and return, per token, a loss and whether the token was
bounded. Per completion token, with ratio rho = exp(logp - anchor logp), advantage A and
stop-gradient sg:

    two_sided      -min(min(rho, delta) A, clip(rho, 1 - eps, 1 + eps_high) A)
    grpo, dr_grpo, dapo    the same without delta; they differ in aggregation and defaults
    gspo           the same with rho = exp(mean of the sample's log-ratios)
    cispo          -sg(clip(rho, 1 - eps, 1 + eps_high)) A logp
    ratio_clamp    -min(rho, c) A
    truncated_is   -sg(min(rho, c)) A logp
    masked_is      -1[low <= rho <= high] rho A
    dppo           -1[not (A (p - p_anchor) > 0 and the change of p is beyond eps)] rho A

The anchor is the behaviour policy, or with a decoupled objective the proximal one; then the policy
loss is multiplied by sg(proximal / behaviour), bounded. KL to the reference, squared log-ratio and
entropy are added. Sources, and where this departs from them: docs/losses.md.

`total` sums them up with weights computed from the optimiser step's *global* counts, so that
packing, micro-batches and ranks cannot change the gradient.

Axes: N completion tokens, S samples they belong to.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from muster.protocol.objective import SAMPLE_LOSSES, LossName, ObjectiveRecipe

LOG_RATIO_LIMIT: Final = 20.0
"""Log-ratios are clamped to this before exp, which could overflow float32; a ratio beyond e^20 gets
no gradient."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Inputs of a loss; all are [N], and all but `sample_N` have one floating dtype."""

    logp_N: Tensor
    """Log-probabilities under the policy in training; carry gradient."""
    behaviour_N: Tensor
    """Log-probabilities under the policy version that sampled, recomputed by the trainer."""
    advantage_N: Tensor
    """The advantage of each token's sample."""
    sample_N: Tensor
    """int64: which sample each token belongs to; equal numbers mean the same sample. All tokens of
    a sample are in one call."""
    proximal_N: Tensor | None = None
    """Log-probabilities at the start of the training step; needed by a decoupled objective."""
    entropy_N: Tensor | None = None
    """Entropy of the policy's distribution, with gradient; needed by an entropy bonus."""
    reference_N: Tensor | None = None
    """Log-probabilities under the base model; needed by a KL term."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The loss and its parts, per token."""

    loss_N: Tensor
    """Contribution of each token, before aggregation; carries gradient."""
    ratio_N: Tensor
    """Probability ratio to the behaviour policy, detached."""
    clipped_N: Tensor
    """Whether the loss bounded the token: it cut the policy gradient or its weight."""
    kl_N: Tensor | None
    """Estimate of the KL divergence to the reference, detached; none without a KL term."""


class Totals(NamedTuple):
    """Counts over a whole optimiser step: every micro-batch of every rank."""

    tokens: int
    """Completion tokens."""
    samples: int
    """Samples."""


Surrogate = Callable[[Tokens, Tensor, ObjectiveRecipe], tuple[Tensor, Tensor]]
"""(tokens, log-ratio to the anchor [N], parameters) to (policy loss [N], bounded or not [N])."""


def token_loss(tokens: Tokens, objective: ObjectiveRecipe) -> TokenLoss:
    """Return the loss of each completion token.

    Raises ValueError when a tensor is missing that the objective needs.
    """
    drift_N = _log_ratio(tokens.logp_N, tokens.behaviour_N)
    if objective.decoupled:
        proximal_N = _needed(tokens.proximal_N, "proximal_N", "a decoupled objective")
        anchored_N = _log_ratio(tokens.logp_N, proximal_N)
        loss_N, clipped_N = LOSSES[objective.loss](tokens, anchored_N, objective)
        loss_N = loss_N * _correction(tokens, proximal_N, objective)
    else:
        loss_N, clipped_N = LOSSES[objective.loss](tokens, drift_N, objective)
    kl_N = None
    if objective.kl_coefficient:
        reference_N = _needed(tokens.reference_N, "reference_N", "a KL term")
        kl_N = kl_divergence(tokens.logp_N, reference_N, drift_N, objective.kl_estimator)
        loss_N = loss_N + objective.kl_coefficient * kl_N
    if objective.drift_coefficient:
        loss_N = loss_N + objective.drift_coefficient * drift_N**2
    if objective.entropy_coefficient:
        entropy_N = _needed(tokens.entropy_N, "entropy_N", "an entropy bonus")
        loss_N = loss_N - objective.entropy_coefficient * entropy_N
    detached_kl_N = kl_N.detach() if kl_N is not None else None
    loss_N = _not_laundered(loss_N, tokens.logp_N)
    return TokenLoss(loss_N, drift_N.detach().exp(), clipped_N, detached_kl_N)


def is_token_level(objective: ObjectiveRecipe) -> bool:
    """Tell whether each token's loss depends on that token alone."""
    by_sample = objective.decoupled and objective.correction_level == "sequence"
    return objective.loss not in SAMPLE_LOSSES and not by_sample


def weights(sample_N: Tensor, totals: Totals, objective: ObjectiveRecipe, longest: int) -> Tensor:
    """Return each token's weight in the optimiser step's loss, float64.

    The weighted sums of all micro-batches and ranks add up to the mean over `totals`. `longest` is
    the recipe's max_new_tokens, which the constant aggregation divides by.
    """
    if objective.aggregation == "token":
        count_N = torch.full_like(sample_N, totals.tokens)
    elif objective.aggregation == "constant":
        count_N = torch.full_like(sample_N, totals.samples * longest)
    else:
        count_N = _lengths(sample_N)[sample_N] * totals.samples
    return 1 / count_N.double()


def total(
    loss_N: Tensor, sample_N: Tensor, totals: Totals, objective: ObjectiveRecipe, longest: int
) -> Tensor:
    """Return these tokens' part of the optimiser step's loss, a scalar; see `weights`."""
    return (loss_N * weights(sample_N, totals, objective, longest).to(loss_N.dtype)).sum()


def kl_divergence(logp_N: Tensor, reference_N: Tensor, drift_N: Tensor, estimator: str) -> Tensor:
    """Return an estimate of KL(policy || reference) per token; `drift_N` is the log-ratio to the
    behaviour policy. With d = logp - reference:

        k1            d, with the gradient rho d grad(logp), which is the divergence's own
        k2            d^2 / 2: gradient d grad(logp), the divergence's own where rho = 1
        k3            exp(-d) - 1 + d: gradient (1 - exp(-d)) grad(logp), which is that of
                      KL(reference || policy) where rho = 1, as in GRPO's paper and TRL
        k3_weighted   rho (exp(-d) - 1 + d): gradient rho d grad(logp), the divergence's own

    Left to autograd, k1 would have the gradient grad(logp), whose mean is zero.
    """
    d_N = _log_ratio(logp_N, reference_N)
    if estimator == "k1":
        weighed_N = drift_N.exp() * d_N.detach()
        return d_N.detach() + weighed_N - weighed_N.detach()
    if estimator == "k2":
        return d_N**2 / 2
    # Not exp - 1: for small d its rounding error exceeds the result and may make it negative.
    k3_N = torch.expm1(-d_N) + d_N
    return drift_N.exp() * k3_N if estimator == "k3_weighted" else k3_N


def _two_sided(
    tokens: Tokens, log_ratio_N: Tensor, objective: ObjectiveRecipe
) -> tuple[Tensor, Tensor]:
    return _clipped(tokens, log_ratio_N, objective, bound=objective.clip_delta)


def _one_sided(
    tokens: Tokens, log_ratio_N: Tensor, objective: ObjectiveRecipe
) -> tuple[Tensor, Tensor]:
    return _clipped(tokens, log_ratio_N, objective, bound=math.inf)


def _gspo(tokens: Tokens, log_ratio_N: Tensor, objective: ObjectiveRecipe) -> tuple[Tensor, Tensor]:
    lengths_S = _lengths(tokens.sample_N)
    mean_S = _sums(log_ratio_N, tokens.sample_N) / lengths_S
    return _clipped(tokens, mean_S[tokens.sample_N], objective, bound=math.inf)


def _cispo(
    tokens: Tokens, log_ratio_N: Tensor, objective: ObjectiveRecipe
) -> tuple[Tensor, Tensor]:
    low, high = 1 - objective.clip_epsilon, 1 + objective.clip_epsilon_high
    return _weighted_reinforce(tokens, log_ratio_N, low, high)


def _truncated_is(
    tokens: Tokens, log_ratio_N: Tensor, objective: ObjectiveRecipe
) -> tuple[Tensor, Tensor]:
    return _weighted_reinforce(tokens, log_ratio_N, 0.0, objective.ratio_high)


def _ratio_clamp(
    tokens: Tokens, log_ratio_N: Tensor, objective: ObjectiveRecipe
) -> tuple[Tensor, Tensor]:
    ratio_N = log_ratio_N.exp()
    loss_N = -ratio_N.clamp(max=objective.ratio_high) * tokens.advantage_N
    return loss_N, ratio_N.detach() > objective.ratio_high


def _masked_is(
    tokens: Tokens, log_ratio_N: Tensor, objective: ObjectiveRecipe
) -> tuple[Tensor, Tensor]:
    ratio_N = log_ratio_N.exp()
    dropped_N = (ratio_N < objective.ratio_low) | (ratio_N > objective.ratio_high)
    return -ratio_N.masked_fill(dropped_N, 0.0) * tokens.advantage_N, dropped_N


def _dppo(tokens: Tokens, log_ratio_N: Tensor, objective: ObjectiveRecipe) -> tuple[Tensor, Tensor]:
    p_N = tokens.logp_N.detach().exp()
    rise_N = p_N - torch.exp(tokens.logp_N.detach() - log_ratio_N.detach())
    too_high_N = (tokens.advantage_N > 0) & (rise_N > objective.clip_epsilon_high)
    too_low_N = (tokens.advantage_N < 0) & (rise_N < -objective.clip_epsilon)
    dropped_N = too_high_N | too_low_N
    return -log_ratio_N.exp().masked_fill(dropped_N, 0.0) * tokens.advantage_N, dropped_N


LOSSES: Final[Mapping[LossName, Surrogate]] = {
    "two_sided": _two_sided,
    "grpo": _one_sided,
    "dr_grpo": _one_sided,
    "dapo": _one_sided,
    "gspo": _gspo,
    "cispo": _cispo,
    "ratio_clamp": _ratio_clamp,
    "truncated_is": _truncated_is,
    "masked_is": _masked_is,
    "dppo": _dppo,
}
"""The policy losses by name."""


def _clipped(
    tokens: Tokens, log_ratio_N: Tensor, objective: ObjectiveRecipe, *, bound: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped surrogate whose ratio is at most `bound`."""
    ratio_N, advantage_N = log_ratio_N.exp(), tokens.advantage_N
    low, high = 1 - objective.clip_epsilon, 1 + objective.clip_epsilon_high
    loss_N = -torch.minimum(
        ratio_N.clamp(max=bound) * advantage_N, ratio_N.clamp(low, high) * advantage_N
    )
    ratio_N = ratio_N.detach()
    too_high_N = (advantage_N > 0) & (ratio_N > high)
    outside_N = (advantage_N < 0) & ((ratio_N < low) | (ratio_N > bound))
    return loss_N, too_high_N | outside_N


def _weighted_reinforce(
    tokens: Tokens, log_ratio_N: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return the policy gradient's loss, weighted by the bounded ratio, which is detached."""
    ratio_N = log_ratio_N.detach().exp()
    loss_N = -ratio_N.clamp(low, high) * tokens.advantage_N * tokens.logp_N
    return loss_N, (ratio_N < low) | (ratio_N > high)


def _not_laundered(loss_N: Tensor, logp_N: Tensor) -> Tensor:
    """Return the loss; where it is not finite, its gradient is not finite either.

    clamp and minimum pass no gradient for NaN: without this, the optimiser step would be taken.
    """
    poison_N = torch.zeros_like(loss_N).masked_fill(~torch.isfinite(loss_N), math.nan)
    return loss_N + logp_N * poison_N


def _correction(tokens: Tokens, proximal_N: Tensor, objective: ObjectiveRecipe) -> Tensor:
    """Return the bounded weight proximal / behaviour of each token, without gradient."""
    log_weight_N = _log_ratio(proximal_N, tokens.behaviour_N).detach()
    if objective.correction_level == "sequence":
        product_S = _sums(log_weight_N, tokens.sample_N)
        log_weight_N = product_S.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[tokens.sample_N]
    weight_N = log_weight_N.exp()
    low, high = objective.correction_low, objective.correction_high
    if objective.correction == "truncate":
        return weight_N.clamp(low, high)
    return weight_N.masked_fill((weight_N < low) | (weight_N > high), 0.0)


def _log_ratio(logp_N: Tensor, other_N: Tensor) -> Tensor:
    return (logp_N - other_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _lengths(sample_N: Tensor) -> Tensor:
    return torch.bincount(sample_N)


def _sums(value_N: Tensor, sample_N: Tensor) -> Tensor:
    sums_S = value_N.new_zeros(int(sample_N.max()) + 1)
    return sums_S.index_add(0, sample_N, value_N)


def _needed(tensor: Tensor | None, name: str, by: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"{by} needs {name}")
    return tensor
