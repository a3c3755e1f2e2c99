"""The simulation of watched validators: the ones it catches, and the guide's tables."""

from itertools import product
from math import prod
from pathlib import Path

import pytest

from muster.lab.watching import KINDS, Kind, Watched, break_even, committee_table, wrong_majority

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "watching.md"
LAZY, COPIER, COIN, TENTH, LEAGUE = KINDS


@pytest.mark.parametrize("kind", [LAZY, COPIER, COIN, TENTH])
@pytest.mark.parametrize("share", [0.1, 0.4])
def test_who_does_not_recompute_is_proven_within_a_few_batches(kind: Kind, share: float) -> None:
    falls = [Watched(kind, share, 0.2, seed).run(longest=150) for seed in range(5)]
    assert all(fall.proven_at is not None for fall in falls)


def test_lone_lazy_validator_is_never_slashed_for_it_is_outvoted() -> None:
    falls = [Watched(LAZY, 0.1, 0.5, seed).run(longest=150) for seed in range(5)]
    assert [fall.slashed_at for fall in falls] == [None] * 5


def test_lazy_majority_is_slashed_for_its_traps() -> None:
    falls = [Watched(LAZY, 0.7, 0.2, seed).run() for seed in range(5)]
    assert all(fall.slashed_at is not None and fall.slashed_at < 200 for fall in falls)


def test_league_that_recomputes_proves_it_and_falls_to_traps_of_nobody() -> None:
    falls = [Watched(LEAGUE, 0.7, 0.0, seed).run() for seed in range(5)]
    assert [fall.proven_at for fall in falls] == [None] * 5
    assert any(fall.slashed_at is not None for fall in falls)


def test_same_seed_same_network() -> None:
    assert Watched(COIN, 0.7, 0.2, 3).run() == Watched(COIN, 0.7, 0.2, 3).run()


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 1.0])
def test_wrong_majority_is_the_sum_over_all_committees(size: int, share: float) -> None:
    slow = sum(
        prod(share if bad else 1 - share for bad in members)
        for members in product((False, True), repeat=size)
        if sum(members) > size / 2
    )
    assert wrong_majority(size, share) == pytest.approx(slow)


def test_checking_pays_from_the_inverse_of_the_trap_rate_on() -> None:
    assert break_even(0.05) == pytest.approx(20)
    assert break_even(0.02) == pytest.approx(50)
    assert break_even(0.05, missed=0.5) == pytest.approx(40)


def test_guide_has_the_tables() -> None:
    text = GUIDE.read_text()
    assert "\n".join(committee_table()) in text
    for kind in KINDS:
        assert text.count(f"| {kind.name} |") == 3
