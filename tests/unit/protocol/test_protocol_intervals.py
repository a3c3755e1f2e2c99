"""Intervals against published values and the exact binomial law."""

import math

import pytest
from hypothesis import given, strategies as st

from muster.protocol.intervals import at_least, exactly, rate_bound, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 300, 0.0, 0.0126), (300, 300, 0.9874, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_intervals_are_the_published_ones(
    successes: int, trials: int, low: float, high: float
) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=2e-4)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_wilson_interval_holds_the_share_and_stays_in_range(a: int, b: int) -> None:
    successes, trials = min(a, b), max(a, b)
    low, high = wilson(successes, trials)
    assert 0 <= low <= high <= 1
    if trials:
        assert low <= successes / trials <= high


def test_nothing_tried_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert rate_bound(0) == 1.0


@pytest.mark.parametrize(("trials", "bound"), [(1, 0.95), (59, 0.0495), (30_000, 9.985e-5)])
def test_no_success_bounds_the_rate(trials: int, bound: float) -> None:
    assert rate_bound(trials) == pytest.approx(bound, rel=1e-3)
    assert (1 - rate_bound(trials)) ** trials == pytest.approx(0.05)


@given(st.integers(1, 60), st.floats(0, 1), st.integers(0, 61))
def test_binomial_tail_is_the_sum_of_its_terms(trials: int, rate: float, count: int) -> None:
    expected = math.fsum(
        math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k)
        for k in range(count, trials + 1)
    )
    assert at_least(trials, rate, count) == pytest.approx(expected, abs=1e-9)


@given(st.integers(0, 60), st.floats(0, 1))
def test_binomial_terms_are_all_of_the_law(trials: int, rate: float) -> None:
    terms = [exactly(trials, rate, count) for count in range(trials + 1)]
    assert math.fsum(terms) == pytest.approx(1)
    assert exactly(trials, rate, trials + 1) == exactly(trials, rate, -1) == 0


def test_tails_of_large_samples_are_quick_and_right() -> None:
    # Poisson with mean 1, and a mean far above.
    assert at_least(10**15, 1e-15, 3) == pytest.approx(1 - 2.5 / math.e)
    assert at_least(10**15, 0.5, 20) == 1


@pytest.mark.parametrize("trials", [10**6 - 1, 10**6, 368_934_881_474_191_032])
@pytest.mark.parametrize("count", [1, 32, 33, 500])
def test_rare_events_of_many_trials_have_the_terms_of_the_law(trials: int, count: int) -> None:
    rate = count / trials
    ways = math.log(math.comb(trials, count))
    expected = ways + count * math.log(rate) + (trials - count) * math.log1p(-rate)
    assert math.log(exactly(trials, rate, count)) == pytest.approx(expected, abs=1e-8)
