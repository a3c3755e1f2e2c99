"""Evaluation beside training: which versions, in which order, once."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.protocol.errors import ApiError, EngineError, NotYet, PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion
from muster.trainer.measure.beside import Follower
from muster.trainer.measure.evaluate import Estimate, Evaluation
from muster.trainer.measure.metrics import MetricsLog


class World:
    """A run's versions, relays that hold some of them, and an orchestrator."""

    def __init__(self, folder: Path, newest: int) -> None:
        self.folder = folder
        self.reported: list[tuple[int, float]] = []
        self.lacking: set[int] = set()
        self.refusal: ApiError | None = None
        self.failing: dict[int, NotYet | EngineError] = {}
        self.run = SimpleNamespace(closed_at=0, latest_version=None, checkpoints={})
        for version in range(newest + 1):
            self.publish(version)

    def publish(self, version: int) -> None:
        root = Hash32(version.to_bytes(32, "big"))
        self.run.checkpoints[PolicyVersion(version)] = SimpleNamespace(manifest_root=root)
        self.run.latest_version = version

    def follower(self, *, every: int = 1, last: int = 0) -> Follower:
        run: Any = self.run
        return Follower(
            run=lambda: run,
            last=last,
            every=every,
            fetch=self._fetch,
            offers_newer=self._offers_newer,
            evaluator=self,
            report=self._report,
            log=MetricsLog(self.folder / "evaluations.jsonl"),
        )

    async def _fetch(self, version: PolicyVersion, root: Hash32) -> Path:
        assert root == version.to_bytes(32, "big")
        if version in self.lacking:
            raise PolicyUnavailable(f"no relay has version {version}")
        return self.folder / str(version)

    async def _offers_newer(self, version: PolicyVersion) -> bool:
        return any(other > version for other in self.run.checkpoints.keys() - self.lacking)

    async def _report(
        self, version: PolicyVersion, root: Hash32, figures: Mapping[str, float]
    ) -> None:
        if self.refusal is not None:
            raise self.refusal
        assert (figures["eval_policy_version"], root[-1]) == (version, version)
        self.reported.append((version, figures["eval_reward"]))

    def evaluate(self, folder: Path, version: PolicyVersion) -> Evaluation:
        assert folder.name == str(version)
        if version in self.failing:
            raise self.failing[version]
        share = Estimate(version / 10, 0.0, 1.0)
        return Evaluation(version, share, {1: share}, 4, 0, 1, 3.0, 0.0, None)

    @property
    def versions(self) -> list[int]:
        return [version for version, _ in self.reported]


async def test_versions_are_evaluated_in_order_and_once(tmp_path: Path) -> None:
    world = World(tmp_path, newest=2)
    told: list[int] = []
    follower = replace(world.follower(), tell=lambda found: told.append(found.policy_version))
    await follower.evaluate_all()
    assert world.reported == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert told == [0, 1, 2]
    world.publish(3)
    # Another process, over the same folder.
    await world.follower().evaluate_all()
    assert world.versions == [0, 1, 2, 3]


async def test_what_was_not_reported_is_evaluated_again(tmp_path: Path) -> None:
    world = World(tmp_path, newest=0)
    world.refusal = ApiError("no evaluator", status=403, code="not_an_evaluator")
    with pytest.raises(ApiError):
        await world.follower().evaluate_all()
    world.refusal = None
    await world.follower().evaluate_all()
    assert world.versions == [0]


@pytest.mark.parametrize("lost", [1, 30])
async def test_a_version_whose_line_is_incomplete_is_evaluated_again(
    tmp_path: Path, lost: int
) -> None:
    world = World(tmp_path, newest=1)
    await world.follower().evaluate_all()
    log = tmp_path / "evaluations.jsonl"
    whole = log.read_bytes()
    log.write_bytes(whole[:-lost])
    await world.follower().evaluate_all()
    assert world.versions == [0, 1, 1]
    assert log.read_bytes() == whole


UNGRADED = NotYet("no problem could be graded")
NO_MEMORY = EngineError("inference failed: out of memory")


@pytest.mark.parametrize("error", [UNGRADED, NO_MEMORY])
async def test_a_version_that_this_machine_could_not_grade_stays_due(
    tmp_path: Path, error: NotYet | EngineError
) -> None:
    world = World(tmp_path, newest=1)
    world.failing = {0: error, 1: error}
    follower = world.follower()
    assert await follower.evaluate_all() == 0
    assert (world.versions, follower.due()) == ([], 0)
    world.failing = {}
    assert await follower.evaluate_all() is None
    assert world.versions == [0, 1]


async def test_a_version_that_fails_again_makes_way_for_a_newer_one(tmp_path: Path) -> None:
    world = World(tmp_path, newest=1)
    world.failing = {1: NO_MEMORY}
    follower = world.follower()
    # Nothing newer is there.
    assert [await follower.evaluate_all() for _ in range(3)] == [1, 1, 1]
    world.publish(2)
    assert await follower.evaluate_all() is None
    assert world.versions == [0, 2]
    assert follower.due() is None


async def test_no_version_makes_way_while_this_machine_grades_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, newest=2)
    world.failing = dict.fromkeys(range(3), UNGRADED)
    follower = world.follower()
    assert [await follower.evaluate_all() for _ in range(3)] == [0, 0, 0]
    world.failing = {}
    assert await follower.evaluate_all() is None
    assert world.versions == [0, 1, 2]


async def test_every_so_many_versions_and_the_last_are_evaluated(tmp_path: Path) -> None:
    world = World(tmp_path, newest=5)
    await world.follower(every=2, last=7).evaluate_all()
    assert world.versions == [0, 2, 4]
    world.publish(6)
    world.publish(7)
    follower = world.follower(every=2, last=7)
    assert follower.is_over
    await follower.evaluate_all()
    assert world.versions == [0, 2, 4, 6, 7]


async def test_a_closed_run_ends_with_its_newest_version(tmp_path: Path) -> None:
    world = World(tmp_path, newest=3)
    world.run.closed_at = 1
    await world.follower(every=2).evaluate_all()
    assert world.versions == [0, 2, 3]


async def test_a_version_that_relays_dropped_is_passed_over(tmp_path: Path) -> None:
    world = World(tmp_path, newest=2)
    world.lacking = {1}
    follower = world.follower()
    await follower.evaluate_all()
    assert world.versions == [0, 2]
    assert follower.due() is None


async def test_no_version_is_passed_over_while_no_relay_answers(tmp_path: Path) -> None:
    world = World(tmp_path, newest=2)
    world.lacking = {0, 1, 2}
    follower = world.follower()
    assert await follower.evaluate_all() == 0
    assert (world.versions, follower.due()) == ([], 0)
    world.lacking = set()
    assert await follower.evaluate_all() is None
    assert world.versions == [0, 1, 2]


async def test_the_newest_version_is_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path, newest=1)
    world.lacking = {1}
    follower = world.follower()
    await follower.evaluate_all()
    assert (world.versions, follower.due()) == ([0], 1)
    world.lacking = set()
    await follower.evaluate_all()
    assert world.versions == [0, 1]
