"""The profit of cheating: against published tables, simulated careers, and its own boundary."""

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from muster.lab.economics import worth
from muster.protocol import economics
from muster.protocol.economics import Cheat, WorkerTerms

TOKEN = 10**18
FORGED = Cheat("forged", 1.0)


def terms(**change: int | float) -> WorkerTerms:
    usual = WorkerTerms(
        price_wei=TOKEN // 1000,
        fraud_ppm=100_000,
        exact_fraud_ppm=500_000,
        fraud_strikes=5,
        samples=128,
        units_per_sample=6,
        required_stake=100 * TOKEN,
        stake_per_unit=TOKEN // 10_000,
    )
    return replace(usual, **change)


ONE_UNIT = terms(samples=1, units_per_sample=1, fraud_strikes=1, fraud_ppm=10**6)
"""Files of one unit; one strike is a fraud, which costs all of the stake."""

SOME_TERMS = st.builds(
    terms,
    price_wei=st.integers(1, 10**18),
    fraud_ppm=st.integers(1, 10**6),
    fraud_strikes=st.integers(1, 6),
    samples=st.integers(1, 200),
    units_per_sample=st.integers(1, 100),
    audit_rate=st.floats(0.01, 1),
    audited_share=st.floats(0.05, 1),
)
SOME_CHEAT = st.builds(
    Cheat, st.just("some"), st.floats(0, 1), exact=st.booleans(), saving=st.floats(0, 1)
)


@pytest.mark.parametrize(
    ("rate", "power", "needed"),
    [
        (0.5, 1.0, 1.0),
        (0.25, 0.9, 3.4),
        (0.1, 1.0, 9.0),
        (0.1, 0.5, 19.0),
        (0.05, 0.9, 21.2),
        (0.025, 0.1, 399.0),
        (0.01, 0.1, 999.0),
    ],
)
def test_stake_of_a_single_unit_is_the_published_table(
    rate: float, power: float, needed: float
) -> None:
    assert worth.classical_stake(1.0, rate, power) == pytest.approx(needed, abs=0.05)
    run = replace(ONE_UNIT, price_wei=TOKEN, audit_rate=rate)
    found = worth.minimal_stake(run, Cheat("forged", power))
    assert found is not None
    assert found / TOKEN == pytest.approx(worth.classical_stake(1.0, rate, power), rel=1e-9)


def test_nothing_deters_what_is_never_noticed() -> None:
    assert worth.classical_stake(1.0, 0.5, 0.0) == float("inf")
    assert worth.minimal_stake(terms(), Cheat("invisible", 0.0)) is None
    assert worth.in_flight_cap(terms(), Cheat("invisible", 0.0), 10**21) == 0
    assert worth.break_even_saving(terms(), Cheat("invisible", 0.0), 10**21) == 0


def test_one_cheated_sample_that_is_noticed_costs_the_whole_file() -> None:
    odds = economics.odds_of(terms(), FORGED, 1)
    assert (odds.lost, odds.fraud) == (1.0, 0.0)
    # 6 units saved, 768 not paid, at a thousandth of a token each.
    assert economics.profit(terms(), FORGED, 0, odds) == pytest.approx(-0.762 * TOKEN)


def test_strikes_spare_a_submission_the_slash_and_exact_faults_do_not() -> None:
    assert economics.odds_of(terms(), FORGED, 4).fraud == 0.0
    assert economics.odds_of(terms(), FORGED, 5).fraud == 1.0
    assert economics.odds_of(terms(), Cheat("lie", 1.0, exact=True), 1).fraud == 1.0


def test_an_audited_share_weakens_statistical_checks_alone() -> None:
    run = terms(audited_share=0.25)
    assert economics.odds_of(run, FORGED, 1).lost == pytest.approx(0.25)
    assert economics.odds_of(run, Cheat("lie", 1.0, exact=True), 1).lost == pytest.approx(1.0)


def test_slashes_double_until_nothing_is_left() -> None:
    # 0.1, then 0.2 of 0.9, then 0.4 of 0.72, then 0.8 of 0.432, then all of 0.0864.
    shares = [0.1, 0.28, 0.568, 0.9136, 1.0, 1.0]
    found = [economics.expected_slash(terms(), FORGED, 1000, 1.0, n) for n in range(1, 7)]
    assert found == pytest.approx([1000 * share for share in shares])
    lie = Cheat("lie", 1.0, exact=True)
    assert economics.expected_slash(terms(), lie, 1000, 1.0, 3) == pytest.approx(875)


@settings(max_examples=40)
@given(SOME_TERMS, SOME_CHEAT)
def test_profit_changes_sign_exactly_at_the_minimal_stake(run: WorkerTerms, cheat: Cheat) -> None:
    found = worth.minimal_stake(run, cheat)
    assume(found is not None)
    assert found is not None
    assert economics.best_share(run, cheat, found)[1] <= 0
    assert found == 0 or economics.best_share(run, cheat, found - 1)[1] > 0


@settings(max_examples=20)
@given(SOME_TERMS, SOME_CHEAT, st.integers(0, 10**24))
def test_a_burst_changes_sign_at_the_cap(run: WorkerTerms, cheat: Cheat, stake: int) -> None:
    cap = worth.in_flight_cap(run, cheat, stake)
    assume(cap is not None)
    assert cap is not None
    assert cap == 0 or economics.burst(run, cheat, stake, cap) <= 0
    assert economics.burst(run, cheat, stake, cap + run.units) > 0


@given(SOME_TERMS, SOME_CHEAT, st.integers(0, 10**24), st.integers(1, 10**24))
def test_more_stake_never_helps_a_cheater(
    run: WorkerTerms, cheat: Cheat, stake: int, more: int
) -> None:
    low, high = (economics.best_share(run, cheat, s)[1] for s in (stake, stake + more))
    assert high <= low + 1e-9 * abs(low)


@settings(max_examples=40)
@given(SOME_TERMS, SOME_CHEAT, st.floats(0, 1), st.floats(0, 1))
def test_more_power_and_more_audits_never_raise_the_minimal_stake(
    run: WorkerTerms, cheat: Cheat, a: float, b: float
) -> None:
    weak, strong = sorted((a, b))
    stakes = [worth.minimal_stake(run, replace(cheat, power=d)) for d in (weak, strong)]
    assert _at_most(stakes[1], stakes[0])
    stakes = [worth.minimal_stake(replace(run, audit_rate=p), cheat) for p in (weak, strong)]
    assert _at_most(stakes[1], stakes[0])


@settings(max_examples=40)
@given(SOME_TERMS, SOME_CHEAT, st.integers(1, 10**6))
def test_a_higher_slash_never_raises_the_minimal_stake(
    run: WorkerTerms, cheat: Cheat, ppm: int
) -> None:
    high = max(ppm, run.fraud_ppm)
    low = replace(run, exact_fraud_ppm=run.fraud_ppm)
    raised = replace(run, fraud_ppm=high, exact_fraud_ppm=high)
    assert _at_most(worth.minimal_stake(raised, cheat), worth.minimal_stake(low, cheat))


def _at_most(a: int | None, b: int | None) -> bool:
    """Whether stake `a` is at most `b`, up to rounding; None means that no stake is enough."""
    return b is None or (a is not None and a <= b * (1 + 1e-9) + 1)


@given(SOME_TERMS, st.floats(0.01, 1), st.integers(0, 10**22))
def test_a_cheat_pays_from_its_break_even_saving_on(
    run: WorkerTerms, power: float, stake: int
) -> None:
    saving = worth.break_even_saving(run, Cheat("some", power), stake)
    assume(1e-6 < saving < 0.99)
    below, above = (
        economics.best_share(run, Cheat("some", power, saving=saving * f), stake)[1]
        for f in (1 - 1e-6, 1 + 1e-6)
    )
    assert below <= 0 <= above


@pytest.mark.parametrize(
    ("cheat", "cheated", "change"),
    [
        (Cheat("weak", 0.1), 128, {"audit_rate": 0.3}),
        (Cheat("few", 0.6), 7, {"audited_share": 0.5}),
        (Cheat("exact", 0.8, exact=True), 2, {"audit_rate": 0.2}),
        (Cheat("strong", 0.9), 64, {"audit_rate": 0.1, "fraud_strikes": 3}),
    ],
)
def test_profit_agrees_with_simulated_careers(
    cheat: Cheat, cheated: int, change: dict[str, float]
) -> None:
    run, stake, burst, dice = terms(**change), 100 * TOKEN, 3, random.Random(7)
    odds = economics.odds_of(run, cheat, cheated)
    trials = [_career(run, cheat, cheated, stake, burst, dice) for _ in range(4000)]
    mean = sum(trials) / len(trials)
    spread = (sum((t - mean) ** 2 for t in trials) / len(trials)) ** 0.5 / len(trials) ** 0.5
    assert abs(mean - economics.profit(run, cheat, stake, odds, burst)) < 4 * spread


def _career(
    run: WorkerTerms, cheat: Cheat, cheated: int, stake: int, submissions: int, dice: random.Random
) -> float:
    """Play submissions one sample at a time, as the contracts would settle them."""
    gained, left, ppm = 0.0, float(stake), run.fraud_ppm
    for _ in range(submissions):
        gained += cheated * run.units_per_sample * cheat.saving * run.price_wei
        if dice.random() >= run.audit_rate:
            continue
        share = 1.0 if cheat.exact else run.audited_share
        strikes = sum(dice.random() < share and dice.random() < cheat.power for _ in range(cheated))
        if strikes:
            gained -= run.units * run.price_wei
        if strikes >= (1 if cheat.exact else run.fraud_strikes):
            slashed = left * (run.exact_fraud_ppm if cheat.exact else min(ppm, 10**6)) / 10**6
            gained, left, ppm = gained - slashed, left - slashed, ppm * 2
    return gained


def test_sybils_gain_nothing_that_one_identity_does_not() -> None:
    run, forged = terms(audit_rate=0.2), Cheat("forged", 0.99)
    stake = 10 * run.required_stake
    count, together = worth.sybils(run, forged, stake)
    assert count == 10
    alone = economics.burst(run, forged, stake, stake // run.stake_per_unit)
    # Their caps add up to one identity's, and so do their stakes.
    assert together == pytest.approx(alone, rel=1e-6)


def test_unsafe_terms_come_with_what_alone_would_mend_them() -> None:
    forged = [Cheat("forged", 0.99)]
    run = terms(audit_rate=0.01, fraud_strikes=1, stake_per_unit=TOKEN // 10)
    assert economics.pays(run, forged)
    found = economics.remedies(run, forged)
    for name, value, worse in [
        ("fraud_ppm", found.fraud_ppm, -1),
        ("required_stake", found.required_stake, -(10**9)),
        ("price_wei", found.price_wei, 1),
    ]:
        assert value is not None, name
        assert not economics.pays(replace(run, **{name: value}), forged), name
        assert economics.pays(replace(run, **{name: value + worse}), forged), name
    assert found.audit_rate_ppm is not None
    mended = replace(run, audit_rate=found.audit_rate_ppm / 10**6)
    assert not economics.pays(mended, forged)
    assert economics.pays(replace(mended, audit_rate=mended.audit_rate - 1e-6), forged)


def test_strikes_that_make_no_fraud_pay_where_little_is_checked() -> None:
    # Four cheated samples of 128 are never slashed, and one file in a hundred is checked.
    run = terms(audit_rate=0.01, fraud_ppm=10**6, exact_fraud_ppm=10**6)
    odds, gained = economics.best_share(run, FORGED, 10**24)
    assert (odds.cheated, odds.fraud) == (4, 0.0)
    assert gained == pytest.approx((24 - 7.68) / 1000 * TOKEN)
    assert worth.minimal_stake(run, FORGED) is None


def test_a_remedy_that_is_not_enough_alone_is_none() -> None:
    found = economics.remedies(terms(), [Cheat("invisible", 0.0)])
    assert (found.fraud_ppm, found.required_stake, found.audit_rate_ppm) == (None, None, None)
    assert found.price_wei is None


def test_honest_work_that_fails_by_chance_makes_cheating_cheaper() -> None:
    lucky, unlucky = terms(audit_rate=0.1), terms(audit_rate=0.1, false_positive=1e-3)
    lie = Cheat("lie", 1.0, exact=True)
    needed = [worth.minimal_stake(run, lie) for run in (lucky, unlucky)]
    assert needed[0] is not None
    assert needed[1] is not None
    assert needed[0] < needed[1]


@given(SOME_TERMS, st.floats(0, 0.01))
def test_a_cheat_that_fails_like_honest_work_loses_nothing(run: WorkerTerms, rate: float) -> None:
    unlucky = replace(run, false_positive=rate)
    for odds in economics.every_odds(unlucky, Cheat("as good", rate)):
        assert odds.lost == pytest.approx(0, abs=1e-12)
        assert odds.fraud == pytest.approx(0, abs=1e-12)


def test_an_assessment_agrees_with_its_parts() -> None:
    run, cheat = terms(audit_rate=0.1), Cheat("forged", 0.9)
    found = worth.assess(run, cheat, run.least_stake)
    assert found.pays == (max(found.profit_wei, found.burst_wei, found.sybils_wei) > 0)
    assert found.minimal_stake == worth.minimal_stake(run, cheat)
    assert (found.profit_wei <= 0) == (
        found.minimal_stake is not None and run.least_stake >= found.minimal_stake
    )
