"""The reward of a sample: what its task's verifier gave, and what its length changes about it.

The task reward is the one in an accepted file, which validators graded again; nothing else that a
worker claims comes in. Target lengths are derived from the ticket, one of the recipe's budgets.
"""

from __future__ import annotations

from muster.protocol.objective import ObjectiveRecipe


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
