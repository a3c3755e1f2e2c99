"""The losses a second way: one sample at a time, plain floats, by cases; slopes by differences.

Where a loss stops a gradient, the reference uses the `held` log-probabilities, which differences do
not move.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from muster.protocol.objective import ObjectiveRecipe
from muster.trainer.learn.losses import Tokens

STEP = 1e-6
"""Step of the central differences."""

Floats = Sequence[float]


class Slopes(NamedTuple):
    """The reference's gradient."""

    logp_N: Tensor
    entropy_N: Tensor


def reference_loss(tokens: Tokens, objective: ObjectiveRecipe, longest: int) -> float:
    """The whole batch's loss."""
    logp, entropy = tokens.logp_N.tolist(), _list(tokens.entropy_N)
    return _loss(tokens, objective, longest, logp, logp, entropy)


def reference_gradient(tokens: Tokens, objective: ObjectiveRecipe, longest: int) -> Slopes:
    """Central differences of the whole batch's loss."""
    logp, entropy = tokens.logp_N.tolist(), _list(tokens.entropy_N)

    def slope(i: int, *, of_entropy: bool) -> float:
        ends = []
        for step in (STEP, -STEP):
            moved_logp, moved_entropy = list(logp), list(entropy)
            (moved_entropy if of_entropy else moved_logp)[i] += step
            ends.append(_loss(tokens, objective, longest, moved_logp, logp, moved_entropy))
        return (ends[0] - ends[1]) / (2 * STEP)

    count = range(len(logp))
    return Slopes(
        torch.tensor([slope(i, of_entropy=False) for i in count], dtype=torch.float64),
        torch.tensor([slope(i, of_entropy=True) for i in count], dtype=torch.float64),
    )


def _loss(
    tokens: Tokens,
    objective: ObjectiveRecipe,
    longest: int,
    logp: Floats,
    held: Floats,
    entropy: Floats,
) -> float:
    samples = tokens.sample_N.tolist()
    sums, lengths = [], []
    for sample in sorted(set(samples)):
        rows = [i for i, owner in enumerate(samples) if owner == sample]
        sums.append(math.fsum(_terms(tokens, objective, rows, logp, held, entropy)))
        lengths.append(len(rows))
    if objective.aggregation == "token":
        return math.fsum(sums) / sum(lengths)
    if objective.aggregation == "constant":
        return math.fsum(sums) / (len(sums) * longest)
    return math.fsum(s / n for s, n in zip(sums, lengths, strict=True)) / len(sums)


def _terms(
    tokens: Tokens,
    objective: ObjectiveRecipe,
    rows: list[int],
    logp: Floats,
    held: Floats,
    entropy: Floats,
) -> list[float]:
    """The loss of each token of one sample."""
    behaviour, reference = tokens.behaviour_N.tolist(), _list(tokens.reference_N)
    proximal = _list(tokens.proximal_N)
    anchor = proximal if objective.decoupled else behaviour
    advantage = float(tokens.advantage_N[rows[0]])
    weights = dict.fromkeys(rows, 1.0)
    if objective.decoupled:
        weights = _weights(objective, {i: math.exp(proximal[i] - behaviour[i]) for i in rows})
    terms = []
    for i in rows:
        if objective.loss == "gspo":
            log_ratio = sum(logp[j] - anchor[j] for j in rows) / len(rows)
        else:
            log_ratio = logp[i] - anchor[i]
        loss = weights[i] * _policy(
            objective,
            math.exp(log_ratio),
            math.exp(held[i] - anchor[i]),
            advantage,
            logp[i],
            held[i],
        )
        loss += objective.kl_coefficient * _kl(
            objective.kl_estimator, logp[i], held[i], behaviour[i], reference[i]
        )
        loss += objective.drift_coefficient * (logp[i] - behaviour[i]) ** 2
        terms.append(loss - objective.entropy_coefficient * entropy[i])
    return terms


def _weights(objective: ObjectiveRecipe, weights: dict[int, float]) -> dict[int, float]:
    low, high = objective.correction_low, objective.correction_high
    if objective.correction_level == "sequence":
        weights = dict.fromkeys(weights, math.prod(weights.values()))
    if objective.correction == "truncate":
        return {i: sorted((low, w, high))[1] for i, w in weights.items()}
    return {i: w if low <= w <= high else 0.0 for i, w in weights.items()}


def _policy(
    o: ObjectiveRecipe, ratio: float, held_ratio: float, a: float, logp: float, held: float
) -> float:
    low, high = 1 - o.clip_epsilon, 1 + o.clip_epsilon_high
    if o.loss == "cispo":
        return -sorted((low, held_ratio, high))[1] * a * logp
    if o.loss == "truncated_is":
        return -(held_ratio if held_ratio < o.ratio_high else o.ratio_high) * a * logp
    if o.loss == "ratio_clamp":
        return -a * (ratio if ratio < o.ratio_high else o.ratio_high)
    if o.loss == "masked_is":
        return -a * ratio if o.ratio_low <= held_ratio <= o.ratio_high else 0.0
    if o.loss == "dppo":
        change = math.exp(held) * (1 - 1 / held_ratio)
        goes_on = (a > 0 and change > o.clip_epsilon_high) or (a < 0 and change < -o.clip_epsilon)
        return 0.0 if goes_on else -a * ratio
    if a >= 0:
        return -a * (ratio if ratio < high else high)
    bound = o.clip_delta if o.loss == "two_sided" else math.inf
    return -a * sorted((low, ratio, bound))[1]


def _kl(kind: str, logp: float, held: float, behaviour: float, reference: float) -> float:
    d = logp - reference
    if kind == "k1":
        # Value d, slope ratio * d.
        fixed = held - reference
        weight = math.exp(logp - behaviour) - math.exp(held - behaviour)
        return fixed + weight * fixed
    if kind == "k2":
        return 0.5 * d * d
    k3 = math.exp(reference) / math.exp(logp) - 1 + d
    return k3 * math.exp(logp - behaviour) if kind == "k3_weighted" else k3


def _list(tensor: Tensor | None) -> list[float]:
    assert tensor is not None
    found: list[float] = tensor.tolist()
    return found
