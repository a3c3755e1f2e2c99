"""The lesson's exercises: a right solution is graded 1 by the run's verifiers, a wrong one 0."""

import json
import random
from itertools import islice
from pathlib import Path

import pytest
from benchmarks.reasoning.exercises import Exercise, draw_code, draw_math, short_words
from benchmarks.reasoning.model import END, THOUGHT, train_tokenizer
from benchmarks.reasoning.texts import PARTS, Split, split_exercises, task_set, write_texts

from muster.tasks import Graded, verify_all
from muster.tasks.sandbox import shared_sandbox

OF_EACH = 24


def graded(exercises: list[Exercise], *, is_right: bool) -> list[float]:
    rng = random.Random(0)
    answers = [each.completion(rng, is_right=is_right).split(THOUGHT)[1] for each in exercises]
    problems = [each.problem for each in exercises]
    grades = list(verify_all(list(zip(problems, answers, strict=True))))
    return [grade.score for grade in grades if isinstance(grade, Graded)]


def require_right_from_wrong(exercises: list[Exercise]) -> None:
    assert graded(exercises, is_right=True) == [1.0] * len(exercises)
    assert graded(exercises, is_right=False) == [0.0] * len(exercises)


def test_sums_differences_and_comparisons_are_solved_right_or_wrong() -> None:
    rng = random.Random(1)
    require_right_from_wrong([draw_math(rng) for _ in range(3 * OF_EACH)])


@pytest.mark.skipif(shared_sandbox().sandbox is None, reason=shared_sandbox().description)
def test_functions_are_written_right_or_wrong() -> None:
    rng = random.Random(1)
    require_right_from_wrong([draw_code(rng) for _ in range(OF_EACH)])


def test_words_are_spelled_right_or_wrong() -> None:
    words = list(islice(short_words(20 * OF_EACH, 1), OF_EACH))
    assert len(words) == OF_EACH
    require_right_from_wrong(words)


@pytest.fixture(scope="module")
def split() -> Split:
    return split_exercises(20, 8, 6, seed=3)


def prompts(*groups: object) -> list[str]:
    found = [group[part] for group in groups for part in PARTS]  # type: ignore[index]
    return [exercise.problem.prompt for exercises in found for exercise in exercises]


def test_no_problem_is_read_practised_and_held_out(split: Split) -> None:
    found = prompts(split.read, split.practised, split.held_out)
    assert len(set(found)) == len(found) == 3 * (20 + 8 + 6)


def test_a_task_set_has_three_parts(split: Split) -> None:
    made = task_set("held out", split.held_out)
    assert [(part.name, part.count) for part in made.parts] == [(part, 6) for part in PARTS]


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_texts_are_as_right_as_is_said(split: Split, tmp_path: Path, right: float) -> None:
    write_texts(tmp_path / "texts.jsonl", split.read, 40, right, seed=0)
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    problems = {e.problem.problem_id: e.problem for part in PARTS for e in split.read[part]}
    asked = [(problems[r["problem_id"]], r["completion"].split(THOUGHT)[1]) for r in rows]
    decided = [(p, answer) for p, answer in asked if p.task_type != "verifiable_code"]
    scores = [g.score for g in verify_all(decided) if isinstance(g, Graded)]
    assert scores == [right] * len(decided)


def test_a_tokenizer_reads_what_it_wrote_digit_by_digit() -> None:
    tokenizer = train_tokenizer(["Calculate 12+34.", "the sum of x and 7"] * 9, 300)
    text = f"12+34=46\n{THOUGHT}\n\n\\boxed{{46}}"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    assert tokens.count(tokenizer.convert_tokens_to_ids(THOUGHT)) == 1
    assert tokenizer.eos_token == END
