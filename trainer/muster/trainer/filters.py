"""Which rollouts are trained on; everything left out is counted under a reason.

`Sieve` decides about a step's groups in stream order, from what they say alone; a sample that it
leaves out is as if it were not there, so advantages are relative to the rest of the group. The
learner leaves out samples whose log-probabilities do not fit (`without_mismatch`), with advantages
as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from muster.protocol.recipe import Recipe, TrainingRecipe
from muster.protocol.rollouts import Rollout
from muster.trainer.advantages import rollout_advantages
from muster.trainer.difficulty import DifficultyPools, Pool
from muster.trainer.packing import Sample

Group = list[Rollout]
"""The rollouts of one problem."""


class Drop(StrEnum):
    """Why something that was accepted is not trained on."""

    STALE = "stale"
    """Its policy is too many versions old."""
    UNREADABLE = "unreadable"
    """Its file is not what its outcome record says."""
    DUPLICATE = "duplicate"
    """Its file, or one of its sampling seeds, was there before."""
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


class Sieve:
    """What of one training step's submissions is trained on, decided in stream order."""

    def __init__(self, recipe: Recipe, pools: DifficultyPools, eos: frozenset[int]) -> None:
        """`pools` are those before the step; they stay as they are."""
        self._recipe = recipe
        self._eos = eos
        self._seeds: set[int] = set()
        self._rewards: list[float] = []
        self.pools = pools.copy()
        """The pools after what was taken so far."""
        self.kept: list[Group] = []
        """The groups to train on."""
        self.dropped: Counter[Drop] = Counter()
        """Samples left out, by reason."""

    @property
    def reward(self) -> float:
        """Mean task reward of all samples but duplicates; 0 when there are none."""
        return fmean(self._rewards) if self._rewards else 0.0

    def take(self, group: Group) -> None:
        """Keep a group, or what of it may be trained on, or count why not."""
        if self._is_repeated(group):
            self.dropped[Drop.DUPLICATE] += len(group)
            return
        rewards = [rollout.task_reward for rollout in group]
        self._rewards += rewards
        filters = self._recipe.filters
        if filters.pool_window:
            self.pools.note(group[0].problem_id, fmean(rewards), filters.pool_window)
        rest = [rollout for rollout in group if not self._is_truncated(rollout)]
        reason = self._reason_against(rest)
        if reason is None:
            self.kept.append(rest)
        self.dropped += Counter({Drop.TRUNCATED: len(group) - len(rest)})
        self.dropped += Counter({reason: len(rest)} if reason else {})

    def _reason_against(self, group: Group) -> Drop | None:
        if not has_preference(group):
            return Drop.ZERO_ADVANTAGE
        pool = self.pools.pool_of(group[0].problem_id, self._recipe.filters)
        return {Pool.ACTIVE: None, Pool.EASY: Drop.EASY, Pool.HARD: Drop.HARD}[pool]

    def _is_repeated(self, group: Group) -> bool:
        """Tell whether a seed came before: seeds are derived, so it is a copy, not a chance."""
        seeds = {rollout.sampling_seed for rollout in group}
        if len(seeds) < len(group) or seeds & self._seeds:
            return True
        self._seeds |= seeds
        return False

    def _is_truncated(self, rollout: Rollout) -> bool:
        tokens = rollout.completion_tokens
        is_full = len(tokens) == self._recipe.sampling.max_new_tokens
        return self._recipe.filters.drop_truncated and is_full and tokens[-1] not in self._eos


def has_preference(group: Sequence[Rollout]) -> bool:
    """Tell whether the group's task rewards differ.

    The test is on the task reward: a length reward differs even where all are right or wrong.
    """
    return len({rollout.task_reward for rollout in group}) > 1


@dataclass(frozen=True, slots=True)
class Kept:
    """The samples of a training step."""

    samples: list[list[Sample]]
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
    """Return what is left without samples that do not look sampled from the policy they name.

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


def _samples(group: Sequence[Rollout], training: TrainingRecipe) -> list[Sample]:
    return [
        Sample(r.prompt_tokens, r.completion_tokens, advantage, r.policy_version, r.replies)
        for r, advantage in zip(group, rollout_advantages(group, training), strict=True)
    ]
