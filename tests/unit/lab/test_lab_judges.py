"""The profit of false verdicts."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from muster.lab.economics import judges
from muster.lab.economics.judges import Bench
from muster.protocol.economics import WorkerTerms

TOKEN = 10**18
TERMS = WorkerTerms(
    price_wei=TOKEN // 1000,
    fraud_ppm=100_000,
    exact_fraud_ppm=500_000,
    fraud_strikes=5,
    samples=128,
    units_per_sample=6,
    required_stake=1000 * TOKEN,
    stake_per_unit=TOKEN // 10_000,
)
BENCH = Bench(
    quorum=2,
    validator_stake=5000 * TOKEN,
    wrong_verdict_ppm=50_000,
    bond=10 * TOKEN,
    reporter_ppm=100_000,
    reporter_cap=50 * TOKEN,
    jury_size=3,
)


@pytest.mark.parametrize(
    ("share", "size", "risk"),
    [
        (0.05, 1, 0.05),
        (0.1, 3, 0.028),
        (0.2, 3, 0.104),
        (0.3, 5, 0.163),
        (0.2, 7, 0.033),
        (0.3, 9, 0.099),
    ],
)
def test_dishonest_juries_are_the_published_table(share: float, size: int, risk: float) -> None:
    assert judges.dishonest_majority(share, size) == pytest.approx(risk, abs=6e-4)


@given(st.floats(0, 0.49), st.integers(0, 20))
def test_a_larger_jury_is_safer_while_most_are_honest(share: float, half: int) -> None:
    small, large = (judges.dishonest_majority(share, 2 * n + 1) for n in (half, half + 1))
    assert large <= small + 1e-12


def test_nothing_makes_an_unwatched_validator_check() -> None:
    assert judges.lazy_profit(TERMS, BENCH) > 0
    mended = replace(BENCH, trap_rate=judges.lazy_trap_rate(TERMS, BENCH))
    assert judges.lazy_profit(TERMS, mended) == pytest.approx(0, abs=1e3)


def test_collusion_stops_to_pay_at_its_recheck_rate() -> None:
    stake = TERMS.required_stake
    rate = judges.collusion_recheck_rate(TERMS, BENCH, stake)
    assert 0 < rate < BENCH.recheck_rate
    assert judges.collusion_profit(TERMS, BENCH, stake) < 0
    at = replace(BENCH, recheck_rate=rate)
    assert judges.collusion_profit(TERMS, at, stake) == pytest.approx(0, abs=1e6)
    assert judges.collusion_profit(TERMS, replace(BENCH, recheck_rate=rate * 0.99), stake) > 0


def test_a_false_accusation_stops_to_pay_at_the_minimal_bond() -> None:
    stake = TERMS.required_stake
    found = judges.minimal_bond(TERMS, BENCH, stake)
    assert found is not None
    # 0.104 of a share of 50 tokens against 0.896 of the bond.
    assert found / TOKEN == pytest.approx(0.104 * 50 / 0.896)
    at, below = (
        judges.accuser_profit(TERMS, replace(BENCH, bond=b), stake) for b in (found, found - 10**9)
    )
    assert at <= 0 < below


def test_a_jury_in_the_accusers_hands_is_worth_any_bond() -> None:
    owned = replace(BENCH, colluding=1.0)
    assert judges.minimal_bond(TERMS, owned, TERMS.required_stake) is None
    assert judges.accuser_profit(TERMS, owned, TERMS.required_stake) > 0


@given(st.floats(0, 1))
def test_judges_never_gain_from_a_false_verdict(share: float) -> None:
    assert judges.extortion_profit(replace(BENCH, colluding=share)) <= 0
