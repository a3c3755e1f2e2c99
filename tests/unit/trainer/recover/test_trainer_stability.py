"""Alarms on trajectories: those that learn raise none, the documented collapse and its end do."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from muster.trainer.recover.collapse import Alarm, AlarmLimits, CollapseWatch

LIMITS = AlarmLimits()
Figures = tuple[float, float, float]
"""Reward, gradient norm, entropy."""


def _learning(steps: int, seed: int, noise: float = 0.1) -> Iterator[Figures]:
    """Reward rises, entropy falls, and norms grow fourfold: fewer groups are left to learn from."""
    rng = random.Random(seed)
    for step in range(steps):
        share = step / steps
        values = (0.3 + 0.6 * share, 1.0 + 3 * share, 0.5 - 0.35 * share)
        yield tuple(v * rng.uniform(1 - noise, 1 + noise) for v in values)  # type: ignore[misc]


def _alarms(figures: Iterator[Figures], limits: AlarmLimits = LIMITS) -> list[Alarm]:
    watch = CollapseWatch(limits)
    return [watch.observe(reward=r, grad_norm=g, entropy=h) for r, g, h in figures]


def _collapsing(steps: int) -> Iterator[Figures]:
    """INTELLECT-2's report: norms climb, the entropy falls for 60 steps, then rises."""
    for step in range(steps):
        entropy = 0.5 - 0.004 * min(step, 60) + 0.006 * max(0, step - 60)
        yield 0.5, 0.1 * 1.012**step, entropy


def test_unknown_figures_change_no_level() -> None:
    watch, other = CollapseWatch(LIMITS), CollapseWatch(LIMITS)
    for reward, norm, entropy in _learning(60, 1):
        for each in (watch, other):
            each.observe(reward=reward, grad_norm=norm, entropy=entropy)
        # An empty step has neither figure; a step with a gradient may have no finite entropy.
        watch.observe(reward=reward, grad_norm=None, entropy=None)
    assert watch.state()["levels"][:2] == other.state()["levels"][:2]
    before = watch.state()["levels"][1]
    watch.observe(reward=0.5, grad_norm=1.0, entropy=None)
    assert watch.state()["levels"][1] == before
    watch.observe(reward=0.5, grad_norm=1.0, entropy=0.0)
    assert watch.state()["levels"][1] != before


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_learning_raises_no_alarm(seed: int) -> None:
    assert not any(alarm.is_on for alarm in _alarms(_learning(150, seed)))


def test_documented_collapse_raises_the_alarm_before_the_reward_falls() -> None:
    alarms = _alarms(_collapsing(100))
    first = next(i for i, alarm in enumerate(alarms) if alarm.is_on)
    assert 60 < first < 85
    assert alarms[first].reward_fall == 0
    assert [a.is_due for a in alarms[first : first + 3]] == [False, False, True]


@pytest.mark.parametrize("lacking", ["norms", "entropy"])
def test_half_of_the_sign_is_none(lacking: str) -> None:
    calm = [
        (reward, 0.1 if lacking == "norms" else norm, 0.3 if lacking == "entropy" else entropy)
        for reward, norm, entropy in _collapsing(100)
    ]
    assert not any(alarm.is_on for alarm in _alarms(iter(calm)))


def test_lost_reward_raises_the_alarm() -> None:
    alarms = _alarms(iter([(0.8, 1.0, 0.3)] * 12 + [(0.1, 1.0, 0.3)] * 12))
    first = next(i for i, alarm in enumerate(alarms) if alarm.is_on)
    assert first == 12 + LIMITS.window // 2  # when most of the window is bad
    assert alarms[first].reward_fall == pytest.approx(7 / 8)


def test_single_spike_raises_none() -> None:
    figures = [(0.5, 1.0, 0.3)] * 30
    figures[15] = (0.0, 500.0, 3.0)
    assert not any(alarm.is_on for alarm in _alarms(iter(figures)))


def test_alarm_ends_with_its_cause() -> None:
    figures = [(0.8, 1.0, 0.3)] * 10 + [(0.1, 1.0, 0.3)] * 8 + [(0.8, 1.0, 0.3)] * 8
    alarms = _alarms(iter(figures))
    assert any(alarm.is_due for alarm in alarms)
    assert (alarms[-1].is_on, alarms[-1].steps) == (False, 0)


def test_steps_without_a_gradient_tell_of_the_reward_only() -> None:
    figures = [(0.8, 1.0, 0.3)] * 10 + [(0.0, 0.0, 0.0)] * 8
    last = _alarms(iter(figures))[-1]
    assert (last.grad_growth, last.entropy_rise, last.reward_fall) == (1.0, 0.0, 1.0)
    assert last.is_due


def test_no_window_means_no_alarms() -> None:
    figures = iter([(1.0, 1.0, 1.0)] * 10 + [(0.0, 9.0, 9.0)] * 10)
    assert not any(alarm.is_on for alarm in _alarms(figures, replace(LIMITS, window=0)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.integers(0, 100))
def test_watch_goes_on_from_its_saved_state(at: int, seed: int) -> None:
    figures = [*_learning(60, seed, noise=0.6), *_collapsing(40)]
    expected = _alarms(iter(figures))
    watch, found = CollapseWatch(LIMITS), []
    for i, (reward, norm, entropy) in enumerate(figures):
        if i == at:
            saved = json.loads(json.dumps(watch.state()))
            watch = CollapseWatch(LIMITS)
            watch.restore(saved)
        found.append(watch.observe(reward=reward, grad_norm=norm, entropy=entropy))
    assert found == expected
