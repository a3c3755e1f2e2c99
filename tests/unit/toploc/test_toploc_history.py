"""The sequential test over a worker's history: its arithmetic, its error rates, its power."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from muster.toploc.history import BETS, History, HistoryLimits, first_alarm

LIMITS = HistoryLimits(honest_strain=0.1, false_alarm=1e-4)
strains = st.lists(st.floats(0, 1), max_size=30)


def after(values: list[float], limits: HistoryLimits = LIMITS) -> History:
    history = History()
    for value in values:
        history = history.after(value, limits)
    return history


def evidence_by_definition(values: list[float], limits: HistoryLimits) -> float:
    """The weighted sum over starting points, written out."""
    count = len(values)
    total = 1 / (count + 1)
    for start in range(1, count + 1):
        products = [
            math.prod(1 + bet * (x / limits.honest_strain - 1) for x in values[start - 1 :])
            for bet in BETS
        ]
        total += sum(products) / len(products) / (start * (start + 1))
    return total


@given(strains)
def test_evidence_is_the_weighted_sum_over_all_starting_points(values: list[float]) -> None:
    expected = evidence_by_definition(values, LIMITS)
    assert math.exp(after(values).log_evidence) == pytest.approx(expected, rel=1e-9)


def test_nothing_is_evidence_before_the_first_submission() -> None:
    assert History().log_evidence == pytest.approx(0, abs=1e-12)
    assert not History().alarms(LIMITS)


@given(strains, st.floats(0, 1), st.floats(0, 1))
def test_more_strain_is_never_less_evidence(values: list[float], a: float, b: float) -> None:
    history, low, high = after(values), min(a, b), max(a, b)
    assert (
        history.after(low, LIMITS).log_evidence <= history.after(high, LIMITS).log_evidence + 1e-12
    )


@given(strains)
def test_evidence_does_not_grow_on_average_under_honesty(values: list[float]) -> None:
    """The martingale: a submission whose mean strain is the bound changes nothing, on average."""
    history, mean = after(values), LIMITS.honest_strain
    worst, best = history.after(1.0, LIMITS), history.after(0.0, LIMITS)
    expected = mean * math.exp(worst.log_evidence) + (1 - mean) * math.exp(best.log_evidence)
    assert expected == pytest.approx(math.exp(history.log_evidence), rel=1e-9)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50))
def test_any_numbers_give_finite_evidence(values: list[float]) -> None:
    assert math.isfinite(after(values).log_evidence)


def test_nan_is_the_largest_strain() -> None:
    assert after([math.nan]) == after([1.0]) == after([7.0])
    assert after([-1.0]) == after([0.0])


def test_honest_history_loses_little_evidence_that_is_still_to_come() -> None:
    assert after([0.0] * 1000).log_evidence >= -math.log(1001)


def draw(mean: float, count: int, seed: int) -> list[float]:
    """Strains of a hundred samples each; their mean varies between submissions."""
    random = np.random.default_rng(seed)
    centres = random.beta(4 * mean, 4 * (1 - mean), count)
    return random.binomial(100, centres).astype(float).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_honest_workers_do_not_alarm_in_a_thousand_submissions(seed: int) -> None:
    values = [value / 100 for value in draw(LIMITS.honest_strain, 1000, seed)]
    assert first_alarm(values, LIMITS) is None


@pytest.mark.parametrize(("strain", "within"), [(0.95, 12), (0.5, 16), (0.3, 30), (0.2, 80)])
@pytest.mark.parametrize("honest_before", [0, 200])
def test_cheats_below_every_limit_alarm_soon(
    strain: float, within: int, honest_before: int
) -> None:
    honest = [0.05] * honest_before
    alarm = first_alarm([*honest, *[strain] * 500], LIMITS)
    assert alarm is not None
    assert alarm - honest_before <= within + 2 * math.log(1 + honest_before)


def test_cheat_at_the_honest_bound_never_alarms() -> None:
    assert first_alarm([LIMITS.honest_strain] * 5000, LIMITS) is None


@pytest.mark.parametrize("field", ["honest_strain", "false_alarm"])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, math.nan])
def test_limits_are_refused_outside_their_range(field: str, value: float) -> None:
    with pytest.raises(ValidationError):
        HistoryLimits(**{"honest_strain": 0.1, field: value})
