"""What the trainer does about alarms: nothing but say so, stop, or go back to where all was well.

Versions are on chain and stay there. Going back makes a *new* version, with the weights and the
optimiser of an earlier one and a smaller learning rate; records that were consumed stay consumed.
The same figures always lead to the same decision, and what it depends on is in the checkpoint, so a
trainer that is killed decides as it would have.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from muster.protocol.errors import TrainingCollapsed
from muster.protocol.ids import PolicyVersion
from muster.trainer.policies import BASE
from muster.trainer.stability import Alarm, AlarmLimits, CollapseWatch

logger = logging.getLogger(__name__)

Action = Literal["log", "stop", "rollback"]
"""What is done when an alarm has lasted."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from a step."""

    alarm: Alarm
    """What its figures say."""
    back_to: PolicyVersion | None = None
    """The version whose weights the step's version gets instead of its own."""

    def entry(self) -> dict[str, Any]:
        """Return it as figures of the step's line."""
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
    """Watches a run and decides; keeps the versions that can be gone back to."""

    def __init__(
        self,
        limits: AlarmLimits | None = None,
        *,
        action: Action = "log",
        slowdown: float = 0.5,
        most: int = 3,
    ) -> None:
        """`slowdown` multiplies the learning rate at each of at most `most` rollbacks."""
        self._limits = limits or AlarmLimits()
        self._watch = CollapseWatch(self._limits)
        self._action = action
        self._slowdown = slowdown
        self._most = most
        self._rollbacks = 0
        self.scale = 1.0
        """Factor on the learning rate."""
        self.good: tuple[PolicyVersion, ...] = ()
        """Versions to go back to, whose checkpoints must stay, the oldest first: at most two. The
        base model at first; later versions without alarm."""

    def judge(self, version: PolicyVersion, entry: Mapping[str, Any]) -> Judgement:
        """Return what follows from the figures of the step that makes `version`.

        Raises TrainingCollapsed when the run is to be stopped.
        """
        alarm = self._watch.observe(
            reward=entry["reward"],
            grad_norm=entry["grad_norm"],
            entropy=entry["entropy"],
        )
        if alarm.is_on:
            logger.warning(
                "training alarm", extra={"step": int(version), **Judgement(alarm).entry()}
            )
        self._note_good(version, alarm)
        if not alarm.is_due or self._action == "log":
            return Judgement(alarm)
        if self._action == "stop" or self._rollbacks >= self._most:
            raise self._collapsed(version, alarm)
        # None yet when rollbacks were switched on only now.
        return Judgement(alarm, self._roll_back(version) if self.good else None)

    def state(self) -> dict[str, Any]:
        """Return what later decisions depend on, as plain values."""
        return {
            "watch": self._watch.state(),
            "rollbacks": self._rollbacks,
            "scale": self.scale,
            "good": [int(version) for version in self.good],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; an empty one is that of a run that begins."""
        if state:
            self._watch.restore(state["watch"])
            self._rollbacks = int(state["rollbacks"])
            self.scale = float(state["scale"])
            self.good = tuple(PolicyVersion(version) for version in state["good"])

    def _note_good(self, version: PolicyVersion, alarm: Alarm) -> None:
        if self._action != "rollback" or not self._limits.window:
            return
        if version == 1:
            self.good = (BASE,)
        if version % self._limits.window == 0 and self._watch.is_settled and not alarm.is_on:
            # A level reaches back one window: the older of two was well before any sign.
            self.good = (*self.good, version)[-2:]

    def _roll_back(self, version: PolicyVersion) -> PolicyVersion:
        target, *_ = self.good = self.good[:1]
        self._rollbacks += 1
        self.scale *= self._slowdown
        self._watch.forget()
        logger.warning(
            "going back to an earlier policy",
            extra={"step": int(version), "policy_version": int(target), "scale": self.scale},
        )
        return target

    def _collapsed(self, version: PolicyVersion, alarm: Alarm) -> TrainingCollapsed:
        return TrainingCollapsed(
            f"training has collapsed at step {version}: reward {alarm.reward_fall:.0%} below its "
            f"highest level, gradient norm {alarm.grad_growth:.1f} times its lowest, entropy "
            f"{alarm.entropy_rise:.0%} above; {self._rollbacks} rollbacks made",
            hint="the step was not taken; go on with --on-collapse rollback or log, or start a run "
            "with a smaller learning rate from the last good version",
        )
