"""The demo's task sets, and the text of a prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.protocol.errors import TaskError
from muster.tasks import Graded, Problem, render_prompt, verify
from muster.tasks.sort_digits import make_split, make_task_set


def test_task_set_is_the_same_for_the_same_seed() -> None:
    # A change of this hash changes every run made of the task set.
    expected = "1c71a59fc09c2b38c862671115de2b23fd6b7c14838b94286ab5050f37b68775"
    assert make_task_set(100, seed=7).hash().hex() == expected
    assert make_task_set(100, seed=8).hash() != make_task_set(100, seed=7).hash()


@given(st.integers(0, 2**32), st.integers(2, 4))
def test_problems_are_sorted_by_their_gold(seed: int, digits: int) -> None:
    for problem in make_task_set(10, seed, digits=digits):
        text = problem.prompt.removesuffix("=")
        assert len(text) == digits
        assert problem.gold_standard_solution == "".join(sorted(text))
        assert verify(problem, "".join(sorted(text))) == Graded(1.0)
        assert problem.prompt == f"{text}="


@given(st.integers(0, 2**32))
def test_held_out_problems_are_disjoint_and_different(seed: int) -> None:
    training, held_out = make_split(60, 40, seed, digits=2)
    prompts = {problem.prompt for problem in training} | {problem.prompt for problem in held_out}
    assert len(prompts) == 100


def test_more_problems_than_inputs_are_refused() -> None:
    with pytest.raises(TaskError, match="only 40 inputs"):
        make_split(60, 41, 0, digits=2)


def test_prompt_is_unchanged_without_a_target_length() -> None:
    assert render_prompt(_problem("3172="), -1) == "3172="


def test_prompt_asks_for_the_target_length() -> None:
    assert render_prompt(_problem("Why?"), 2000) == (
        "Why?\n\nThink for 2000 tokens before giving a response."
    )


def _problem(prompt: str) -> Problem:
    return Problem(problem_id="a", task_type="exact_match", prompt=prompt)
