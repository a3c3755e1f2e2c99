"""Alarms: the signs of a collapse in a run's figures, and the collapse itself.

What INTELLECT-2 documents (arXiv 2505.07291, section 4): gradient norms that grow without single
spikes, and an entropy that falls, then turns up; collapse follows. Either alone is harmless: while
a policy learns, fewer and harder groups are left and norms grow several times over. So the sign is
both at once. The collapse itself is a reward far below what the policy had reached.

Every figure is judged by its level, the median of the last `window` steps, so that one odd step
neither raises an alarm nor hides one. Pure but for what the watch remembers, which is plain numbers
and goes into the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class AlarmLimits:
    """When to raise an alarm, and when it has lasted long enough to act."""

    window: int = 8
    """Training steps that make a level; 0 for no alarms."""
    grad_growth: float = 1.5
    """Norms grow: their level is more than so many times its lowest."""
    entropy_rise: float = 0.15
    """The entropy has turned up: its level is above its lowest by more than this share of its
    first."""
    reward_fall: float = 0.5
    """The reward has collapsed: its level is below its highest by more than this share."""
    patience: int = 3
    """Alarming steps in a row after which something is done."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """What the figures up to a step say."""

    grad_growth: float = 1.0
    """Level of the gradient norm over its lowest."""
    entropy_rise: float = 0.0
    """Level of the entropy above its lowest, as a share of its first."""
    reward_fall: float = 0.0
    """Level of the reward below its highest, as a share of that."""
    is_on: bool = False
    """Norms grow and the entropy has turned up, or the reward has collapsed."""
    steps: int = 0
    """Steps in a row, this one included, at which it was on."""
    is_due: bool = False
    """Whether it has lasted long enough to act."""


class CollapseWatch:
    """Judges one training step after the other."""

    def __init__(self, limits: AlarmLimits) -> None:
        self._limits = limits
        self._norms, self._entropies, self._rewards = _Level(), _Level(), _Level()
        self._steps = 0
        self._seen = 0

    @property
    def is_settled(self) -> bool:
        """Whether it has seen two windows: before, a level has hardly been compared with any."""
        return self._seen >= 2 * self._limits.window

    def observe(self, *, reward: float, grad_norm: float | None, entropy: float | None) -> Alarm:
        """Return what is known after a step.

        A figure that is None is unknown and changes no level: a step that had nothing to train on
        tells of its reward only. So does one without a finite gradient (norm 0).
        """
        limits = self._limits
        if not limits.window:
            return Alarm()
        self._seen += 1
        self._rewards.add(reward, limits.window)
        if grad_norm:
            self._norms.add(grad_norm, limits.window)
            if entropy is not None:
                self._entropies.add(entropy, limits.window)
        found = self._judged()
        self._steps = self._steps + 1 if found.is_on else 0
        return replace(found, steps=self._steps, is_due=self._steps >= limits.patience)

    def forget(self) -> None:
        """Start anew: the policy is another one."""
        self._norms, self._entropies, self._rewards = _Level(), _Level(), _Level()
        self._steps = self._seen = 0

    def state(self) -> dict[str, Any]:
        """Return what it remembers, as plain values."""
        levels = (self._norms, self._entropies, self._rewards)
        return {
            "steps": self._steps,
            "seen": self._seen,
            "levels": [level.state() for level in levels],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._norms, self._entropies, self._rewards = map(_Level.of, state["levels"])
        self._steps, self._seen = int(state["steps"]), int(state["seen"])

    def _judged(self) -> Alarm:
        limits, norm, entropy, reward = self._limits, self._norms, self._entropies, self._rewards
        growth = norm.now / max(norm.lowest, 1e-12)
        rise = (entropy.now - entropy.lowest) / max(entropy.first, 1e-12)
        fall = (reward.highest - reward.now) / max(reward.highest, 1e-12)
        is_sign = growth > limits.grad_growth and rise > limits.entropy_rise
        return Alarm(growth, rise, fall, is_sign or fall > limits.reward_fall)


@dataclass(slots=True)
class _Level:
    """The median of a figure's last values, and where it has been; all 0 before the first."""

    values: Sequence[float] = ()
    first: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    now: float = 0.0

    def add(self, value: float, window: int) -> None:
        is_first = len(self.values) < window
        self.values = (*self.values, value)[-window:]
        if len(self.values) < window:
            return
        self.now = median(self.values)
        self.first = self.now if is_first else self.first
        self.lowest = self.now if is_first else min(self.now, self.lowest)
        self.highest = self.now if is_first else max(self.now, self.highest)

    def state(self) -> list[Any]:
        return [list(self.values), self.first, self.lowest, self.highest, self.now]

    @classmethod
    def of(cls, state: list[Any]) -> _Level:
        values, *rest = state
        return cls(tuple(map(float, values)), *map(float, rest))
