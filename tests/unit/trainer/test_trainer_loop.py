"""The flow: steps, publications, evaluations; and death at every moment in between."""

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_fakes import FakeRoots, FakeSink, make_recipe
from trainer_world import RUN, World, die, dying, without_time

from muster.inference.transformers_engine import TransformersEngine
from muster.lifecycle import ComputeThread
from muster.protocol.errors import ApiError, EngineError, NotYet
from muster.protocol.ids import Hash32, PolicyVersion
from muster.tasks.toys import make_sort
from muster.telemetry import KeyValueFormatter
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.memory_plan import MemoryShort
from muster.trainer.measure.evaluate import Evaluation, Evaluator
from muster.trainer.measure.metrics import MetricsPoster
from muster.trainer.publish.policies import BASE, PolicyShelf


@pytest.fixture
def world(tmp_path: Path, model_folder: Path) -> World:
    """A run in which six steps' records are accepted."""
    made = World(tmp_path / "world", model_folder)
    made.feed.submit_many(range(12), version=0)
    return made


def _patient_world(folder: Path, model: Path) -> World:
    other = World(folder, model, make_recipe(max_async_level=8))
    other.feed.submit_many(range(12), version=0)
    return other


async def test_every_step_makes_and_anchors_one_version(world: World) -> None:
    await world.train(2)
    assert world.policy_roots.sent == [0, 1, 2]
    manifests = [world.store.manifest(RUN, PolicyVersion(v)) for v in (0, 1, 2)]
    assert [(m.stream_from, m.stream_to) for m in manifests if m] == [(0, 0), (0, 2), (2, 4)]
    assert not torch.equal(world.weights(0), world.weights(2))


async def test_metrics_have_one_line_per_step(world: World) -> None:
    await world.train(2)
    first, second = world.lines()
    assert (first["step"], first["policy_version"], second["step"]) == (1, 1, 2)
    assert (second["stream_from"], second["stream_to"]) == (2, 4)
    assert first["reward"] == 0.5
    assert first["dropped"] == {}
    assert first["uses"] == [
        {"position": place, "kept": first["samples"] // 2, "dropped": {}} for place in (0, 1)
    ]
    assert first.keys() >= {"loss", "grad_norm", "entropy", "tokens", "wall_s"}
    assert [step for step, _ in world.sink.posted] == [1, 2]


async def test_logs_of_a_step_name_things(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    await world.train(1)
    shown = KeyValueFormatter("trainer")
    lines = "\n".join(shown.format(record) for record in caplog.records)
    assert "training step step=1" in lines
    assert not re.search(r"<\w+\.|\w+\(\w+=|Counter", lines)


async def test_samples_without_room_stop_the_trainer_before_the_step(world: World) -> None:
    asked: list[list[int]] = []

    def refuse(lengths: list[int]) -> None:
        asked.append(lengths)
        raise MemoryShort("a sample has 9000 tokens")

    with pytest.raises(ExceptionGroup) as caught:
        await world.train(2, require_room=refuse)
    assert caught.group_contains(MemoryShort, match="a sample has 9000 tokens")
    (lengths,) = asked
    assert PolicyVersion(1) not in world.policy_roots.sent
    await world.train(2, require_room=asked.append)
    assert asked[1] == lengths
    assert world.lines()[0]["samples"] == len(lengths)
    assert world.policy_roots.sent == [0, 1, 2]


async def test_finished_run_takes_no_further_step(world: World) -> None:
    await world.train(2)
    await world.train(2)
    assert world.policy_roots.sent == [0, 1, 2]
    assert len(world.lines()) == 2


async def test_old_policies_are_dropped_from_disk(world: World) -> None:
    await world.train(3, shelf=(shelf := _shelf(world)), learner=_learner(world, shelf))
    assert [shelf.has(PolicyVersion(v)) for v in range(4)] == [True, True, True, True]
    world.feed.submit_many([20, 21, 22, 23, 24, 25], version=3)
    await world.train(6)
    # Two for max_async_level, two for the checkpoints that stay.
    assert [shelf.has(PolicyVersion(v)) for v in range(5)] == [True, False, True, True, True]


def _shelf(world: World) -> PolicyShelf:
    shelf = PolicyShelf(world.folder / "policies")
    shelf.adopt(world.model)
    return shelf


def _learner(world: World, shelf: PolicyShelf) -> Learner:
    return Learner(shelf.path(BASE), world.recipe, published=shelf.weights)


async def test_next_step_does_not_wait_for_the_chain(world: World) -> None:
    may_publish = asyncio.Event()
    publish = world.policy_roots.publish

    async def slow(version: PolicyVersion, root: Hash32) -> None:
        if version == 1:
            await may_publish.wait()
        await publish(version, root)

    world.policy_roots.publish = slow  # type: ignore[method-assign]
    training = asyncio.create_task(world.train(3))
    async with asyncio.timeout(10):
        while len(_lines_so_far(world)) < 2:
            await asyncio.sleep(0.01)
    assert world.policy_roots.sent == [0]
    assert not training.done()
    may_publish.set()
    await training
    assert world.policy_roots.sent == [0, 1, 2, 3]


def _lines_so_far(world: World) -> list[dict[str, Any]]:
    return world.lines() if (world.folder / "metrics.jsonl").exists() else []


async def test_first_and_last_policy_are_evaluated(world: World) -> None:
    evaluator = Evaluator(make_sort(20, 1), TransformersEngine(), world.recipe)
    await world.train(3, evaluator=evaluator, eval_every=2)
    evaluations = [line["eval"] for line in world.lines() if "eval" in line]
    assert [e["policy_version"] for e in evaluations] == [0, 2, 3]
    assert all(e["problems"] == 20 and 0 <= e["reward"] <= 1 for e in evaluations)
    assert (0, 20.0) in [
        (s, f["eval_problems"]) for s, f in world.sink.posted if "eval_problems" in f
    ]


async def test_ranks_hear_from_the_leader_during_an_evaluation(world: World) -> None:
    beaten = threading.Event()

    class Waiting(Evaluator):
        """Ends its evaluation once the thread of tensors has done other work."""

        def evaluate(self, folder: Path, version: PolicyVersion) -> Evaluation:
            loop.call_soon_threadsafe(lambda: beats.append(loop.create_task(beat())))
            assert beaten.wait(10)
            return super().evaluate(folder, version)

    async def beat() -> None:
        await compute.run(beaten.set)

    loop, compute = asyncio.get_running_loop(), ComputeThread()
    beats: list[asyncio.Task[None]] = []
    evaluator = Waiting(make_sort(2, 1), TransformersEngine(), world.recipe)
    await world.train(1, evaluator=evaluator, compute=compute)
    assert len(beats) == 2


@pytest.mark.parametrize("error", [NotYet, EngineError])
async def test_a_version_that_could_not_be_graded_is_evaluated_after_a_restart(
    world: World, error: type[NotYet | EngineError]
) -> None:
    class Disturbed(Evaluator):
        """Evaluates on a machine that can grade nothing."""

        def evaluate(self, folder: Path, version: PolicyVersion) -> Evaluation:
            raise error(f"version {version} in {folder} could not be graded")

    problems, engine = make_sort(5, 1), TransformersEngine()
    await world.train(1, evaluator=Disturbed(problems, engine, world.recipe))
    assert not [line for line in world.lines() if "eval" in line]
    await world.train(1, evaluator=Evaluator(problems, engine, world.recipe))
    evaluations = [line["eval"] for line in world.lines() if "eval" in line]
    assert [each["policy_version"] for each in evaluations] == [1]


async def test_evaluation_is_not_repeated_after_a_restart(world: World) -> None:
    evaluator = Evaluator(make_sort(5, 1), TransformersEngine(), world.recipe)
    await world.train(1, evaluator=evaluator)
    await world.train(1, evaluator=evaluator)
    assert len([line for line in world.lines() if "eval" in line]) == 2


async def test_evaluation_is_the_same_for_the_same_policy(world: World) -> None:
    shelf = _shelf(world)
    evaluator = Evaluator(make_sort(30, 1), TransformersEngine(), world.recipe)
    one, two = (evaluator.evaluate(shelf.path(BASE), BASE) for _ in range(2))
    assert one == two


async def test_orchestrator_that_takes_no_figures_is_harmless(world: World) -> None:
    world.sink.errors = [ApiError("down", status=503, code="down")] * 2
    await world.train(2)
    assert world.policy_roots.sent == [0, 1, 2]
    assert world.sink.posted == []


# ------------------------------------------------------------------ kill -9, and again


MOMENTS = [
    f"{part} {when}"
    for part in ("learn", "write", "stage", "complete", "log", "publish", "anchor")
    for when in ("before", "after")
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> World:
    """A run of five steps whose trainer nobody killed."""
    made = _patient_world(tmp_path_factory.mktemp("undisturbed"), model_folder)
    asyncio.run(made.train(5))
    return made


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    "count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))]
)
async def test_killed_trainer_ends_with_the_very_same_policy(
    tmp_path: Path, undisturbed: World, moment: str, count: int
) -> None:
    killed = _patient_world(tmp_path, undisturbed.model)
    parts = dying(killed.parts(), moment, count)
    await die(parts, steps=5)
    killed.policy_roots = FakeRoots(roots=killed.policy_roots.roots)
    await killed.train(5)
    assert torch.equal(killed.weights(5), undisturbed.weights(5))
    assert killed.policy_roots.roots == undisturbed.policy_roots.roots
    assert without_time(killed) == without_time(undisturbed)


async def test_records_are_trained_on_exactly_once_over_many_deaths(world: World) -> None:
    disturbed = _patient_world(world.folder.parent / "disturbed", world.model)
    for moment in (
        "complete before",
        "complete after",
        "learn after",
        "anchor before",
        "write after",
    ):
        parts = dying(disturbed.parts(), moment, 1)
        await die(parts, steps=6)
    await disturbed.train(6)
    ranges = [(line["stream_from"], line["stream_to"]) for line in disturbed.lines()]
    assert ranges == [(2 * i, 2 * i + 2) for i in range(6)]


async def test_poster_gives_up_the_oldest_when_the_orchestrator_is_away() -> None:
    sink = FakeSink()
    poster = MetricsPoster(sink)
    for step in range(100):
        poster.post(step, {"reward": 0.0})
    running = asyncio.create_task(poster.run())
    await poster.drain(5)
    running.cancel()
    assert [step for step, _ in sink.posted] == list(range(36, 100))
