"""The sequential test over a worker's submissions: its arithmetic, its error rates, its power."""

import json
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from muster.toploc.sequential_test import (
    BETS,
    SUBMISSIONS_A_YEAR,
    Conduct,
    Flip,
    HistoryLimits,
    WorkerHistory,
    history_of,
)

LIMITS = HistoryLimits(honest_strain=0.1, honest_loss=0.01, honest_lean=0.25)
EOS, ONE, TWO = 9, 1, 2
ENDS = Flip(EOS, ONE, 1, -1)
GOES_ON = Flip(ONE, EOS, -1, 1)
flips = st.sampled_from(
    [ENDS, GOES_ON, Flip(ONE, TWO, 0, 1), Flip(TWO, ONE, 0, -1), Flip(TWO, EOS, -1, -1)]
)
conducts = st.builds(
    Conduct,
    st.floats(0, 1),
    st.floats(0, 1),
    st.lists(st.lists(flips, max_size=3).map(tuple), max_size=3).map(tuple),
)


def lean(signs: list[int]) -> float:
    total = sum(map(abs, signs))
    return (sum(signs) / total - LIMITS.honest_lean) / (1 + LIMITS.honest_lean) if total else 0.0


def evidence_by_definition(given_conducts: list[Conduct]) -> float:
    """The evidence as a plain sum over beginnings, measures and bets."""
    wins: dict[int, int] = {}
    excesses: list[list[list[float]]] = []
    for conduct in given_conducts:
        measures = [[conduct.strain / 0.1 - 1], [conduct.loss / 0.01 - 1], [], [], [], [], []]
        for group in conduct.groups:
            ends, likelier = [f.to_end for f in group], [f.to_likelier for f in group]
            won = [wins.get(f.chosen, 0) - wins.get(f.expected, 0) for f in group]
            sides = [ends, [-s for s in ends], likelier, [-s for s in likelier], won]
            for measure, side in zip(measures[2:], sides, strict=True):
                measure.append(lean(side))
            for flip in group:
                wins[flip.chosen] = wins.get(flip.chosen, 0) + 1
                wins[flip.expected] = wins.get(flip.expected, 0) - 1
        excesses.append(measures)
    total = sum(
        math.prod(1 + bet * x for each in excesses[start:] for x in each[measure])
        for start in range(len(excesses))
        for measure in range(7)
        for bet in BETS
    )
    return total / (7 * len(BETS)) / SUBMISSIONS_A_YEAR


@given(st.lists(conducts, min_size=1, max_size=8))
def test_evidence_is_the_sum_over_all_beginnings(values: list[Conduct]) -> None:
    found = math.exp(history_of(values, LIMITS).log_evidence)
    assert found == pytest.approx(evidence_by_definition(values), rel=1e-9)


def test_nothing_is_evidence_before_the_first_submission() -> None:
    assert WorkerHistory().log_evidence == -math.inf
    assert not WorkerHistory().alarms(LIMITS)


@given(st.lists(conducts, max_size=5), st.floats(0, 1), st.floats(0, 1))
def test_more_strain_is_never_less_evidence(values: list[Conduct], a: float, b: float) -> None:
    history = history_of(values, LIMITS)
    low, high = (
        history.after(Conduct(x, 0.0), LIMITS).log_evidence for x in (min(a, b), max(a, b))
    )
    assert low <= high + 1e-12


@given(st.lists(conducts, min_size=1, max_size=5))
def test_evidence_grows_by_one_beginning_on_average_under_honesty(values: list[Conduct]) -> None:
    """The martingale R - n, for a submission whose every mean is at its bound."""
    history, expected = history_of(values, LIMITS), 0.0
    fair = (1 + LIMITS.honest_lean) / 2
    for strain, s in ((1.0, 0.1), (0.0, 0.9)):
        for loss, x in ((1.0, 0.01), (0.0, 0.99)):
            # Without flips; one side's bettor is tested alone below, as the other mirrors it.
            conduct = Conduct(strain, loss)
            expected += s * x * math.exp(history.after(conduct, LIMITS).log_evidence)
    now = math.exp(history.log_evidence)
    assert expected == pytest.approx(now + 1 / SUBMISSIONS_A_YEAR, rel=1e-9)
    toward, away = (
        WorkerHistory(1, history.log_sums).after(Conduct(0.1, 0.01, ((flip,),)), LIMITS).log_sums
        for flip in (ENDS, GOES_ON)
    )
    for column in range(2 * len(BETS), 3 * len(BETS)):
        mean = fair * math.exp(toward[column]) + (1 - fair) * math.exp(away[column])
        assert mean == pytest.approx(math.exp(history.log_sums[column]) + 1, rel=1e-9)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=50))
def test_any_numbers_give_finite_evidence(values: list[float]) -> None:
    found = history_of([Conduct(value, value) for value in values], LIMITS)
    assert math.isfinite(found.log_evidence)


def test_nan_is_the_largest_value() -> None:
    def after(value: float) -> WorkerHistory:
        return WorkerHistory().after(Conduct(value, value), LIMITS)

    assert after(math.nan) == after(1.0) == after(7.0)
    assert after(-1.0) == after(0.0)


def test_conduct_is_the_same_after_a_trip_through_json() -> None:
    conduct = Conduct(0.25, 1e-7, ((ENDS, GOES_ON), ()))
    assert Conduct.from_json(json.loads(json.dumps(conduct.to_json()))) == conduct


@pytest.mark.parametrize("damaged", [{}, {"strain": 0, "loss": 0, "groups": [[[1, 2]]]}])
def test_damaged_json_is_refused(damaged: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Conduct.from_json(damaged)


def draw(lean_to: float, count: int, seed: int, strain: float = 0.02) -> list[Conduct]:
    """Submissions of eight groups; a group's flips go one way, at random with this mean lean."""
    random = np.random.default_rng(seed)
    coins = random.random((count, 8)) < (1 + lean_to) / 2
    return [
        Conduct(strain, 0.002, tuple((ENDS if c else GOES_ON,) * 2 for c in coin)) for coin in coins
    ]


def first_alarm(given_conducts: Iterable[Conduct]) -> int | None:
    """The number of submissions after which a worker alarms; None if it does not."""
    history = WorkerHistory()
    for conduct in given_conducts:
        history = history.after(conduct, LIMITS)
        if history.alarms(LIMITS):
            return history.submissions
    return None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("side", [-1, 1])
def test_honest_workers_do_not_alarm_in_two_hundred_submissions(seed: int, side: int) -> None:
    assert first_alarm(draw(side * LIMITS.honest_lean, 200, seed)) is None


@pytest.mark.parametrize("side", [-1, 1])
@pytest.mark.parametrize(("lean_to", "within"), [(1.0, 12), (0.9, 20), (0.7, 50)])
@pytest.mark.parametrize("honest_before", [0, 40])
def test_who_leans_alarms_soon(side: int, lean_to: float, within: int, honest_before: int) -> None:
    made = [*draw(0.0, honest_before, 1), *draw(side * lean_to, 200, 2)]
    alarm = first_alarm(made)
    assert alarm is not None
    assert 0 < alarm - honest_before <= within


def test_preference_for_any_token_is_learnt() -> None:
    def submission(seed: int, *, prefers_seven: bool) -> Conduct:
        random = np.random.default_rng(seed)
        groups = []
        for other in random.integers(20, 40, 8).tolist():
            won, lost = (7, other) if prefers_seven or random.random() < 0.5 else (other, 7)
            groups.append((Flip(won, lost, 0, 1 if random.random() < 0.5 else -1),))
        return Conduct(0.02, 0.002, tuple(groups))

    assert first_alarm(submission(n, prefers_seven=True) for n in range(40)) is not None
    assert first_alarm(submission(n, prefers_seven=False) for n in range(40)) is None


@pytest.mark.parametrize(("strain", "within"), [(0.95, 16), (0.5, 22), (0.3, 35)])
def test_who_stays_close_to_every_limit_alarms_soon(strain: float, within: int) -> None:
    alarm = first_alarm(draw(0.0, 100, 3, strain))
    assert alarm is not None
    assert alarm <= within


def test_worker_at_the_honest_bounds_never_alarms() -> None:
    assert first_alarm([Conduct(0.1, 0.01)] * 2000) is None


@pytest.mark.parametrize("field", ["honest_strain", "honest_loss", "false_alarm", "honest_lean"])
@pytest.mark.parametrize("value", [1.0, -0.1, math.nan])
def test_limits_are_refused_outside_their_range(field: str, value: float) -> None:
    with pytest.raises(ValidationError):
        HistoryLimits(**{"honest_strain": 0.1, field: value})
