"""Which groups are trained on; everything left out is counted under a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from muster.protocol.recipe import TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.trainer.advantages import rollout_advantages
from muster.trainer.packing import Sample


class Drop(StrEnum):
    """Why something that was accepted is not trained on."""

    STALE = "stale"
    """Its policy is too many versions old."""
    UNREADABLE = "unreadable"
    """Its file is not what its outcome record says."""
    ZERO_ADVANTAGE = "zero_advantage"
    """All samples of the group have the same task reward: there is nothing to prefer."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The samples of a training step."""

    samples: list[list[Sample]]
    """Samples with their advantages, group by group."""
    dropped: Counter[Drop] = field(default_factory=Counter)
    """Samples left out, by reason."""


def keep_informative(groups: Sequence[Sequence[Rollout]], training: TrainingRecipe) -> Kept:
    """Return the groups whose task rewards differ, with group-relative advantages.

    The test is on the task reward: a length reward differs even where all are right or wrong.
    """
    kept = Kept([])
    for group in groups:
        if len({rollout.task_reward for rollout in group}) == 1:
            kept.dropped[Drop.ZERO_ADVANTAGE] += len(group)
        else:
            kept.samples.append(_samples(group, training))
    return kept


def _samples(group: Sequence[Rollout], training: TrainingRecipe) -> list[Sample]:
    return [
        Sample(r.prompt_tokens, r.completion_tokens, advantage, r.policy_version)
        for r, advantage in zip(group, rollout_advantages(group, training), strict=True)
    ]
