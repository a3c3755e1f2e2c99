"""Rewards and advantages against hand-computed numbers, and properties of all kinds."""

import math
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from hypothesis import given, strategies as st
from trainer_fakes import make_recipe, make_rollouts

from muster.protocol.objective import AdvantageName, ObjectiveRecipe
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.advantages import length_part, relative, rollout_advantages

KINDS: tuple[AdvantageName, ...] = get_args(AdvantageName)
REWARDS = st.lists(st.floats(0, 1).map(lambda x: round(x, 4)), min_size=2, max_size=16)


@pytest.mark.parametrize(
    ("kind", "rewards", "advantages"),
    [
        ("std", [1.0, 0.0], [0.70710678, -0.70710678]),
        # Mean 0.25, sample standard deviation 0.5.
        ("std", [1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),
        ("std", [0.3, 0.3, 0.3], [0.0, 0.0, 0.0]),
        ("mean", [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ("leave_one_out", [1.0, 0.0, 0.0, 0.0], [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("max_rl", [1.0, 0.0, 0.0, 0.0], [3.0, -1.0, -1.0, -1.0]),
        ("max_rl", [0.0, 0.0], [0.0, 0.0]),
    ],
)
def test_advantages_are_the_hand_computed_ones(
    kind: AdvantageName, rewards: list[float], advantages: list[float]
) -> None:
    assert relative(rewards, kind) == pytest.approx(advantages, abs=1e-5)


def test_advantage_without_a_formula_is_no_other_one() -> None:
    unknown: Any = "median"
    with pytest.raises(AssertionError, match="median"):
        relative([0.0, 1.0], unknown)


@given(REWARDS, st.sampled_from(KINDS))
def test_advantages_sum_to_zero_and_keep_the_order(
    rewards: list[float], kind: AdvantageName
) -> None:
    advantages = relative(rewards, kind)
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    ranked = sorted(zip(rewards, advantages, strict=True))
    assert [a for _, a in ranked] == sorted(advantages)


@given(REWARDS, st.floats(-5, 5), st.sampled_from(["std", "mean", "leave_one_out"]))
def test_advantages_ignore_a_shift(rewards: list[float], shift: float, kind: AdvantageName) -> None:
    if max(rewards) - min(rewards) > 1e-3:
        moved = relative([reward + shift for reward in rewards], kind)
        assert moved == pytest.approx(relative(rewards, kind), abs=1e-6)


@given(REWARDS)
def test_leave_one_out_is_the_mean_of_the_others(rewards: list[float]) -> None:
    found = relative(rewards, "leave_one_out")
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        assert found[i] == pytest.approx(reward - sum(others) / len(others), abs=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not all finite"):
        relative([0.0, bad], "std")


def test_max_rl_refuses_a_mean_that_is_not_positive() -> None:
    with pytest.raises(ValueError, match=r"which is -0\.5"):
        relative([-1.0, 0.0], "max_rl")


@pytest.mark.parametrize(
    ("form", "length", "part"),
    [
        ("exact", 900, -0.03),
        ("exact", 1100, -0.03),
        ("max", 1000, -0.5),  # half of the reward at the target
        ("max", 0, -0.2),
        ("max", 4000, -1.0),
        ("clip", 1000, 0.0),
        ("clip", 1001, -1.0),
    ],
)
def test_length_part_by_hand(form: str, length: int, part: float) -> None:
    objective = ObjectiveRecipe.model_validate({"length_reward": form})
    assert length_part(1.0, length, 1000, objective) == pytest.approx(part)
    assert length_part(1.0, length, -1, objective) == 0.0


@given(st.sampled_from(["max", "clip"]), st.integers(0, 9000), st.integers(1, 9000))
def test_multiplying_forms_leave_a_wrong_answer_at_zero(
    form: str, length: int, target: int
) -> None:
    objective = ObjectiveRecipe.model_validate({"length_reward": form})
    assert length_part(0.0, length, target, objective) == 0.0
    assert -1.0 <= length_part(1.0, length, target, objective) <= 0.0


def _group(lengths: list[int], rewards: list[float]) -> list[Rollout]:
    row = replace(make_rollouts(0)[0], target_length=4)
    return [
        replace(row, completion_tokens=(3,) * n, task_reward=r)
        for n, r in zip(lengths, rewards, strict=True)
    ]


def test_joint_advantage_normalises_the_sum() -> None:
    objective = ObjectiveRecipe(length_alpha=0.1)
    group = _group([4, 2], [1.0, 1.0])
    assert rollout_advantages(group, objective) == pytest.approx([0.70710, -0.70710], abs=1e-4)
    assert rollout_advantages(_group([3, 2], [1.0, 0.0]), objective) == pytest.approx(
        relative([0.9, -0.2], "std")
    )


def test_length_part_normalised_apart_is_added_with_its_weight() -> None:
    objective = ObjectiveRecipe(
        advantage="mean", length_alpha=0.1, length_advantage="std", length_weight=0.25
    )
    found = rollout_advantages(_group([4, 2, 4, 2], [1.0, 1.0, 0.0, 0.0]), objective)
    by_length = 0.25 * 0.1 / (math.sqrt(4 * 0.1**2 / 3) + 1e-6)
    expected = [0.5 + by_length, 0.5 - by_length, -0.5 + by_length, -0.5 - by_length]
    assert found == pytest.approx(expected)


def test_only_verified_reward_target_and_length_enter() -> None:
    """A worker's claims that validators do not recompute cannot change an advantage."""
    group = _group([4, 2], [1.0, 0.0])
    expected = rollout_advantages(group, make_recipe().training)
    others = {"problem_id": "x", "sampling_seed": 7, "proofs": b"?", "policy_version": 9}
    others |= {"group": 3, "sample": 3, "prompt_tokens": (5,)}
    assert {f.name for f in fields(Rollout)} == {
        *others,
        *("task_reward", "target_length", "completion_tokens", "replies"),
    }
    for name, value in others.items():
        changed = [replace(group[0], **{name: value}), group[1]]  # type: ignore[arg-type]
        assert rollout_advantages(changed, make_recipe().training) == expected


def test_replies_do_not_count_towards_a_length() -> None:
    objective = make_recipe().training.model_copy(update={"length_alpha": 0.1})
    group = [replace(rollout, target_length=4) for rollout in _group([4, 9], [1.0, 1.0])]
    assert len(set(rollout_advantages(group, objective))) == 2
    told = [group[0], replace(group[1], replies=((2, 7),))]
    assert rollout_advantages(told, objective) == [0.0, 0.0]
