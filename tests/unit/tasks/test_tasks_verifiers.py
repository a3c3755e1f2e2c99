"""Verifiers: three states, never an exception, plug-ins by entry point."""

import errno
import re
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
from hypothesis import given, strategies as st

from muster.protocol.errors import TaskError
from muster.protocol.recipe import VerifierIdentity
from muster.tasks import (
    Graded,
    Problem,
    Undecided,
    Verifier,
    check_task_set,
    exact_match,
    identities,
    registry,
    require_pinned,
    sandbox,
    verifier,
    verify,
    verify_all,
)
from muster.tasks.given_up import GIVEN_UP
from muster.tasks.toys import make_sort
from muster.tasks.verifier import python_here, source_files

GOLD = Problem(problem_id="a", task_type="exact_match", prompt="2+2=", gold_standard_solution="4")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Problem]:
    """Install a verifier as task type `plugin` and return a problem of that type."""

    def install_one(verifier: Any) -> Problem:
        plugin = Verifier("plugin", "1", verifier, sources=("json",))
        known = {"exact_match": exact_match.VERIFIER, "plugin": plugin}
        monkeypatch.setattr(registry, "installed_verifiers", lambda: known)
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


@pytest.mark.parametrize(
    ("error", "is_disturbance"),
    [
        (MemoryError(), True),
        (OSError(errno.EAGAIN, "fork"), True),
        (OSError(errno.ENOSPC, "disk"), True),
        (OSError(errno.EMFILE, "files"), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("x"), False),
        (OSError(errno.ENOENT, "file"), False),
        (OSError(errno.ENAMETOOLONG, "file"), False),
        (RecursionError(), False),
        (ValueError("x"), False),
    ],
    ids=repr,
)
def test_want_of_memory_processes_or_disk_is_the_machines(
    install: Callable[[Any], Problem], error: Exception, is_disturbance: bool
) -> None:
    def grade(_problem: Problem, _completion: str) -> Graded:
        raise error

    found = verify(install(grade), "4")
    assert isinstance(found, Undecided)
    assert found.is_disturbance is is_disturbance


def test_entry_point_adds_a_verifier() -> None:
    point = EntryPoint("mine", "muster.tasks.exact_match:grade_exact_match", "muster.verifiers")
    verifier = registry.load_verifiers([point])["mine"]
    assert verifier.grade is exact_match.grade_exact_match
    assert (verifier.name, verifier.sources) == ("mine", ("muster",))


def test_second_verifier_of_a_task_type_is_refused() -> None:
    point = EntryPoint("exact_match", "json:loads", "muster.verifiers")
    with pytest.raises(TaskError, match="two verifiers claim task type 'exact_match'"):
        registry.load_verifiers([point])


def test_entry_point_may_be_a_verifier() -> None:
    point = EntryPoint("mine", "muster.tasks.exact_match:VERIFIER", "muster.verifiers")
    assert registry.load_verifiers([point])["mine"] is exact_match.VERIFIER


def test_entry_point_of_neither_kind_is_refused() -> None:
    with pytest.raises(TaskError, match="neither a Verifier nor a function"):
        registry.load_verifiers([EntryPoint("mine", "json:__name__", "muster.verifiers")])


@pytest.mark.parametrize("target", ["no_such_package:grade", "json:no_such_name"])
def test_verifier_that_cannot_be_loaded_is_named(target: str) -> None:
    with pytest.raises(TaskError, match="cannot load the verifier"):
        registry.load_verifiers([EntryPoint("mine", target, "muster.verifiers")])


def test_sort_digits_passes_the_admission_check() -> None:
    check_task_set(make_sort(50, seed=1))


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


def test_problem_that_its_verifier_finds_malformed_is_not_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_problem: Problem) -> None:
        raise TaskError("no tests")

    picky = replace(exact_match.VERIFIER, check=refuse)
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": picky})
    with pytest.raises(TaskError, match="no tests"):
        check_task_set([GOLD])


def test_grades_that_cannot_be_replayed_need_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = replace(exact_match.VERIFIER, is_replayable=False)
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": judge})
    with pytest.raises(TaskError, match="cannot be replayed") as caught:
        check_task_set([GOLD])
    assert "allows_judge" in (caught.value.hint or "")
    check_task_set([GOLD], allows_judge=True)


def test_pinned_verifiers_are_those_installed() -> None:
    (identity,) = identities(["exact_match", "exact_match"])
    assert (identity.task_type, identity.name, identity.version) == ("exact_match",) * 2 + ("2",)
    require_pinned([identity])


@pytest.mark.parametrize(
    "change", [{"name": "other"}, {"version": "0"}, {"code_hash": "0x" + "0" * 64}]
)
def test_another_verifier_than_the_pinned_one_is_refused(change: dict[str, str]) -> None:
    (identity,) = identities(["exact_match"])
    with pytest.raises(TaskError, match="the run grades 'exact_match' by "):
        require_pinned([identity.model_copy(update=change)])


@pytest.mark.parametrize(
    ("task_type", "says"),
    [
        ("exact_match", "^2$"),
        (
            "exact_match_with_python",
            rf"^2 \({re.escape(python_here())}, (programs: python 3\.\d+|no sandbox)\)$",
        ),
        ("verifiable_code", r"^3 \((programs: python 3\.\d+|no sandbox)\)$"),
        ("code_output_prediction", rf"^2 \({re.escape(python_here())}\)$"),
        ("verifiable_math", rf"^2 \({re.escape(python_here())}\)$"),
        ("verifiable_math_with_python", rf"^2 \({re.escape(python_here())}, (programs|no sand)"),
        ("reasoning_gym", rf"^2 \({re.escape(python_here())}\)$"),
    ],
)
def test_identity_names_the_python_that_grades_depend_on(task_type: str, says: str) -> None:
    assert re.search(says, identities([task_type])[0].version)


def test_another_python_is_refused_with_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = identities(["verifiable_math"])
    require_pinned(pinned)
    other = replace(registry.verifier_of("verifiable_math"), machine=lambda: "CPython 3.99")
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"verifiable_math": other})
    with pytest.raises(TaskError) as caught:
        require_pinned(pinned)
    assert python_here() in str(caught.value)
    assert "(CPython 3.99)" in str(caught.value)


@pytest.mark.parametrize(
    ("task_type", "library"),
    [("verifiable_math", "mpmath"), ("verifiable_math", "sympy"), ("reasoning_gym", "magiccube")],
)
def test_another_library_is_refused_and_the_hint_lists_those_installed(
    monkeypatch: pytest.MonkeyPatch, task_type: str, library: str
) -> None:
    pinned = identities([task_type])
    known = replace(registry.verifier_of(task_type))  # its hash is not computed yet
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {task_type: known})
    installed = verifier.version
    monkeypatch.setattr(verifier, "version", lambda n: "9.9" if n == library else installed(n))
    with pytest.raises(TaskError, match=f"the run grades '{task_type}' by ") as caught:
        require_pinned(pinned)
    assert f"{library}==9.9" in (caught.value.hint or "")


def test_pinned_verifier_that_is_not_installed_is_refused() -> None:
    foreign = VerifierIdentity(task_type="other", name="x", version="1", code_hash="0x" + "0" * 64)
    with pytest.raises(TaskError, match="no verifier for task type 'other'"):
        require_pinned([foreign])


def test_code_hash_covers_every_file_versions_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "hashed_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def code_hash(**changes: Any) -> str:
        first = Verifier("v", "1", exact_match.grade_exact_match, sources=("hashed_package",))
        return replace(first, **changes).code_hash

    before = code_hash()
    assert code_hash() == before
    assert code_hash(requires=("pydantic",)) != before
    assert code_hash(requires=("no-such-distribution",)) not in {
        before,
        code_hash(requires=("pydantic",)),
    }
    assert code_hash(machine=lambda: "python 3.99") != before
    assert code_hash(machine=str) != before
    (package / "inner.py").write_text("x = 2\n")
    assert code_hash() != before


@pytest.mark.parametrize("task_type", ["verifiable_code", "verifiable_math_with_python"])
@pytest.mark.parametrize("name", ["command.py", "per_run.py", "runner.py"])
def test_what_a_sandboxed_program_meets_is_hashed(task_type: str, name: str) -> None:
    """PATH, LANG and the size of /tmp, set in the command line, affect scores."""
    verifier = registry.verifier_of(task_type)
    said = verifier.dialogue.sources if verifier.dialogue else ()
    hashed = [data for source in (*verifier.sources, *said) for data in source_files(source)]
    assert Path(sandbox.__file__).with_name(name).read_bytes() in hashed


@pytest.mark.parametrize("module", ["no_such_module", "sys"])
def test_sources_that_cannot_be_hashed_are_named(module: str) -> None:
    with pytest.raises(TaskError, match=module):
        _ = Verifier("v", "1", exact_match.grade_exact_match, sources=(module,)).code_hash


@given(st.lists(st.sampled_from(["4", "5", ""]), max_size=8))
def test_many_answers_are_graded_in_their_order(answers: list[str]) -> None:
    expected = [Graded(1.0 if answer == "4" else 0.0) for answer in answers]
    assert verify_all([(GOLD, answer) for answer in answers]) == expected


@pytest.mark.parametrize("parallel", [1, 2])
def test_answers_are_graded_until_the_work_is_given_up(
    monkeypatch: pytest.MonkeyPatch, parallel: int
) -> None:
    work, graded = Event(), list[str]()

    def grade(_problem: Problem, completion: str) -> Graded:
        graded.append(completion)
        if completion == "5":
            work.set()
        elif int(completion) > 5:
            work.wait()
        return Graded(0.0)

    plugin = Verifier("plugin", "1", grade, sources=("json",), parallel=parallel)
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": plugin})
    context = copy_context()
    context.run(GIVEN_UP.set, work)
    answers = [(GOLD, str(number)) for number in range(40)]
    grades = context.run(verify_all, answers)
    assert grades[:6] == [Graded(0.0)] * 6
    assert grades[-1] == Undecided("the work was given up")
    assert len(graded) <= 5 + parallel
    assert verify_all(answers) == [Graded(0.0)] * 40


def test_answers_graded_at_the_same_time_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Barrier(2, timeout=30)

    def grade(_problem: Problem, completion: str) -> Graded:
        meeting.wait()
        return Graded(float(completion))

    pair = Verifier("pair", "1", grade, sources=("json",), parallel=2)
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": pair})
    assert verify_all([(GOLD, "0"), (GOLD, "1")]) == [Graded(0.0), Graded(1.0)]
