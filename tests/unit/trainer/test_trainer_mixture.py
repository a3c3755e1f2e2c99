"""Creating a run of several task sets: fitting parts, and refusals with their reasons."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from muster.protocol.errors import ConfigError, TaskError
from muster.tasks import Problem, TaskSet, check_task_set
from muster.tasks.admission import Trial, admit
from muster.tasks.reasoning_gym import make_problems
from muster.tasks.sandbox import shared_sandbox
from muster.tasks.task_set import pack_sets
from muster.trainer.config import load_recipe

EXAMPLE = Path(__file__).parents[3] / "configs" / "example-mixture.toml"


def problems(task_type: str, texts: Iterable[tuple[str, str, dict[str, Any]]]) -> list[Problem]:
    return [
        Problem(
            problem_id=f"{task_type}-{n}",
            task_type=task_type,
            prompt=prompt,
            gold_standard_solution=gold,
            verification_info=info,
        )
        for n, (prompt, gold, info) in enumerate(texts)
    ]


def programs() -> list[Problem]:
    def tests(n: int) -> list[dict[str, str]]:
        values = ((x, x + n) for x in (3, 11))
        kind = {"type": "stdin_stdout"}
        return [{**kind, "input": f"{x}\n", "output": f"{y}\n"} for x, y in values]

    def program(n: int) -> str:
        return f"print(int(input()) + {n})"

    found = ((f"Add {n}.", program(n), {"test_cases": tests(n)}) for n in range(16))
    return problems("verifiable_code", found)


def mixed(folder: Path, **sets: list[Problem]) -> TaskSet:
    named = [(part, TaskSet.of(part, "1", found)) for part, found in sets.items()]
    return pack_sets(named, folder / "mixed.jsonl", "mixed", "1")


def sums(count: int = 16) -> list[Problem]:
    return problems("verifiable_math", ((f"{n} + 1?", str(n + 1), {}) for n in range(count)))


def test_example_mixes_mathematics_programs_and_a_family(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    if shared_sandbox().sandbox is None:
        pytest.skip(shared_sandbox().description)
    recipe = load_recipe(EXAMPLE)
    family = list(make_problems("chain_sum", 16, 0))
    tasks = mixed(tmp_path, math=sums(), code=programs(), sums=family)
    tasks.require_parts(recipe)
    check_task_set(tasks.some(3))
    assert len({problem.task_type for problem in tasks.some(3)}) == 3


def test_examples_curriculum_makes_room_for_programs() -> None:
    tasks = load_recipe(EXAMPLE).tasks
    assert [tasks.weights_at(step) for step in (1, 100, 200, 400)] == [
        (4, 1, 5), (4, 3, 4), (4, 5, 1), (4, 5, 1),
    ]  # fmt: skip


def test_part_whose_verifier_is_missing_is_named(tmp_path: Path) -> None:
    tasks = mixed(tmp_path, math=sums(2), poems=problems("poetry", [("A line.", "Gold", {})]))
    found = admit(tasks, Trial(sample=1, hacked=0))
    assert "no verifier for task type 'poetry' is installed, of part 'poems'" in found.summary()


def test_part_smaller_than_a_submission_is_refused(tmp_path: Path) -> None:
    tasks = mixed(tmp_path, math=sums(), code=programs()[:15], sums=problems("m", [("?", "1", {})]))
    with pytest.raises(TaskError, match="part 'code' of the task set has 15 problems") as caught:
        tasks.require_parts(load_recipe(EXAMPLE))
    assert caught.value.hint == "lower sampling.problems_per_submission, or add problems"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("weight = 4\n", "weight = -4\n", "tasks.parts.0.weight: Input should be greater"),
        (
            "weight = 4\n",
            "weight = 18446744073709551616\n",
            "tasks.parts.0.weight: Input should be l",
        ),
        ('"code"', '"math"', "part 'math' comes 2 times"),
        ("weight = 5 }]", "weight = 0 }]", "part 'code' has weight 0 at every step"),
        (
            "weight = 5 }, { step = 200, weight = 1 }",
            "weight = 5 }, { step = 9, weight = 1 }",
            None,
        ),
    ],
)
def test_recipe_is_refused_for_what_it_says(
    tmp_path: Path, old: str, new: str, reason: str | None
) -> None:
    text = EXAMPLE.read_text().replace("{ step = 1, weight = 1 }", "{ step = 1, weight = 0 }")
    assert old in text
    (tmp_path / "recipe.toml").write_text(text.replace(old, new))
    if reason is None:
        assert load_recipe(tmp_path / "recipe.toml").tasks.weights_at(9) == (4, 1, 1)
        return
    with pytest.raises(ConfigError, match=reason):
        load_recipe(tmp_path / "recipe.toml")


def test_fewer_steps_may_starve_a_part_and_say_so(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace("{ step = 1, weight = 1 }", "{ step = 100, weight = 0 }")
    (tmp_path / "recipe.toml").write_text(text)
    assert load_recipe(tmp_path / "recipe.toml", steps=101).tasks.weights_at(101)[1] == 1
    with pytest.raises(ConfigError, match="part 'code' has weight 0 at every step of the run"):
        load_recipe(tmp_path / "recipe.toml", steps=100)
