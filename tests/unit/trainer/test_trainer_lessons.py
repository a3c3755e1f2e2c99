"""Demonstrations for tiny models: right as often as planned, independent of the budget."""

import json
import random
from itertools import groupby
from pathlib import Path
from statistics import fmean

import pytest
import torch

from muster.protocol.errors import ConfigError, TaskError
from muster.tasks import Graded, verify
from muster.tasks.code import LANGUAGES
from muster.tasks.completions import last_block
from muster.tasks.problem import Problem
from muster.tasks.python_tool import AFTER, BEFORE
from muster.trainer.base_model import (
    BUDGETS,
    EOS,
    LESSONS,
    Demonstration,
    Lesson,
    WarmStart,
    _Teacher,
    lesson_of,
    make_tokenizer,
)
from muster.trainer.config import load_recipe

ROOT = Path(__file__).parents[3]
LENGTH = LESSONS["length"]


def shown(count: int = 2000) -> list[tuple[int, str, str]]:
    """Return budget, digits and completion of demonstrations."""
    rng = random.Random(0)
    found = []
    for _ in range(count):
        one = LENGTH.demonstrate(rng, 0.35)
        digits, _, request = one.prompt.partition("=")
        ((completion, is_taught),) = one.parts
        assert is_taught
        found.append((int("".join(filter(str.isdigit, request))), digits, completion))
    return found


def test_thoughts_have_nothing_to_do_with_the_budget() -> None:
    drawn = sorted((budget, len(text)) for budget, _, text in shown())
    means = {b: fmean(n for _, n in rows) for b, rows in groupby(drawn, lambda row: row[0])}
    assert set(means) == set(BUDGETS)
    assert max(means.values()) - min(means.values()) < 2


def test_answers_after_a_thought_are_right_as_often_as_planned() -> None:
    scores = []
    for _, digits, completion in shown():
        gold = "".join(sorted(digits))
        problem = Problem(
            problem_id="p", task_type="exact_match", prompt="?", gold_standard_solution=gold
        )
        grade = verify(problem, completion)
        assert isinstance(grade, Graded)
        scores.append(grade.score)
    assert 0.32 < fmean(scores) < 0.42


def test_the_request_for_a_length_is_few_tokens() -> None:
    tokenizer = make_tokenizer(LENGTH.pieces)
    one = LENGTH.demonstrate(random.Random(0), 0.35)
    ids = tokenizer.encode(one.prompt, add_special_tokens=False)
    assert tokenizer.unk_token_id not in ids
    assert len(ids) <= len("3172=") + 2 + len("16")


def test_what_is_not_to_be_learned_is_masked() -> None:
    parts = (("12", True), ("34", False), ("5", True))
    lesson = Lesson(tuple("12345="), lambda *_: Demonstration("3=", parts), LENGTH.split)
    tokenizer = make_tokenizer(lesson.pieces)
    tokens, taught = _Teacher(tokenizer, lesson, WarmStart(batch=2), random.Random(0)).batch()
    assert tokenizer.decode(tokens[0]) == f"3=12{EOS}345{EOS}"
    assert tokenizer.decode(tokens[0][taught[0]]) == f"12{EOS}5{EOS}"
    assert torch.equal(tokens[0], tokens[1])


def test_the_calculator_is_shown_to_be_asked_and_copied_now_and_then() -> None:
    lesson, rng = LESSONS["calculator"], random.Random(0)
    tokenizer = make_tokenizer(lesson.pieces)
    right = []
    for _ in range(1000):
        shown = lesson.demonstrate(rng, 0.35)
        for text in (shown.prompt, *(text for text, _ in shown.parts)):
            assert tokenizer.unk_token_id not in tokenizer.encode(text, add_special_tokens=False)
        a, b = map(int, shown.prompt.removesuffix("=").split("*"))
        right.append(shown.parts[-1][0] == str(a * b))
        if len(shown.parts) > 1:
            (call, _), (reply, is_learned), _ = shown.parts
            program = last_block(call, LANGUAGES)
            assert program is not None
            assert reply == f"{BEFORE}{eval(program[6:-2])}{AFTER}"
            assert not is_learned
    assert 0.32 < fmean(right) < 0.42


def test_the_calculator_s_problems_are_new_in_the_held_out_set() -> None:
    training, held_out = LESSONS["calculator"].split(200, 50, 3)
    assert (len(training), len(held_out)) == (200, 50)
    assert not {p.prompt for p in training} & {p.prompt for p in held_out}
    problem = training[0]
    a, b = map(int, problem.prompt.removesuffix("=").split("*"))
    assert problem.gold_standard_solution == str(a * b)
    with pytest.raises(TaskError, match="only 8100 products"):
        LESSONS["calculator"].split(8000, 101, 3)


def test_an_unknown_lesson_is_named() -> None:
    with pytest.raises(ConfigError, match="no lesson is called 'chess'"):
        lesson_of("chess")


def test_the_recipe_asks_for_the_lesson_s_budgets() -> None:
    assert load_recipe(ROOT / "configs" / "example-length.toml").sampling.target_lengths == BUDGETS


@pytest.mark.parametrize("name", ["calculator", "length"])
def test_the_recorded_run_kept_its_promise(name: str) -> None:
    recorded = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    evaluations, metrics = recorded["detail"]["evaluations"], recorded["metrics"]
    first, last = evaluations[0], evaluations[-1]
    steps = load_recipe(ROOT / "configs" / f"example-{name}.toml").training.steps
    assert (first["policy_version"], last["policy_version"]) == (0, steps)
    for end, entry in (("start", first), ("end", last)):
        for figure in entry.keys() & {"reward", "length_error"}:
            assert metrics[f"{figure}_{end}"] == entry[figure]
    assert last["reward"] >= first["reward"] + 0.3
    if name == "length":
        assert last["length_error"] <= 0.5 * first["length_error"]
    assert recorded["detail"]["verdicts"].keys() == {"accepted"}
    assert recorded["detail"]["is_audit_clean"]
    assert (ROOT / "docs" / "images" / f"{name}.svg").exists()
