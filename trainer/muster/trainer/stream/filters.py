"""Filters that decide which rollouts are trained on; each omission is counted under a reason.

`Sieve` decides about a step's groups in stream order, from their content alone. It removes samples
before advantages are computed, so these are relative to the rest of the group. The learner later
leaves out samples whose log-probabilities do not fit (`muster.trainer.learn.advantages`).

Difficulty pools: nobody chooses problems (a ticket derives them), so a pool only decides what is
trained on. Groups of a set-aside problem are left out but still update its pass rate, so that it
returns when the policy changes. The pools are saved with the weights, and are a pure function of
the training stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any, Self

from muster.protocol.mixture import PartFilters
from muster.protocol.recipe import PartRules, Recipe
from muster.protocol.rollouts import Rollout

Group = list[Rollout]
"""The rollouts of one problem."""


class Drop(StrEnum):
    """Reason for which an accepted sample is not trained on."""

    STALE = "stale"
    """Its policy is too many versions old."""
    UNREADABLE = "unreadable"
    """Its file does not match its outcome record."""
    MISSING = "missing"
    """Nobody had its file."""
    DUPLICATE = "duplicate"
    """Its file, or one of its sampling seeds, was seen before."""
    TRUNCATED = "truncated"
    """The sample reached the token limit without EOS."""
    ZERO_ADVANTAGE = "zero_advantage"
    """All samples of the group have the same task reward: there is nothing to prefer."""
    EASY = "easy"
    """Its problem is solved (nearly) always."""
    HARD = "hard"
    """Its problem is solved (nearly) never."""
    NON_FINITE = "non_finite"
    """The policy that sampled it gives it a log-probability that is not finite."""
    MISMATCH = "mismatch"
    """It does not look sampled from the policy that it names."""


def named(dropped: Counter[Drop]) -> dict[str, int]:
    """Return counts by the reasons' names, for logs and metrics."""
    return {str(reason): count for reason, count in sorted(dropped.items())}


class Pool(StrEnum):
    """State of a problem."""

    ACTIVE = "active"
    """It is trained on."""
    EASY = "easy"
    """It is solved (nearly) always."""
    HARD = "hard"
    """It is solved (nearly) never."""


@dataclass(frozen=True, slots=True)
class PassRate:
    """Pass rate of one problem, as far as it is known."""

    groups: int
    """Groups that were counted."""
    rate: float
    """Mean task reward, in [0, 1]: of all groups up to the window, then exponentially weighted."""
    part: str = ""
    """The problem's part of the task set; empty without parts."""

    def after(self, reward: float, window: int) -> PassRate:
        """Return the rate with one more group, whose mean task reward is `reward`."""
        groups = self.groups + 1
        rate = self.rate + (reward - self.rate) / min(groups, max(1, window))
        return PassRate(groups, rate, self.part)


@dataclass(slots=True)
class DifficultyPools:
    """The pass rates of a run's problems."""

    rates: dict[str, PassRate] = field(default_factory=dict)
    """By problem id."""

    def note(self, problem_id: str, reward: float, window: int, part: str = "") -> None:
        """Count a group with this mean task reward."""
        known = self.rates.get(problem_id, PassRate(0, 0.0, part))
        self.rates[problem_id] = known.after(reward, window)

    def pool_of(self, problem_id: str, filters: PartFilters) -> Pool:
        """Return the pool of a problem; ACTIVE while too little is known, or without pools."""
        known = self.rates.get(problem_id)
        if not filters.pool_window or known is None or known.groups < filters.pool_min_groups:
            return Pool.ACTIVE
        if known.rate >= filters.pool_easy:
            return Pool.EASY
        return Pool.HARD if known.rate <= filters.pool_hard else Pool.ACTIVE

    def sizes(self, rules: PartRules) -> dict[Pool, int]:
        """Return how many of a part's seen problems are in each pool."""
        of_part = (name for name, known in self.rates.items() if known.part == rules.name)
        found = [self.pool_of(problem_id, rules.filters) for problem_id in of_part]
        return {pool: found.count(pool) for pool in Pool}

    def copy(self) -> DifficultyPools:
        """Return pools that change independently."""
        return DifficultyPools(dict(self.rates))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        return {
            name: [known.groups, known.rate, *([known.part] if known.part else [])]
            for name, known in self.rates.items()
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned; raises ValueError or TypeError on anything else."""
        return cls(
            {
                str(k): PassRate(int(n), float(rate), *map(str, part))
                for k, (n, rate, *part) in value.items()
            }
        )


@dataclass(slots=True)
class PartTally:
    """Sums over the groups of one part that a training step consumed, duplicates left out."""

    groups: int = 0
    """Groups."""
    kept: int = 0
    """Groups that are trained on."""
    samples: int = 0
    """Samples in all groups."""
    reward: float = 0.0
    """Sum of their task rewards."""
    tokens: int = 0
    """Sum of the tokens that their policies sampled."""

    def count(self, group: Group, *, is_kept: bool) -> None:
        """Add a group."""
        self.groups += 1
        self.kept += is_kept
        self.samples += len(group)
        self.reward += sum(rollout.task_reward for rollout in group)
        self.tokens += sum(rollout.sampled for rollout in group)


class Sieve:
    """Keeps the groups of one training step that are trained on, in stream order."""

    def __init__(self, recipe: Recipe, pools: DifficultyPools, eos: frozenset[int]) -> None:
        """`pools` are those before the step; they are not changed."""
        self._recipe = recipe
        self._eos = eos
        self._seeds: set[int] = set()
        self._rewards: list[float] = []
        self.pools = pools.copy()
        """The pools after the groups taken so far."""
        self.kept: list[Group] = []
        """The groups to train on."""
        self.dropped: Counter[Drop] = Counter()
        """Samples left out, by reason."""
        self.parts = {part.name: PartTally() for part in recipe.tasks.parts}
        """Tally of each part, by name."""

    @property
    def reward(self) -> float:
        """Mean task reward of all samples except duplicates; 0 when there are none."""
        return fmean(self._rewards) if self._rewards else 0.0

    def take(self, group: Group, part: PartRules | None = None) -> None:
        """Keep those samples of a group that may be trained on, and count the others by reason. In
        a mixture, `part` is the part of its problem.
        """
        if self._is_repeated(group):
            self.dropped[Drop.DUPLICATE] += len(group)
            return
        rules = part or self._recipe.rules_of()
        rewards = [rollout.task_reward for rollout in group]
        self._rewards += rewards
        window = rules.filters.pool_window
        if window:
            self.pools.note(group[0].problem_id, fmean(rewards), window, rules.name)
        rest = [each for each in group if not self._is_truncated(each, rules.filters)]
        reason = self._reason_against(rest, rules.filters)
        if reason is None:
            self.kept.append(rest)
        self.dropped += Counter({Drop.TRUNCATED: len(group) - len(rest)})
        self.dropped += Counter({reason: len(rest)} if reason else {})
        if rules.name:
            self.parts[rules.name].count(group, is_kept=reason is None)

    def _reason_against(self, group: Group, filters: PartFilters) -> Drop | None:
        if not has_preference(group):
            return Drop.ZERO_ADVANTAGE
        pool = self.pools.pool_of(group[0].problem_id, filters)
        return {Pool.ACTIVE: None, Pool.EASY: Drop.EASY, Pool.HARD: Drop.HARD}[pool]

    def _is_repeated(self, group: Group) -> bool:
        """Tell whether a seed was seen before. Seeds are derived from tickets, so a repetition is a
        copy, not chance."""
        seeds = {rollout.sampling_seed for rollout in group}
        if len(seeds) < len(group) or seeds & self._seeds:
            return True
        self._seeds |= seeds
        return False

    def _is_truncated(self, rollout: Rollout, filters: PartFilters) -> bool:
        tokens = rollout.completion_tokens
        is_full = len(tokens) == self._recipe.sampling.max_new_tokens
        return filters.drop_truncated and is_full and tokens[-1] not in self._eos


def has_preference(group: Sequence[Rollout]) -> bool:
    """Tell whether the group's task rewards differ.

    Only the task reward counts: a length reward differs even when all are right or all wrong.
    """
    return len({rollout.task_reward for rollout in group}) > 1
