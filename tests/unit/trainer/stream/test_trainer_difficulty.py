"""Pass rates and pools: a problem's rate, and when the problem is set aside."""

from statistics import fmean

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from muster.protocol.recipe import FilterRecipe, PartRules
from muster.trainer.stream.filters import DifficultyPools, PassRate, Pool

RECIPE = FilterRecipe(pool_window=4, pool_min_groups=2, pool_hard=0.1, pool_easy=0.9)
REWARDS = st.lists(st.floats(0, 1), min_size=1, max_size=30)


def _pools(*rewards: float, window: int = 4) -> DifficultyPools:
    pools = DifficultyPools()
    for reward in rewards:
        pools.note("p", reward, window)
    return pools


def test_rate_forgets_what_lies_before_the_window() -> None:
    # ((0 + 1 - 0) / 2 = 0.5, then 0.5 + (1 - 0.5) / 2 = 0.75.
    assert _pools(0.0, 1.0, 1.0, window=2).rates["p"] == PassRate(3, 0.75)


@given(REWARDS, st.integers(1, 8))
def test_rate_stays_within_what_was_seen(rewards: list[float], window: int) -> None:
    known = _pools(*rewards, window=window).rates["p"]
    assert min(rewards) - 1e-9 <= known.rate <= max(rewards) + 1e-9
    if len(rewards) <= window:
        assert known.rate == pytest.approx(fmean(rewards))


@pytest.mark.parametrize(
    ("rewards", "pool"),
    [
        ((1.0, 1.0), Pool.EASY),
        ((1.0,), Pool.ACTIVE),
        ((0.9, 0.9), Pool.EASY),
        ((0.89, 0.89), Pool.ACTIVE),
        ((0.1, 0.1), Pool.HARD),
        ((0.11, 0.11), Pool.ACTIVE),
        ((0.0, 0.0, 0.5), Pool.ACTIVE),
        ((), Pool.ACTIVE),
    ],
)
def test_problem_is_set_aside_at_its_bounds_and_comes_back(
    rewards: tuple[float, ...], pool: Pool
) -> None:
    assert _pools(*rewards).pool_of("p", RECIPE) is pool


def test_without_a_window_there_are_no_pools() -> None:
    assert _pools(1.0, 1.0, 1.0).pool_of("p", FilterRecipe()) is Pool.ACTIVE


@given(st.dictionaries(st.text(min_size=1), REWARDS, max_size=5))
def test_pools_survive_their_plain_form(history: dict[str, list[float]]) -> None:
    pools = DifficultyPools()
    for problem_id, rewards in history.items():
        for reward in rewards:
            pools.note(problem_id, reward, 4)
    assert DifficultyPools.from_dict(pools.to_dict()) == pools
    assert sum(pools.sizes(PartRules("", (), RECIPE)).values()) == len(history)


def test_damaged_pools_are_refused() -> None:
    with pytest.raises((ValueError, TypeError)):
        DifficultyPools.from_dict({"p": [1]})


def test_copy_changes_independently() -> None:
    pools = _pools(1.0)
    pools.copy().note("p", 0.0, 4)
    assert pools == _pools(1.0)


def test_pools_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ValidationError, match="must be below pool_easy"):
        FilterRecipe(pool_hard=0.5, pool_easy=0.5)
