"""How often each problem is solved, and which problems are set aside for it: difficulty pools.

Nobody chooses problems in this design (a ticket derives them), so a pool acts on what is trained
on: a set-aside problem's groups are left out, but go on counting, so that it comes back when the
policy changes. Saved with the weights; a pure function of the training stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from muster.protocol.recipe import FilterRecipe


class Pool(StrEnum):
    """Where a problem is."""

    ACTIVE = "active"
    """It is trained on."""
    EASY = "easy"
    """It is solved (nearly) always."""
    HARD = "hard"
    """It is solved (nearly) never."""


@dataclass(frozen=True, slots=True)
class PassRate:
    """What is known of one problem."""

    groups: int
    """Groups that were counted."""
    rate: float
    """Mean task reward, in [0, 1]: of all groups up to the window, then exponentially weighted."""

    def after(self, reward: float, window: int) -> PassRate:
        """Return the rate with one more group, whose mean task reward is `reward`."""
        groups = self.groups + 1
        return PassRate(groups, self.rate + (reward - self.rate) / min(groups, max(1, window)))


@dataclass(slots=True)
class DifficultyPools:
    """The pass rates of a run's problems."""

    rates: dict[str, PassRate] = field(default_factory=dict)
    """By problem id."""

    def note(self, problem_id: str, reward: float, window: int) -> None:
        """Count a group with this mean task reward."""
        known = self.rates.get(problem_id, PassRate(0, 0.0))
        self.rates[problem_id] = known.after(reward, window)

    def pool_of(self, problem_id: str, recipe: FilterRecipe) -> Pool:
        """Return where a problem is; Active while too little is known, or without pools."""
        known = self.rates.get(problem_id)
        if not recipe.pool_window or known is None or known.groups < recipe.pool_min_groups:
            return Pool.ACTIVE
        if known.rate >= recipe.pool_easy:
            return Pool.EASY
        return Pool.HARD if known.rate <= recipe.pool_hard else Pool.ACTIVE

    def sizes(self, recipe: FilterRecipe) -> dict[Pool, int]:
        """Return how many of the problems seen are in each pool."""
        found = [self.pool_of(problem_id, recipe) for problem_id in self.rates]
        return {pool: found.count(pool) for pool in Pool}

    def copy(self) -> DifficultyPools:
        """Return pools that change independently."""
        return DifficultyPools(dict(self.rates))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {name: [known.groups, known.rate] for name, known in self.rates.items()}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned; raises ValueError or TypeError on anything else."""
        return cls({str(k): PassRate(int(n), float(rate)) for k, (n, rate) in value.items()})
