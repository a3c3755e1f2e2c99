"""Grading, by the verifier of a problem's task type, and the admission of problems."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from muster.protocol.errors import TaskError
from muster.tasks import registry
from muster.tasks.grades import Grade, Graded, Undecided
from muster.tasks.problem import Problem
from muster.tasks.verifier import Verifier

logger = logging.getLogger(__name__)

JUNK_ANSWER = "\x00zzz not an answer zzz"
"""What no verifier may score above 0."""


def verify(problem: Problem, completion: str) -> Grade:
    """Return the grade of a completion; never raises, whatever the text or the verifier does.

    A missing, failing or misbehaving verifier makes it Undecided.
    """
    verifier = registry.installed_verifiers().get(problem.task_type)
    if verifier is None:
        return Undecided(f"no verifier for task type {problem.task_type!r} is installed")
    return _grade(verifier, problem, completion)


def verify_all(answers: Sequence[tuple[Problem, str]]) -> list[Grade]:
    """Return the grades of completions in their order, as `verify` does, some at the same time.

    Blocks; callers with an event loop use a thread.
    """
    known = registry.installed_verifiers()
    used = {problem.task_type for problem, _ in answers} & known.keys()
    parallel = max((known[task_type].parallel for task_type in used), default=1)
    if parallel == 1 or len(answers) < 2:
        return [verify(problem, completion) for problem, completion in answers]
    with ThreadPoolExecutor(parallel, thread_name_prefix="grading") as executor:
        return list(executor.map(lambda answer: verify(*answer), answers))


def _grade(verifier: Verifier, problem: Problem, completion: str) -> Grade:
    try:
        grade = verifier.grade(problem, completion)
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


def check_task_set(problems: Iterable[Problem], *, allows_judge: bool = False) -> None:
    """Raise TaskError unless every problem can be graded here.

    Its verifier is installed and finds it well formed, scores the gold standard (where there is
    one) 1 and junk 0, and grades alike every time, unless the run allows one that does not.
    """
    for problem in problems:
        verifier = registry.verifier_of(problem.task_type)
        if not (verifier.is_replayable or allows_judge):
            raise TaskError(
                f"grades of task type {problem.task_type!r} cannot be replayed by validators",
                hint="a recipe with `allows_judge = true` takes it; see docs/tasks.md",
            )
        verifier.check(problem)
        right = verifier.right_completion(problem)
        if right is not None:
            _require(problem, "its gold standard", right, Graded(1.0))
        _require(problem, "junk", JUNK_ANSWER, Graded(0.0))


def _require(problem: Problem, what: str, answer: str, expected: Graded) -> None:
    grade = verify(problem, answer)
    if grade != expected:
        raise TaskError(f"problem {problem.problem_id!r}: {what} must be {expected}, is {grade}")
