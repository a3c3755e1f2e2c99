"""Alarms: signs of a collapse in a run's figures, and the trainer's reaction to them.

INTELLECT-2 (arXiv 2505.07291, section 4) saw two signs before a collapse: gradient norms grow
without single spikes, and the entropy falls, then rises. Either alone is harmless: while a policy
learns, fewer and harder groups are left, and norms grow several times over. So both together raise
an alarm. The collapse itself is a reward far below what the policy had reached. Every figure is
judged by its level, the median of the last `window` steps, so that one odd step neither raises an
alarm nor hides one. In a mixture each part's reward is compared with that part's own level, so that
a curriculum that moves to harder parts raises no alarm.

When an alarm lasts, the trainer logs it, stops, or goes back to an earlier policy.

Two things are no matter of levels, and end a run that is told only to log. Weights or logits that
are not finite: their version is not published, and the trainer goes back at once or stops. Steps in
a row in which every update was skipped, because loss or gradient was not finite.

Versions are on chain and stay there. Going back makes a *new* version, with the weights and the
optimiser of an earlier one and a smaller learning rate; records that were consumed stay consumed.
The same figures always lead to the same decision, and its inputs are in the checkpoint, so a
restarted trainer decides the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from muster.protocol.errors import TrainingCollapsed
from muster.protocol.ids import PolicyVersion
from muster.trainer.learn.trained_model import LOGITS
from muster.trainer.publish.policies import BASE

logger = logging.getLogger(__name__)

Action = Literal["log", "stop", "rollback"]
"""The trainer's reaction to an alarm that has lasted."""


@dataclass(frozen=True, slots=True)
class AlarmLimits:
    """Limits beyond which an alarm is raised, and how long it must last before the trainer acts."""

    window: int = 8
    """Training steps of which a level is the median; 0 for no alarms."""
    grad_growth: float = 1.5
    """Norms grow when their level is more than this many times its lowest."""
    entropy_rise: float = 0.15
    """The entropy rises when its level is above its lowest by more than this share of its first."""
    reward_fall: float = 0.5
    """The reward has collapsed when its level is below its highest by more than this share."""
    patience: int = 3
    """Alarming steps in a row before the trainer acts."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Judgement of the figures up to a step."""

    grad_growth: float = 1.0
    """Level of the gradient norm divided by its lowest."""
    entropy_rise: float = 0.0
    """Rise of the entropy's level above its lowest, as a share of its first."""
    reward_fall: float = 0.0
    """Fall of the reward's level below its highest, as a share of that. In a mixture it is the mean
    of the parts' falls, weighted by their groups in the step."""
    is_on: bool = False
    """Whether norms grow and the entropy rises, or the reward has collapsed."""
    steps: int = 0
    """Alarming steps in a row, this one included."""
    skipped: int = 0
    """Steps in a row without a finite update, this one included; each of them is alarming."""
    is_due: bool = False
    """Whether it has lasted long enough to act."""


class CollapseWatch:
    """Judges one training step after the other."""

    def __init__(self, limits: AlarmLimits) -> None:
        self._limits = limits
        self._norms, self._entropies = _Level(), _Level()
        self._rewards: dict[str, _Level] = {}
        self._steps = self._seen = self._skipped = 0

    @property
    def is_settled(self) -> bool:
        """Whether it has seen two windows of steps; before that, a level has little to be compared
        with."""
        return self._seen >= 2 * self._limits.window

    def observe(
        self,
        *,
        reward: float,
        grad_norm: float | None,
        entropy: float | None,
        parts: Mapping[str, tuple[float, int]] | None = None,
        is_skipped: bool = False,
    ) -> Alarm:
        """Return the judgement after a step. In a mixture, `parts` maps each part in the step to
        its reward and number of groups. `is_skipped` says that no update of the step was finite.

        A figure that is None is unknown and changes no level. A step without trained tokens, or
        without a finite gradient (norm 0), counts with its reward only.
        """
        limits = self._limits
        self._skipped = self._skipped + 1 if is_skipped else 0
        if not limits.window:
            return self._counted(Alarm())
        self._seen += 1
        rewards = parts or {"": (reward, 1)}
        for name, (value, _) in rewards.items():
            self._rewards.setdefault(name, _Level()).add(value, limits.window)
        if grad_norm:
            self._norms.add(grad_norm, limits.window)
            if entropy is not None:
                self._entropies.add(entropy, limits.window)
        return self._counted(self._judged({name: groups for name, (_, groups) in rewards.items()}))

    def forget(self) -> None:
        """Forget all levels, because the policy was replaced."""
        self._norms, self._entropies, self._rewards = _Level(), _Level(), {}
        self._steps = self._seen = self._skipped = 0

    def state(self) -> dict[str, Any]:
        """Return the levels and counters as plain values."""
        return {
            "steps": self._steps,
            "seen": self._seen,
            "skipped": self._skipped,
            "levels": [level.state() for level in (self._norms, self._entropies)],
            "rewards": {name: level.state() for name, level in self._rewards.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state`."""
        self._norms, self._entropies = map(_Level.of, state["levels"])
        self._rewards = {name: _Level.of(level) for name, level in state["rewards"].items()}
        self._steps, self._seen = int(state["steps"]), int(state["seen"])
        self._skipped = int(state.get("skipped", 0))

    def _counted(self, found: Alarm) -> Alarm:
        is_on = found.is_on or self._skipped > 0
        self._steps = self._steps + 1 if is_on else 0
        is_due = self._steps >= self._limits.patience
        return replace(found, is_on=is_on, steps=self._steps, skipped=self._skipped, is_due=is_due)

    def _judged(self, groups: Mapping[str, int]) -> Alarm:
        limits, norm, entropy = self._limits, self._norms, self._entropies
        growth = norm.now / max(norm.lowest, 1e-12)
        rise = (entropy.now - entropy.lowest) / max(entropy.first, 1e-12)
        # A part that never had a reward cannot fall.
        known = {name: count for name, count in groups.items() if self._rewards[name].highest > 0}
        falls = (count * self._rewards[name].fall for name, count in known.items())
        fall = sum(falls) / max(sum(known.values()), 1)
        is_sign = growth > limits.grad_growth and rise > limits.entropy_rise
        return Alarm(growth, rise, fall, is_sign or fall > limits.reward_fall)


@dataclass(slots=True)
class _Level:
    """The median of a figure's last values, with its first, lowest and highest level; all 0 at
    first."""

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

    @property
    def fall(self) -> float:
        """Fall below the highest level, as a share of that."""
        return (self.highest - self.now) / self.highest

    def state(self) -> list[Any]:
        return [list(self.values), self.first, self.lowest, self.highest, self.now]

    @classmethod
    def of(cls, state: list[Any]) -> _Level:
        values, *rest = state
        return cls(tuple(map(float, values)), *map(float, rest))


@dataclass(frozen=True, slots=True)
class StepDecision:
    """Decision after a step."""

    alarm: Alarm
    """Judgement of the step's figures."""
    back_to: PolicyVersion | None = None
    """The version whose weights the step's version gets instead of its own."""

    def entry(self) -> dict[str, Any]:
        """Return the decision as figures for the step's log line."""
        alarm = self.alarm
        found: dict[str, Any] = {
            "grad_growth": round(alarm.grad_growth, 4),
            "entropy_rise": round(alarm.entropy_rise, 4),
            "reward_fall": round(alarm.reward_fall, 4),
            "alarm_steps": alarm.steps,
        }
        if self.back_to is not None:
            found["rolled_back_to"] = int(self.back_to)
        return found


class Guard:
    """Watches a run and decides; remembers the versions to which a rollback is possible."""

    def __init__(
        self,
        limits: AlarmLimits | None = None,
        *,
        action: Action = "log",
        slowdown: float = 0.5,
        most: int = 3,
    ) -> None:
        """`slowdown` multiplies the learning rate at each of at most `most` rollbacks; with 0 no
        hint names one.
        """
        self._limits = limits or AlarmLimits()
        self._watch = CollapseWatch(self._limits)
        self._action = action
        self._slowdown = slowdown
        self._most = most
        self._rollbacks = 0
        self.scale = 1.0
        """Factor on the learning rate."""
        self.good: tuple[PolicyVersion, ...] = ()
        """At most two versions for a rollback, the oldest first; their checkpoints must stay. At
        first the base model, later versions without alarm."""

    def judge(
        self, version: PolicyVersion, entry: Mapping[str, Any], *, fault: str | None = None
    ) -> StepDecision:
        """Return the decision after the step that makes `version`, from its figures. `fault` names
        what of its weights is not finite, as `TrainedModel.fault` does.

        Raises TrainingCollapsed when the run is to be stopped.
        """
        alarm = self._watch.observe(
            reward=entry["reward"],
            grad_norm=entry["grad_norm"],
            entropy=entry["entropy"],
            parts={
                name: (part["reward"], part["groups"])
                for name, part in entry.get("part", {}).items()
                if part["groups"]
            },
            is_skipped=bool(entry.get("skipped")) and not entry["grad_norm"],
        )
        if fault is not None:
            return StepDecision(alarm, self._leave(version, fault))
        if alarm.is_on:
            logger.warning(
                "training alarm", extra={"step": int(version), **StepDecision(alarm).entry()}
            )
        self._note_good(version, alarm)
        stands_still = alarm.skipped >= self._limits.patience
        if not alarm.is_due or (self._action == "log" and not stands_still):
            return StepDecision(alarm)
        if not self._can_go_back:
            raise self._stuck(version, alarm) if stands_still else self._collapsed(version, alarm)
        # There is no such version when rollbacks were enabled only at this start.
        return StepDecision(alarm, self._roll_back(version) if self.good else None)

    def state(self) -> dict[str, Any]:
        """Return the inputs of later decisions, as plain values."""
        return {
            "watch": self._watch.state(),
            "rollbacks": self._rollbacks,
            "scale": self.scale,
            "good": [int(version) for version in self.good],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`; an empty mapping starts a new run."""
        if state:
            self._watch.restore(state["watch"])
            self._rollbacks = int(state["rollbacks"])
            self.scale = float(state["scale"])
            self.good = tuple(PolicyVersion(version) for version in state["good"])

    @property
    def _can_go_back(self) -> bool:
        return self._action == "rollback" and self._rollbacks < self._most

    def _note_good(self, version: PolicyVersion, alarm: Alarm) -> None:
        if alarm.skipped == 1 and not self.good:
            # The weights before the last change: a rollback may be switched on later.
            self.good = (PolicyVersion(max(BASE, version - 2)),)
        if not alarm.skipped and self._action != "rollback":
            self.good = ()
        if self._action != "rollback" or not self._limits.window:
            return
        if version == 1:
            self.good = (BASE,)
        if version % self._limits.window == 0 and self._watch.is_settled and not alarm.is_on:
            # A level covers one window, so the older of the two versions precedes any sign.
            self.good = (*self.good, version)[-2:]

    def _leave(self, version: PolicyVersion, fault: str) -> PolicyVersion:
        """Return the version to go back to from one that is not finite."""
        before = PolicyVersion(version - 1)
        if not self._can_go_back:
            raise TrainingCollapsed(
                f"version {version} is not published: the {_part(fault)} that step {version} made "
                f"are not finite{_named(fault)}",
                hint=self._way_back(before),
            )
        # The version before is finite: it was looked at when it was made.
        self.good = self.good or (before,)
        return self._roll_back(version)

    def _way_back(self, before: PolicyVersion) -> str:
        """Return what a person can do; `before` is the last version that is known to be sound."""
        target = self.good[0] if self.good else before
        if self._rollbacks >= self._most:
            tried = f"{self._rollbacks} rollbacks did not help: " if self._rollbacks else ""
            return f"{tried}start a new run from version {target}, with a smaller learning rate"
        return (
            f"the step was not taken, and the newest checkpoint is that of version {before}: start "
            f"again with --on-collapse rollback, and training goes on from version {target} with "
            "a smaller learning rate"
        )

    def _roll_back(self, version: PolicyVersion) -> PolicyVersion:
        target, *_ = self.good = self.good[:1]
        self._rollbacks += 1
        self.scale *= self._slowdown
        self._watch.forget()
        logger.warning(
            "rolling back to an earlier policy",
            extra={"step": int(version), "policy_version": int(target), "scale": self.scale},
        )
        return target

    def _stuck(self, version: PolicyVersion, alarm: Alarm) -> TrainingCollapsed:
        return TrainingCollapsed(
            f"training stands still at step {version}: loss or gradient was not finite in "
            f"{alarm.skipped} steps in a row, which changed no weight",
            hint=self._way_back(PolicyVersion(version - 1)),
        )

    def _collapsed(self, version: PolicyVersion, alarm: Alarm) -> TrainingCollapsed:
        return TrainingCollapsed(
            f"training has collapsed at step {version}: reward {alarm.reward_fall:.0%} below its "
            f"highest level, gradient norm {alarm.grad_growth:.1f} times its lowest, entropy "
            f"{alarm.entropy_rise:.0%} above; {self._rollbacks} rollbacks made",
            hint="the step was not taken; restart with --on-collapse rollback or log, or start a "
            "new run from the last good version with a smaller learning rate",
        )


def require_finite(version: PolicyVersion, fault: str | None) -> None:
    """Raise TrainingCollapsed when the model that a trainer starts with is not finite."""
    if fault is None:
        return
    raise TrainingCollapsed(
        f"version {version} is not published: the {_part(fault)} of version {version} are not "
        f"finite{_named(fault)}",
        hint="give another base model"
        if version == BASE
        else f"while version {version} is not on chain, move its folder in checkpoints/ away: the "
        f"step is taken again from version {version - 1}; else start a new run from an earlier one",
    )


def _part(fault: str) -> str:
    return LOGITS if fault == LOGITS else "weights"


def _named(fault: str) -> str:
    return "" if fault == LOGITS else f" ({fault})"
