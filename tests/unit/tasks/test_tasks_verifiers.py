"""Verifiers: three states, never an exception, plug-ins by entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.protocol.errors import TaskError
from muster.tasks import Graded, Problem, Undecided, check_task_set, verifiers, verify
from muster.tasks.sort_digits import make_task_set

GOLD = Problem(problem_id="a", task_type="exact_match", prompt="2+2=", gold_standard_solution="4")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Problem]:
    """Install a verifier as task type `plugin` and return a problem of that type."""

    def install_one(verifier: Any) -> Problem:
        known = {"exact_match": verifiers.grade_exact_match, "plugin": verifier}
        monkeypatch.setattr(verifiers, "_verifiers", lambda: known)
        return GOLD.model_copy(update={"task_type": "plugin"})

    return install_one


@pytest.mark.parametrize(
    ("answer", "score"),
    [("4", 1.0), (" 4\n", 1.0), ("5", 0.0), ("", 0.0), ("44", 0.0), ("４", 0.0), ("4.0", 0.0)],
)
def test_exact_match_grades(answer: str, score: float) -> None:
    assert verify(GOLD, answer) == Graded(score)


@given(st.text())
def test_exact_match_scores_whatever_the_text(completion: str) -> None:
    assert verify(GOLD, completion) == Graded(1.0 if completion.strip() == "4" else 0.0)


@given(st.text(alphabet=st.characters(codec=None), max_size=50))
def test_verifier_survives_lone_surrogates(completion: str) -> None:
    assert isinstance(verify(GOLD, completion), Graded)


def test_exact_match_is_undecided_without_gold() -> None:
    problem = GOLD.model_copy(update={"gold_standard_solution": None})
    assert isinstance(verify(problem, "4"), Undecided)


def test_unknown_task_type_is_undecided() -> None:
    grade = verify(GOLD.model_copy(update={"task_type": "nobody's"}), "4")
    assert isinstance(grade, Undecided)
    assert "nobody's" in grade.reason


@pytest.mark.parametrize(
    "answer", [None, 1.0, Graded(1.5), Graded(-0.1), Graded(float("nan")), Graded("1")]
)
def test_misbehaving_verifier_is_undecided(
    install: Callable[[Any], Problem], answer: object
) -> None:
    problem = install(lambda _problem, _completion: answer)
    assert isinstance(verify(problem, "4"), Undecided)


@pytest.mark.parametrize("error", [ValueError("x"), RecursionError(), MemoryError(), KeyError(1)])
def test_raising_verifier_is_undecided(install: Callable[[Any], Problem], error: Exception) -> None:
    def grade(_problem: Problem, _completion: str) -> Graded:
        raise error

    assert verify(install(grade), "4") == Undecided(f"the verifier raised {type(error).__name__}")


def test_entry_point_adds_a_verifier() -> None:
    point = EntryPoint("mine", "muster.tasks.exact_match:grade_exact_match", "muster.verifiers")
    assert verifiers.load_verifiers([point])["mine"] is verifiers.grade_exact_match


def test_second_verifier_of_a_task_type_is_refused() -> None:
    point = EntryPoint("exact_match", "json:loads", "muster.verifiers")
    with pytest.raises(TaskError, match="two verifiers claim task type 'exact_match'"):
        verifiers.load_verifiers([point])


@pytest.mark.parametrize("target", ["no_such_package:grade", "json:no_such_name"])
def test_verifier_that_cannot_be_loaded_is_named(target: str) -> None:
    with pytest.raises(TaskError, match="cannot load the verifier"):
        verifiers.load_verifiers([EntryPoint("mine", target, "muster.verifiers")])


def test_sort_digits_passes_the_admission_check() -> None:
    check_task_set(make_task_set(50, seed=1))


def test_problem_without_verifier_is_not_admitted() -> None:
    with pytest.raises(TaskError, match="no verifier for task type 'other'") as caught:
        check_task_set([GOLD.model_copy(update={"task_type": "other"})])
    assert "exact_match" in (caught.value.hint or "")


def test_problem_whose_gold_fails_is_not_admitted(install: Callable[[Any], Problem]) -> None:
    problem = install(lambda _problem, _completion: Graded(0.0))
    with pytest.raises(TaskError, match="its gold standard must be"):
        check_task_set([problem])


def test_problem_that_rewards_junk_is_not_admitted(install: Callable[[Any], Problem]) -> None:
    problem = install(lambda _problem, _completion: Graded(1.0))
    with pytest.raises(TaskError, match="junk must be"):
        check_task_set([problem])
