"""Advantages: each sample of a group compared with the others. Pure functions of rewards.

Axes: G samples of a group.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from muster.protocol.objective import ObjectiveRecipe
from muster.protocol.rollouts import Rollout
from muster.trainer.rewards import length_part

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, as in prime-rl."""

Kind = Literal["std", "mean", "leave_one_out", "max_rl"]
"""What rewards are compared with."""


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


def relative(rewards_G: Sequence[float], kind: Kind) -> list[float]:
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


def _scale(rewards_G: Sequence[float], mean: float, kind: Kind) -> float:
    if kind == "std":
        return statistics.stdev(rewards_G) + STD_EPSILON
    if kind == "leave_one_out":
        return (len(rewards_G) - 1) / len(rewards_G)
    if kind == "max_rl":
        if mean <= 0:
            raise ValueError(f"max_rl divides by the mean reward, which is {mean}")
        return mean
    return 1.0
