"""Advantages: each sample of a group compared with the others. Pure functions of rewards.

The task reward is the one in an accepted file, which validators graded again; nothing else that a
worker claims is used. Target lengths are derived from the ticket, one of the recipe's budgets.

Axes: G samples of a group.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from muster.protocol.objective import AdvantageName, ObjectiveRecipe
from muster.protocol.recipe import TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.packing import TrainingSample
from muster.trainer.stream.filters import Drop, has_preference

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as in prime-rl."""


def rollout_advantages(group: Sequence[Rollout], objective: ObjectiveRecipe) -> list[float]:
    """Return the advantage of each rollout of a group, from its verified reward and its length."""
    task_G = [rollout.task_reward for rollout in group]
    length_G = [length_part(r.task_reward, r.sampled, r.target_length, objective) for r in group]
    if objective.length_advantage == "joint":
        return relative(
            [t + part for t, part in zip(task_G, length_G, strict=True)], objective.advantage
        )
    by_task_G = relative(task_G, objective.advantage)
    by_length_G = relative(length_G, objective.length_advantage)
    weight = objective.length_weight
    return [t + weight * part for t, part in zip(by_task_G, by_length_G, strict=True)]


def length_part(
    task_reward: float, length: int, target_length: int, objective: ObjectiveRecipe
) -> float:
    """Return what is added to the task reward for a completion of `length` tokens; 0 without a
    target (-1). The forms are those of INTELLECT-2's code, the second is L1-Max (arXiv 2503.04697):

        exact   -alpha |target - length|
        max     the task reward is multiplied by clip(alpha (target - length) + delta, 0, 1)
        clip    beyond the target there is no reward
    """
    if target_length < 0:
        return 0.0
    spare = target_length - length
    if objective.length_reward == "exact":
        return -objective.length_alpha * abs(spare)
    if objective.length_reward == "clip":
        return -task_reward if spare < 0 else 0.0
    share = min(1.0, max(0.0, objective.length_alpha * spare + objective.length_delta))
    return task_reward * (share - 1.0)


def relative(rewards_G: Sequence[float], kind: AdvantageName) -> list[float]:
    """Return how much better than its group each sample is; all zero when the rewards are equal.

        std             (r - mean) / (std + 1e-6), with the sample standard deviation (n - 1)
        mean            r - mean (Dr. GRPO)
        leave_one_out   r - mean of the others (RLOO) = (r - mean) n / (n - 1)
        max_rl          (r - mean) / mean (MaxRL); rewards must not be negative

    They sum to zero. Raises ValueError for a reward that is not finite, and for max_rl when the
    mean is not positive.
    """
    if not all(map(math.isfinite, rewards_G)):
        raise ValueError(f"rewards {list(rewards_G)} are not all finite")
    if max(rewards_G) == min(rewards_G):
        return [0.0] * len(rewards_G)
    mean = statistics.fmean(rewards_G)
    scale = _scale(rewards_G, mean, kind)
    return [(reward - mean) / scale for reward in rewards_G]


def _scale(rewards_G: Sequence[float], mean: float, kind: AdvantageName) -> float:
    match kind:
        case "std":
            return statistics.stdev(rewards_G) + STD_EPSILON
        case "mean":
            return 1.0
        case "leave_one_out":
            return (len(rewards_G) - 1) / len(rewards_G)
        case "max_rl" if mean <= 0:
            raise ValueError(f"max_rl divides by the mean reward, which is {mean}")
        case "max_rl":
            return mean
    assert_never(kind)


@dataclass(frozen=True, slots=True)
class Kept:
    """The samples of a training step."""

    samples: list[list[TrainingSample]]
    """Samples with their advantages, group by group."""
    dropped: Counter[Drop] = field(default_factory=Counter)
    """Samples left out, by reason."""


def keep_informative(groups: Sequence[Sequence[Rollout]], training: TrainingRecipe) -> Kept:
    """Return the groups whose task rewards differ, with group-relative advantages."""
    kept = Kept([])
    for group in groups:
        if has_preference(group):
            kept.samples.append(_samples(group, training))
        else:
            kept.dropped[Drop.ZERO_ADVANTAGE] += len(group)
    return kept


def without_mismatch(kept: Kept, surprise: Sequence[float], max_mismatch: float) -> Kept:
    """Leave out the samples that do not look sampled from the policy that they name.

    `surprise` is `Passes.surprise` of all samples in order. Groups keep their advantages.
    """
    left, remaining = Kept([], Counter(kept.dropped)), iter(surprise)
    for group in kept.samples:
        fits = []
        for sample, excess in zip(group, remaining, strict=False):
            if not math.isfinite(excess):
                left.dropped[Drop.NON_FINITE] += 1
            elif abs(excess) > max_mismatch:
                left.dropped[Drop.MISMATCH] += 1
            else:
                fits.append(sample)
        if fits:
            left.samples.append(fits)
    return left


def _samples(group: Sequence[Rollout], training: TrainingRecipe) -> list[TrainingSample]:
    return [
        TrainingSample(r.prompt_tokens, r.completion_tokens, advantage, r.policy_version, r.replies)
        for r, advantage in zip(group, rollout_advantages(group, training), strict=True)
    ]
