"""A version with NaN or infinity is never published, and the trainer says what to go back to."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_fakes import make_recipe
from trainer_world import World

from muster.protocol.errors import TrainingCollapsed
from muster.protocol.ids import PolicyVersion, Step
from muster.trainer.learn.learner import Learner
from muster.trainer.publish.policies import BASE, WEIGHTS_FILE, PolicyShelf
from muster.trainer.recover.collapse import AlarmLimits, Guard
from muster.trainer.sites.site_learner import SiteLearner

NORM = "model.norm.weight"
HUGE = 3e38
"""Finite by itself; times anything it is not."""


@pytest.fixture
def world(tmp_path: Path, model_folder: Path) -> World:
    made = World(tmp_path / "world", model_folder, make_recipe(max_async_level=20))
    made.feed.submit_many(range(20))
    return made


class Breaking(Learner):
    """A learner whose weights break in one step."""

    breaks_at, value = Step(3), math.nan

    def step(self, step: Step, groups: Any) -> Any:
        figures = super().step(step, groups)
        if step == self.breaks_at:
            with torch.no_grad():
                self.model.model.norm.weight[:] = self.value
        return figures


def _breaking(world: World, value: float = math.nan) -> Breaking:
    shelf = PolicyShelf(world.folder / "policies")
    if not shelf.has(BASE):
        shelf.adopt(world.model)
    learner = Breaking(shelf.path(BASE), world.recipe, published=shelf.weights)
    learner.value = value
    return learner


async def _collapsed(world: World, **changes: Any) -> TrainingCollapsed:
    with pytest.raises((TrainingCollapsed, ExceptionGroup)) as caught:
        await world.train(5, **changes)
    error: BaseException = caught.value
    while isinstance(error, ExceptionGroup):
        [error] = error.exceptions
    assert isinstance(error, TrainingCollapsed)
    return error


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_weights_that_are_not_finite_are_not_published(world: World, value: float) -> None:
    error = await _collapsed(world, learner=_breaking(world, value))
    assert str(error) == (
        f"version 3 is not published: the weights that step 3 made are not finite ({NORM})"
    )
    assert "version 2" in str(error.hint)
    assert "--on-collapse rollback" in str(error.hint)
    assert 3 not in world.policy_roots.sent
    assert not PolicyShelf(world.folder / "policies").has(PolicyVersion(3))
    assert not (world.folder / "checkpoints/3").exists()


async def test_logits_that_are_not_finite_are_not_published(world: World) -> None:
    error = await _collapsed(world, learner=_breaking(world, HUGE))
    assert "the logits that step 3 made are not finite" in str(error)
    assert 3 not in world.policy_roots.sent


async def test_large_finite_weights_are_published(world: World) -> None:
    await world.train(5, learner=_breaking(world, 30.0))
    assert world.policy_roots.sent == list(range(6))


async def test_rollback_goes_on_from_the_version_before(world: World) -> None:
    """Also when it is switched on only after the stop, so that no good version was noted."""
    await _collapsed(world, learner=_breaking(world))
    guard = Guard(AlarmLimits(), action="rollback", slowdown=0.5)
    await world.train(5, learner=_breaking(world), guard=guard)
    assert world.policy_roots.sent == list(range(6))
    assert torch.equal(world.weights(3), world.weights(2))
    assert not torch.equal(world.weights(4), world.weights(3))
    assert guard.scale == 0.5
    assert [line.get("rolled_back_to") for line in world.lines()] == [None, None, 2, None, None]


async def test_first_step_goes_back_to_the_base_model(world: World) -> None:
    learner = _breaking(world)
    learner.breaks_at = Step(1)
    await world.train(2, learner=learner, guard=Guard(AlarmLimits(), action="rollback"))
    assert torch.equal(world.weights(1), world.weights(0))
    assert bool(world.weights(2).isfinite().all())


async def test_rollbacks_are_counted(world: World) -> None:
    guard = Guard(AlarmLimits(), action="rollback", most=0)
    error = await _collapsed(world, learner=_breaking(world), guard=guard)
    assert str(error.hint).startswith("start a new run from version 0")


async def test_checkpoint_that_is_not_finite_is_not_published(world: World) -> None:
    """An earlier version of this software wrote it, or the base model is so."""
    await world.train(2)
    parts = world.parts(learner=(learner := _breaking(world)))
    saved = parts.checkpoints.newest()
    assert saved is not None
    learner.restore(parts.checkpoints.read(saved.folder, learner))
    with torch.no_grad():
        learner.model.model.norm.weight[0] = math.nan
    parts.checkpoints.save(saved.state, learner.state()).result()
    error = await _collapsed(world)
    assert f"the weights of version 2 are not finite ({NORM})" in str(error)
    assert 3 not in world.policy_roots.sent


@pytest.fixture
def short_world(tmp_path: Path, model_folder: Path) -> World:
    """The same with a base model, and so with versions, in float16."""
    folder = shutil.copytree(model_folder, tmp_path / "short")
    weights = load_file(folder / WEIGHTS_FILE)
    short = {name: weight.half() for name, weight in weights.items()}
    save_file(short, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    made = World(tmp_path / "world", folder, make_recipe(max_async_level=20))
    made.feed.submit_many(range(20))
    return made


async def test_weights_that_overflow_the_published_format_are_rolled_back(
    short_world: World,
) -> None:
    error = await _collapsed(short_world, learner=_breaking(short_world, 1e5))
    assert f"step 3 made are not finite ({NORM} in torch.float16)" in str(error)
    assert "--on-collapse rollback" in str(error.hint)
    guard = Guard(AlarmLimits(), action="rollback")
    await short_world.train(5, learner=_breaking(short_world, 1e5), guard=guard)
    assert short_world.policy_roots.sent == list(range(6))
    assert torch.equal(short_world.weights(3), short_world.weights(2))
    assert not torch.equal(short_world.weights(4), short_world.weights(3))


async def test_large_weights_that_the_published_format_holds_are_published(
    short_world: World,
) -> None:
    await short_world.train(4, learner=_breaking(short_world, 1e4))
    assert short_world.policy_roots.sent == list(range(5))


def test_weights_that_overflow_the_published_format_are_not_written(
    tmp_path: Path, model_folder: Path
) -> None:
    shelf = PolicyShelf(tmp_path, dtype="bfloat16")
    shelf.adopt(model_folder)
    weights = {name: weight.float() for name, weight in shelf.weights(BASE).items()}
    shelf.write(PolicyVersion(1), weights)
    weights[NORM][0] = torch.finfo(torch.float32).max
    with pytest.raises(TrainingCollapsed, match=rf"{NORM} .* torch\.bfloat16"):
        shelf.write(PolicyVersion(2), weights)
    assert not shelf.has(PolicyVersion(2))


def test_fault_of_a_site_is_that_of_its_learner(world: World) -> None:
    class Broken:
        def fault(self, formats: Mapping[str, torch.dtype]) -> str:
            return f"logits of {len(formats)}"

    site = SiteLearner.__new__(SiteLearner)
    site._inner = Broken()  # type: ignore[assignment]
    assert site.fault({NORM: torch.float16}) == "logits of 1"


# Steps without any finite update


def _entry(*, is_skipped: bool) -> dict[str, Any]:
    norm = 0.0 if is_skipped else 1.0
    return {"reward": 0.5, "grad_norm": norm, "entropy": 0.3, "skipped": int(is_skipped)}


def _judge_all(guard: Guard, skipped: list[bool], first: int = 1) -> list[int | None]:
    return [
        guard.judge(PolicyVersion(i), _entry(is_skipped=each)).back_to
        for i, each in enumerate(skipped, first)
    ]


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("action", ["log", "stop"])
def test_steps_that_are_all_skipped_end_the_run(window: int, action: Any) -> None:
    guard = Guard(AlarmLimits(window=window, patience=3), action=action)
    _judge_all(guard, [False, True, True, False, True, True])
    with pytest.raises(TrainingCollapsed) as caught:
        guard.judge(PolicyVersion(7), _entry(is_skipped=True))
    assert str(caught.value) == (
        "training stands still at step 7: loss or gradient was not finite in 3 steps in a row, "
        "which changed no weight"
    )
    assert "training goes on from version 3" in str(caught.value.hint)


def test_step_that_is_skipped_in_part_is_no_alarm() -> None:
    guard = Guard(AlarmLimits(patience=1))
    assert not guard.judge(PolicyVersion(1), {**_entry(is_skipped=False), "skipped": 3}).alarm.is_on


def test_rollback_that_is_switched_on_after_the_stop_has_a_version_to_go_back_to() -> None:
    first, guard = Guard(AlarmLimits(patience=2)), Guard(AlarmLimits(patience=2), action="rollback")
    _judge_all(first, [False] * 4 + [True])
    guard.restore(first.state())
    assert _judge_all(guard, [True], first=6) == [3]


def test_one_skipped_step_keeps_no_checkpoint_for_long() -> None:
    guard = Guard(AlarmLimits())
    _judge_all(guard, [False, False, True])
    assert guard.good == (1,)
    _judge_all(guard, [False], first=4)
    assert guard.good == ()


def test_skipped_steps_roll_back() -> None:
    guard = Guard(AlarmLimits(window=2, patience=2), action="rollback")
    assert _judge_all(guard, [False] * 6 + [True] * 2) == [None] * 7 + [4]


def test_skipped_steps_are_counted_across_a_restart() -> None:
    first, guard = Guard(AlarmLimits(patience=3)), Guard(AlarmLimits(patience=3))
    _judge_all(first, [False, True, True])
    guard.restore(first.state())
    with pytest.raises(TrainingCollapsed):
        _judge_all(guard, [True], first=4)
