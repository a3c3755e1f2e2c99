"""The reactions to alarms: none, an end, or a new version with old weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from practice import Practice, practice_recipe
from trainer_fakes import make_recipe, make_rollouts, with_reward
from trainer_world import World

from muster.protocol.errors import TrainingCollapsed
from muster.protocol.ids import PolicyVersion
from muster.trainer.base_model import build_base_model
from muster.trainer.recover.collapse import AlarmLimits, Guard

QUICK = AlarmLimits(window=2, patience=1)


def _entry(reward: float) -> dict[str, Any]:
    return {"reward": reward, "grad_norm": 1.0, "entropy": 0.3}


def _judged(guard: Guard, rewards: list[float]) -> list[int | None]:
    """Return the version to which each step was rolled back."""
    return [guard.judge(PolicyVersion(i), _entry(r)).back_to for i, r in enumerate(rewards, 1)]


def test_guard_that_logs_only_logs() -> None:
    guard = Guard(QUICK)
    assert set(_judged(guard, [0.5] * 4 + [0.0] * 4)) == {None}
    assert (guard.scale, guard.good) == (1.0, ())


def test_collapse_goes_back_to_the_older_good_version_at_a_smaller_rate() -> None:
    guard = Guard(QUICK, action="rollback", slowdown=0.25)
    assert _judged(guard, [0.5] * 6 + [0.0] * 2) == [None] * 7 + [4]
    assert (guard.scale, guard.good) == (0.25, (4,))


def test_early_collapse_goes_back_to_the_base_model() -> None:
    guard = Guard(QUICK, action="rollback")
    assert _judged(guard, [0.5] * 2 + [0.0] * 2) == [None] * 3 + [0]


def test_rollbacks_switched_on_late_wait_for_a_good_version() -> None:
    logging, guard = Guard(QUICK), Guard(QUICK, action="rollback")
    _judged(logging, [0.5] * 5)
    guard.restore(logging.state())
    found = [guard.judge(PolicyVersion(version), _entry(0.0)) for version in (7, 8)]
    assert [judgement.back_to for judgement in found] == [None, None]
    assert found[-1].alarm.is_due


def test_collapse_after_the_last_rollback_ends_the_run() -> None:
    guard = Guard(QUICK, action="rollback", most=1)
    _judged(guard, [0.5] * 4 + [0.0] * 2 + [0.5] * 4)
    guard.judge(PolicyVersion(11), _entry(0.0))
    with pytest.raises(TrainingCollapsed, match=r"collapsed at step 12: reward 100% below.*1 roll"):
        guard.judge(PolicyVersion(12), _entry(0.0))


def test_guard_goes_on_from_its_saved_state() -> None:
    rewards = [0.5] * 4 + [0.0] * 2 + [0.5] * 4 + [0.0] * 2
    whole = Guard(QUICK, action="rollback")
    expected = _judged(whole, rewards)
    guard, found = Guard(QUICK, action="rollback"), []
    for version, reward in enumerate(rewards, 1):
        fresh = Guard(QUICK, action="rollback")
        fresh.restore(guard.state())
        guard = fresh
        found.append(guard.judge(PolicyVersion(version), _entry(reward)).back_to)
    assert (found, guard.state()) == (expected, whole.state())
    assert expected.count(None) == len(expected) - 2


def _mixed(easy: tuple[float, int], hard: tuple[float, int]) -> dict[str, Any]:
    """Return a step's line of two parts: reward and groups of each."""
    groups = easy[1] + hard[1]
    part = {
        name: {"reward": reward if count else None, "groups": count}
        for name, (reward, count) in (("easy", easy), ("hard", hard))
    }
    mean = (easy[0] * easy[1] + hard[0] * hard[1]) / groups
    return _entry(mean) | {"part": part}


def _mixed_falls(steps: list[dict[str, Any]]) -> list[float]:
    guard = Guard(QUICK)
    alarms = [guard.judge(PolicyVersion(i), line).alarm for i, line in enumerate(steps, 1)]
    return [alarm.reward_fall for alarm in alarms]


def test_curriculum_that_moves_to_a_harder_part_is_no_collapse() -> None:
    easy, hard = _mixed((0.9, 8), (0.1, 0)), _mixed((0.9, 0), (0.1, 8))
    assert _mixed_falls([easy] * 4 + [hard] * 4) == [0.0] * 8
    # The same rewards without parts are a fall to a ninth.
    whole = [_entry(line["reward"]) for line in [easy] * 4 + [hard] * 4]
    assert _mixed_falls(whole)[-1] == pytest.approx(8 / 9)


def test_parts_that_fall_are_a_collapse_weighed_by_their_groups() -> None:
    before, after = _mixed((0.8, 6), (0.4, 2)), _mixed((0.2, 6), (0.4, 2))
    falls = _mixed_falls([before] * 3 + [after] * 2)
    assert falls[:3] == [0.0] * 3
    assert falls[-1] == pytest.approx(0.75 * 6 / 8)


def test_part_without_any_reward_hides_no_collapse() -> None:
    before, after = _mixed((0.8, 4), (0.0, 4)), _mixed((0.2, 4), (0.0, 4))
    assert _mixed_falls([before] * 3 + [after] * 2)[-1] == pytest.approx(0.75)


# In the flow


def _collapsing_world(folder: Path, model: Path) -> World:
    """Six good steps, two without any reward, two good ones."""
    world = World(folder, model, make_recipe(max_async_level=20))
    for seed in range(20):
        rollouts = make_rollouts(seed)
        world.feed.submit(with_reward(rollouts, 0.0) if 12 <= seed < 16 else rollouts)
    return world


def _rolling_back() -> Guard:
    return Guard(QUICK, action="rollback")


async def test_rollback_makes_a_new_version_with_old_weights(
    tmp_path: Path, model_folder: Path
) -> None:
    world = _collapsing_world(tmp_path / "w", model_folder)
    await world.train(9, guard=_rolling_back())
    assert world.policy_roots.sent == list(range(10))
    assert torch.equal(world.weights(8), world.weights(4))
    assert not torch.equal(world.weights(7), world.weights(4))
    assert not torch.equal(world.weights(9), world.weights(8))
    lines = [line for line in world.lines() if "step" in line]
    assert [line.get("rolled_back_to") for line in lines] == [None] * 7 + [4, None]
    assert lines[8]["learning_rate"] == pytest.approx(lines[6]["learning_rate"] / 2)
    manifest = world.store.manifest(1, PolicyVersion(8))  # type: ignore[arg-type]
    assert manifest is not None
    assert (manifest.stream_from, manifest.stream_to) == (14, 16)


async def test_rollback_is_the_same_after_a_restart(tmp_path: Path, model_folder: Path) -> None:
    whole = _collapsing_world(tmp_path / "whole", model_folder)
    await whole.train(9, guard=_rolling_back())
    for stop in (4, 7, 8):
        parts = _collapsing_world(tmp_path / f"parts {stop}", model_folder)
        await parts.train(stop, guard=_rolling_back())
        await parts.train(9, guard=_rolling_back())
        assert torch.equal(parts.weights(9), whole.weights(9)), stop
        assert parts.policy_roots.roots == whole.policy_roots.roots, stop


async def test_collapse_ends_the_run_before_the_step_is_saved(
    tmp_path: Path, model_folder: Path
) -> None:
    world = _collapsing_world(tmp_path / "w", model_folder)
    for _ in range(2):
        with pytest.raises(ExceptionGroup) as caught:
            await world.train(9, guard=Guard(QUICK, action="stop"))
        assert caught.group_contains(TrainingCollapsed, match="at step 8")
        assert 8 not in world.policy_roots.sent


# A real one


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model."""
    folder = tmp_path_factory.mktemp("warm") / "model"
    build_base_model(folder, seed=0)
    return folder


def _rewards(folder: Path, model: Path, rate: float, guard: Guard) -> tuple[list[float], list[int]]:
    """Really train on the policy's own samples; return rewards and rolled-back steps."""
    practice = Practice(model, folder, practice_recipe(learning_rate=rate), seed=1)
    learner, saved = practice.learner, {}
    saved[0] = {name: value.clone() for name, value in learner.state().items()}
    rewards, sent_back = [], []
    for number, figures in enumerate(practice.steps(60), 1):
        version = PolicyVersion(number)
        rewards.append(figures.reward)
        saved[number] = {name: value.clone() for name, value in learner.state().items()}
        entry = {"reward": figures.reward, "grad_norm": figures.grad_norm}
        back_to = guard.judge(version, entry | {"entropy": figures.entropy}).back_to
        if back_to is not None:
            sent_back.append(number)
            learner.restore(saved[back_to])
            learner.learning_rate_scale = guard.scale
            practice.shelf.write(version, learner.weights())
    return rewards, sent_back


@pytest.mark.slow
def test_run_that_collapses_is_saved_by_a_rollback(tmp_path: Path, warm_model: Path) -> None:
    lost, _ = _rewards(tmp_path / "lost", warm_model, 3e-3, Guard())
    saved, sent_back = _rewards(tmp_path / "saved", warm_model, 3e-3, Guard(action="rollback"))
    assert max(lost[:5]) > 0.2 > max(lost[-5:])
    assert sent_back
    assert sent_back[0] < 25
    assert lost[: sent_back[0]] == saved[: sent_back[0]]
    assert min(saved[-5:]) > 0.5


@pytest.mark.slow
def test_run_that_learns_is_left_alone(tmp_path: Path, warm_model: Path) -> None:
    rewards, sent_back = _rewards(tmp_path / "run", warm_model, 7e-4, Guard(action="rollback"))
    assert sent_back == []
    assert min(rewards[-5:]) > 0.7
