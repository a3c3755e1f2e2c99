"""Parts of a task set: ranges that its header names and its root binds."""

import json
from pathlib import Path
from typing import Any

import pytest

from muster.protocol.errors import EncodingError, TaskError
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe
from muster.tasks import TaskSet
from muster.tasks.document import DocumentWriter, Header, SetPart, TaskSetFile
from muster.tasks.toys import make_arithmetic, make_sort

PARTS = (SetPart("sorts", "sort 1", 3), SetPart("sums", "sums 1", 5))
PROBLEMS = (*make_sort(3, seed=1), *make_arithmetic(5, seed=1))
MIXED = TaskSet.of("mixed", "1", PROBLEMS, PARTS)


def recipe_of(*names: str, wanted: int = 2) -> Recipe:
    value = {
        "name": "x",
        "sampling": SamplingRecipe(
            problems_per_submission=wanted, samples_per_problem=2, temperature=1, max_new_tokens=6
        ).model_dump(),
        "training": TrainingRecipe(submissions_per_step=1).model_dump(),
        "tasks": {"parts": [{"name": name} for name in names]},
    }
    return Recipe.model_validate_json(json.dumps(value))


def test_set_with_parts_survives_a_round_trip(tmp_path: Path) -> None:
    assert TaskSet.from_bytes(MIXED.to_bytes()) == MIXED
    MIXED.write(tmp_path / "mixed")
    lazy = TaskSet.lazily(TaskSetFile.open(tmp_path / "mixed"))
    assert (lazy.parts, lazy.hash()) == (PARTS, MIXED.hash())


def test_root_binds_the_parts() -> None:
    plain = TaskSet.of("mixed", "1", PROBLEMS)
    moved = (SetPart("sorts", "sort 1", 4), SetPart("sums", "sums 1", 4))
    hashes = {plain.hash(), MIXED.hash(), TaskSet.of("mixed", "1", PROBLEMS, moved).hash()}
    assert len(hashes) == 3


def test_set_without_parts_is_written_as_before() -> None:
    assert Header("x", "1", 3).to_bytes() == (
        b'{"count":3,"name":"x","schema_version":1,"version":"1"}'
    )


def test_ranges_cover_the_set_in_order() -> None:
    assert (MIXED.range_of("sorts"), MIXED.range_of("sums")) == (range(3), range(3, 8))
    assert MIXED.range_of("") == range(8)
    found = [MIXED.part_at(i) for i in range(8)]
    assert found == ["sorts"] * 3 + ["sums"] * 5
    assert TaskSet.of("x", "1", PROBLEMS).part_at(0) == ""


def test_spread_takes_from_every_part() -> None:
    assert MIXED.spread(4) == [0, 1, 3, 5]
    assert MIXED.spread(1) == [0, 3]
    assert MIXED.spread(100) == list(range(8))


def test_some_problems_keep_their_parts() -> None:
    kept = MIXED.only([1, 4, 6], "2")
    assert kept.problems == (PROBLEMS[1], PROBLEMS[4], PROBLEMS[6])
    assert [(part.name, part.count) for part in kept.parts] == [("sorts", 1), ("sums", 2)]
    assert [part.name for part in MIXED.only([5], "2").parts] == ["sums"]


def test_writer_ends_parts(tmp_path: Path) -> None:
    with DocumentWriter(tmp_path / "mixed", "mixed", "1") as writer:
        for number, problem in enumerate(PROBLEMS, start=1):
            writer.add(problem.problem_id, problem.to_bytes())
            for part, end in zip(PARTS, (3, 8), strict=True):
                if number == end:
                    writer.end_part(part.name, part.version)
        assert writer.finish() == MIXED.hash()
    assert TaskSet.open(tmp_path / "mixed") == MIXED


def test_recipe_of_the_same_parts_fits() -> None:
    MIXED.require_parts(recipe_of("sums", "sorts"))
    TaskSet.of("x", "1", PROBLEMS).require_parts(recipe_of(wanted=8))


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (recipe_of(), "no weight for part 'sorts' of 'mixed'"),
        (recipe_of("sums"), "no weight for part 'sorts' of 'mixed'"),
        (recipe_of("sorts", "sums", "code"), "has no part 'code'"),
        (recipe_of("sorts", "sums", wanted=4), "part 'sorts' of the task set has 3 problems, a su"),
    ],
)
def test_recipe_of_other_parts_is_refused(recipe: Recipe, reason: str) -> None:
    with pytest.raises(TaskError, match=reason) as caught:
        MIXED.require_parts(recipe)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([("a", "1", 8), ("a", "1", 0)], "part 'a' has no problems"),
        ([("a", "1", 4), ("a", "1", 4)], "part 'a' comes 2 times"),
        ([("a", "1", 4), ("b", "1", 5)], "do not add up to 8"),
        ([("A b", "1", 8)], "cannot be a part's name"),
        ([("a", "", 8)], "1 to 128 characters"),
        ([(f"p{n}", "1", 1) for n in range(17)], "17 parts are too many"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts: list[tuple[str, str, int]], reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        TaskSet.of("mixed", "1", PROBLEMS, [SetPart(*part) for part in parts])


def header(**changes: Any) -> bytes:
    value = json.loads(MIXED.to_bytes().splitlines()[0]) | changes
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (header(schema_version=1), "has the fields count, name, schema_version, version"),
        (header(schema_version=3), "unknown schema version of a task set: 3"),
        (header(parts=[]), "a list that is not empty"),
        (header(parts={}), "a list that is not empty"),
        (header(parts=[{"name": "a", "count": 8}]), "has count, name and version"),
        (header(parts=[{"name": "a", "count": True, "version": "1"}]), "its count an integer"),
    ],
)
def test_header_that_nobody_writes_is_refused(line: bytes, reason: str) -> None:
    with pytest.raises(EncodingError, match=reason):
        Header.from_bytes(line)
