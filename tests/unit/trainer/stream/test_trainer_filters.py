"""The filters: every reason to leave something out, with a twin that is kept."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from trainer_fakes import EOS, make_recipe, make_rollouts, with_filters, with_reward

from muster.protocol.rollouts import Rollout
from muster.trainer.learn.advantages import keep_informative
from muster.trainer.stream.filters import DifficultyPools, Drop, Sieve


def _group(seed: int = 0, number: int = 0) -> list[Rollout]:
    return make_rollouts(seed)[4 * number : 4 * number + 4]


def _sieve(pools: DifficultyPools | None = None, **filters: object) -> Sieve:
    recipe = with_filters(make_recipe(), **filters)
    return Sieve(recipe, pools or DifficultyPools(), frozenset({EOS}))


def _full(rollout: Rollout, last: int) -> Rollout:
    return replace(rollout, completion_tokens=(3, 4, 5, 6, 7, last))


def test_informative_group_is_kept_whole() -> None:
    sieve = _sieve()
    sieve.take(_group())
    assert sieve.kept == [_group()]
    assert sieve.dropped == {}
    assert sieve.reward == 0.5


@pytest.mark.parametrize("reward", [0.0, 0.5, 1.0])
def test_group_without_a_preference_is_left_out_and_still_counts_as_reward(reward: float) -> None:
    sieve = _sieve()
    sieve.take(with_reward(_group(), reward))
    assert sieve.kept == []
    assert sieve.dropped == {Drop.ZERO_ADVANTAGE: 4}
    assert sieve.reward == reward


def test_preference_is_judged_on_the_task_reward_alone() -> None:
    group = [replace(r, target_length=i) for i, r in enumerate(with_reward(_group(), 1.0))]
    sieve = _sieve()
    sieve.take(group)
    assert sieve.dropped == {Drop.ZERO_ADVANTAGE: 4}


def test_repeated_group_is_left_out_and_its_reward_does_not_count_twice() -> None:
    sieve = _sieve()
    for group in (_group(1), _group(2), _group(1)):
        sieve.take(group)
    assert sieve.kept == [_group(1), _group(2)]
    assert sieve.dropped == {Drop.DUPLICATE: 4}


def test_group_that_borrows_one_sample_is_left_out() -> None:
    sieve = _sieve()
    borrowed = [_group(1)[0], *_group(2)[1:]]
    sieve.take(_group(1))
    sieve.take(borrowed)
    assert sieve.dropped == {Drop.DUPLICATE: 4}


def test_sample_twice_in_a_group_leaves_the_group_out() -> None:
    group = _group()
    group[3] = replace(group[3], sampling_seed=group[0].sampling_seed)
    sieve = _sieve()
    sieve.take(group)
    assert sieve.dropped == {Drop.DUPLICATE: 4}


def test_equal_completions_of_different_seeds_are_no_duplicates() -> None:
    group = [replace(r, completion_tokens=(3, EOS)) for r in _group()]
    sieve = _sieve()
    sieve.take(group)
    assert sieve.kept == [group]


@pytest.mark.parametrize(
    ("last", "drops", "expected"), [(3, True, {Drop.TRUNCATED: 1}), (EOS, True, {}), (3, False, {})]
)
def test_truncated_sample_is_left_out_if_the_recipe_says_so(
    last: int, drops: bool, expected: dict[Drop, int]
) -> None:
    group = _group()
    group[1] = _full(group[1], last)
    sieve = _sieve(drop_truncated=drops)
    sieve.take(group)
    assert sieve.dropped == expected
    assert len(sieve.kept[0]) == 4 - sum(expected.values())


def test_rest_without_a_preference_is_left_out_too() -> None:
    group = [_full(r, 3) if r.task_reward else r for r in _group()]
    sieve = _sieve(drop_truncated=True)
    sieve.take(group)
    assert sieve.kept == []
    assert sieve.dropped == {Drop.TRUNCATED: 2, Drop.ZERO_ADVANTAGE: 2}


def test_group_of_truncated_samples_alone_is_counted_once() -> None:
    sieve = _sieve(drop_truncated=True)
    sieve.take([_full(r, 3) for r in _group()])
    assert sieve.dropped == {Drop.TRUNCATED: 4}


@pytest.mark.parametrize(("before", "expected"), [(1.0, Drop.EASY), (0.0, Drop.HARD), (0.5, None)])
def test_set_aside_problem_is_left_out(before: float, expected: Drop | None) -> None:
    pools = DifficultyPools()
    for _ in range(8):
        pools.note("p0", before, 8)
    sieve = _sieve(pools, pool_window=8, pool_hard=0.1, pool_easy=0.9)
    sieve.take(_group())
    assert sieve.dropped == ({expected: 4} if expected else {})
    assert bool(sieve.kept) is (expected is None)


def test_set_aside_problem_comes_back_when_its_rate_moves() -> None:
    pools = DifficultyPools()
    for _ in range(4):
        pools.note("p0", 0.0, 4)
    sieve = _sieve(pools, pool_window=4, pool_hard=0.2, pool_easy=0.95)
    for seed in range(1, 4):
        sieve.take(_group(seed))
    # Rates 0.125, 0.219 and 0.289: hard, then active.
    assert sieve.dropped == {Drop.HARD: 4}
    assert len(sieve.kept) == 2


def test_pools_before_the_step_stay_as_they_are() -> None:
    pools = DifficultyPools()
    sieve = _sieve(pools, pool_window=4)
    sieve.take(_group())
    assert pools.rates == {}
    assert sieve.pools.rates["p0"].groups == 1


def test_nothing_taken_has_reward_zero() -> None:
    assert _sieve().reward == 0.0


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["mixed", "same", "full"]))))
def test_every_sample_is_kept_or_counted_once(plan: list[tuple[int, str]]) -> None:
    sieve = _sieve(drop_truncated=True, pool_window=2, pool_hard=0.2, pool_easy=0.8)
    for seed, kind in plan:
        group = _group(seed)
        if kind == "same":
            group = with_reward(group, 1.0)
        if kind == "full":
            group[0] = _full(group[0], 3)
        sieve.take(group)
    assert sum(map(len, sieve.kept)) + sieve.dropped.total() == 4 * len(plan)
    assert all(count > 0 for count in sieve.dropped.values())


def test_learner_leaves_out_what_has_no_preference_whoever_fed_it() -> None:
    kept = keep_informative([_group(), with_reward(_group(1), 1.0)], make_recipe().training)
    assert [len(group) for group in kept.samples] == [4]
    assert kept.dropped == {Drop.ZERO_ADVANTAGE: 4}
