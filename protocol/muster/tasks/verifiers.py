"""Verifiers by task type: the built-in ones, and those that installed packages announce.

A package adds one with an entry point in the group `muster.verifiers`, named as the task type:

    [project.entry-points."muster.verifiers"]
    my_task = "my_package:grade"

where `grade(problem, completion)` returns a Grade. It must be deterministic: every validator grades
again, and a differing reward is fraud.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from muster.protocol.errors import TaskError
from muster.tasks.exact_match import grade_exact_match
from muster.tasks.grades import Grade, Graded, Undecided
from muster.tasks.problem import Problem

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "muster.verifiers"
"""Where packages announce verifiers."""
JUNK_ANSWER = "\x00zzz not an answer zzz"
"""What no verifier may score above 0."""

Verifier = Callable[[Problem, str], Grade]
"""Grades a completion's text; deterministic, and total over any text."""

_BUILT_IN: Mapping[str, Verifier] = {"exact_match": grade_exact_match}


def verify(problem: Problem, completion: str) -> Grade:
    """Return the grade of a completion; never raises, whatever the text or the verifier does.

    A missing, failing or misbehaving verifier makes it Undecided.
    """
    verifier = _verifiers().get(problem.task_type)
    if verifier is None:
        return Undecided(f"no verifier for task type {problem.task_type!r} is installed")
    try:
        grade = verifier(problem, completion)
    except (
        Exception
    ) as error:  # a third party's code meets a stranger's text: it may raise anything
        logger.warning("verifier raised", extra={"task_type": problem.task_type})
        return Undecided(f"the verifier raised {type(error).__name__}")
    return _checked(grade)


def _checked(grade: Grade) -> Grade:
    if isinstance(grade, Undecided):
        return grade
    if not isinstance(grade, Graded):
        return Undecided(f"the verifier returned a {type(grade).__name__}")
    score = grade.score
    is_number = isinstance(score, (int, float)) and math.isfinite(score)
    if not is_number or not 0 <= score <= 1:
        return Undecided(f"the verifier's score is outside [0, 1]: {score!r}")
    return grade


def check_task_set(problems: Iterable[Problem]) -> None:
    """Raise TaskError unless every problem can be graded here.

    Its verifier is installed, scores the gold standard (where there is one) 1 and junk 0.
    """
    for problem in problems:
        if problem.task_type not in _verifiers():
            raise TaskError(
                f"problem {problem.problem_id!r}: no verifier for task type {problem.task_type!r}",
                hint="install the package that brings it; installed: "
                + ", ".join(sorted(_verifiers())),
            )
        gold = problem.gold_standard_solution
        if gold is not None:
            _require(problem, "its gold standard", gold, Graded(1.0))
        _require(problem, "junk", JUNK_ANSWER, Graded(0.0))


def _require(problem: Problem, what: str, answer: str, expected: Graded) -> None:
    grade = verify(problem, answer)
    if grade != expected:
        raise TaskError(f"problem {problem.problem_id!r}: {what} must be {expected}, is {grade}")


@cache
def _verifiers() -> Mapping[str, Verifier]:
    return load_verifiers(entry_points(group=ENTRY_POINT_GROUP))


def load_verifiers(points: Iterable[EntryPoint]) -> dict[str, Verifier]:
    """Return the built-in verifiers and those of the entry points, by task type.

    Raises TaskError when two claim one task type, or one cannot be imported.
    """
    found = dict(_BUILT_IN)
    for point in points:
        if point.name in found:
            raise TaskError(
                f"two verifiers claim task type {point.name!r}, one is {point.value}",
                hint="uninstall one of the packages",
            )
        try:
            found[point.name] = point.load()
        except (ImportError, AttributeError) as error:
            raise TaskError(f"cannot load the verifier {point.value}: {error}") from error
    return found
