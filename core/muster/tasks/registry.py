"""Verifiers by task type and task sets by name, built in or from packages; and grading.

Those built in are `_BUILT_IN` and `_TOYS`. A package adds a verifier with an entry point in the
group `muster.verifiers`, named as the task type, and a task set with one in `muster.task_sets`:

    [project.entry-points."muster.verifiers"]
    my_task = "my_package:VERIFIER"

    [project.entry-points."muster.task_sets"]
    my_set = "my_package:make_task_set"

The first is a `Verifier`, or a plain function `grade(problem, completion)`, which gets the task
type's name and the package's version; all source of its top-level package is hashed. The second is
a function of (count, seed) that returns a `TaskSet`, the same for the same arguments.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any

from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import TaskError
from muster.protocol.recipe import VerifierIdentity
from muster.tasks import code, exact_match, judge, output_prediction, reasoning_gym, toys
from muster.tasks.given_up import REASON, is_given_up
from muster.tasks.math.verifier import VERIFIER as MATH
from muster.tasks.problem import Problem
from muster.tasks.python_tool import with_python
from muster.tasks.task_set import TaskSet
from muster.tasks.verifier import (
    Environment,
    Grade,
    Graded,
    Undecided,
    Verifier,
    in_threads,
    source_files,
    undecided_by,
)

logger = logging.getLogger(__name__)

VERIFIERS_GROUP = "muster.verifiers"
"""Entry point group of verifiers."""
TASK_SETS_GROUP = "muster.task_sets"
"""Entry point group of task sets."""
JUNK_ANSWER = "\x00zzz not an answer zzz"
"""An answer that every verifier must score 0."""

_BUILT_IN: Mapping[str, Verifier] = {
    "code_output_prediction": output_prediction.VERIFIER,
    "exact_match": exact_match.VERIFIER,
    "exact_match_with_python": with_python(exact_match.VERIFIER),
    "llm_judgeable": judge.WITHOUT_GOLD,
    "llm_judgeable_groundtruth_similarity": judge.VERIFIER,
    reasoning_gym.TASK_TYPE: reasoning_gym.VERIFIER,
    "verifiable_code": code.VERIFIER,
    "verifiable_math": MATH,
    "verifiable_math_with_python": with_python(MATH),
}
_TOYS = {"arithmetic": toys.make_arithmetic, "reverse": toys.make_reverse, "sort": toys.make_sort}


# ----------------------------------------------------------------------------------- verifiers


@cache
def installed_verifiers() -> Mapping[str, Verifier]:
    """Return the verifiers of this installation, by task type."""
    return load_verifiers(entry_points(group=VERIFIERS_GROUP))


def verifier_of(task_type: str) -> Verifier:
    """Return a task type's verifier; raises TaskError when none is installed."""
    known = installed_verifiers()
    if task_type not in known:
        raise TaskError(
            f"no verifier for task type {task_type!r}",
            hint="install the package that brings it; installed: " + ", ".join(sorted(known)),
        )
    return known[task_type]


def dialogue_of(task_type: str) -> Environment | None:
    """Return the environment of a task type; None if completions are a single turn."""
    verifier = installed_verifiers().get(task_type)
    return verifier.dialogue if verifier else None


def runs_completions(task_type: str) -> bool:
    """Return whether the verifier or the environment of a task type executes completions."""
    verifier = installed_verifiers().get(task_type)
    return verifier is not None and (verifier.runs_programs or verifier.dialogue is not None)


def identities(task_types: Iterable[str]) -> tuple[VerifierIdentity, ...]:
    """Return the identities of the verifiers of these task types, for a recipe to pin.

    Raises TaskError when one is not installed.
    """
    return tuple(verifier_of(name).identity(name) for name in sorted(set(task_types)))


def require_pinned(pinned: Iterable[VerifierIdentity]) -> None:
    """Raise TaskError when a verifier installed here is not the one that a recipe pins."""
    for wanted in pinned:
        verifier = verifier_of(wanted.task_type)
        found = verifier.identity(wanted.task_type)
        if found != wanted:
            versions = ", ".join(verifier.stated)
            raise TaskError(
                f"the run grades {wanted.task_type!r} by {_name(wanted)}, here is {_name(found)}",
                hint="install the release of Muster, the Python and the libraries of the run's "
                "owner: other rewards are rejected, or fraud"
                + (f". Here are {versions}" if versions else ""),
            )


def _name(identity: VerifierIdentity) -> str:
    return f"{identity.name} {identity.version} with code {identity.code_hash[:18]}…"


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
        found[point.name] = _as_verifier(point)
    return found


def _as_verifier(point: EntryPoint) -> Verifier:
    loaded = _load(point, "verifier")
    if isinstance(loaded, Verifier):
        return loaded
    if not callable(loaded):
        raise TaskError(f"{point.value} is neither a Verifier nor a function")
    release = point.dist.version if point.dist else "0"
    return Verifier(point.name, release, loaded, sources=(point.module.partition(".")[0],))


def _load(point: EntryPoint, what: str) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise TaskError(f"cannot load the {what} {point.value}: {error}") from error


# ----------------------------------------------------------------------------------- task sets


@dataclass(frozen=True, slots=True)
class SetMaker:
    """Makes a task set of any size."""

    name: str
    make: Callable[[int, int], TaskSet]
    """Returns `count` problems for a seed; raises TaskError when there are fewer."""
    package: str
    """The distribution that contains it."""
    version: str
    """That distribution's version."""
    module: str
    """The module that contains it."""

    @property
    def code_hash(self) -> str:
        """The Keccak-256 over the sources of its top-level package, or of its module here."""
        name = self.module if self.module.startswith("muster.") else self.module.split(".")[0]
        return hex0x(keccak(b"".join(keccak(data) for data in source_files(name))))


@cache
def installed_makers() -> Mapping[str, SetMaker]:
    """Return the task sets that can be made in this installation, by name."""
    return load_makers(entry_points(group=TASK_SETS_GROUP))


def maker_of(name: str) -> SetMaker:
    """Return the maker of a task set; raises TaskError when there is none."""
    known = installed_makers()
    if name not in known:
        raise TaskError(
            f"nothing here makes a task set {name!r}",
            hint="install the package that brings it; there are: " + ", ".join(sorted(known)),
        )
    return known[name]


def load_makers(points: Iterable[EntryPoint]) -> dict[str, SetMaker]:
    """Return the toy families and the makers of the entry points, by name.

    Raises TaskError when two have one name, or one cannot be imported.
    """
    own = version("muster-rl")
    found = {
        name: SetMaker(name, make, "muster-rl", own, toys.__name__) for name, make in _TOYS.items()
    }
    for point in points:
        if point.name in found:
            raise TaskError(
                f"two task sets are called {point.name!r}, one is {point.value}",
                hint="uninstall one of the packages",
            )
        make = _load(point, "task set")
        if not callable(make):
            raise TaskError(f"{point.value} is no function of count and seed")
        package, release = (point.dist.name, point.dist.version) if point.dist else ("?", "0")
        found[point.name] = SetMaker(point.name, make, package, release, point.module)
    return found


# ------------------------------------------------------------------------------------- grading


def verify(problem: Problem, completion: str) -> Grade:
    """Return the grade of a completion; never raises, whatever the text or the verifier does.

    A missing, failing or misbehaving verifier makes it Undecided, and so does work that was given
    up.
    """
    if is_given_up():
        return Undecided(REASON, is_disturbance=True)
    verifier = installed_verifiers().get(problem.task_type)
    if verifier is None:
        return Undecided(f"no verifier for task type {problem.task_type!r} is installed")
    try:
        grade = verifier.grade(problem, completion)
    except Exception as error:  # a third party's code meets a stranger's text
        logger.warning("verifier raised", extra={"task_type": problem.task_type})
        return undecided_by(error, "the verifier")
    return _checked(grade)


def verify_all(answers: Sequence[tuple[Problem, str]]) -> list[Grade]:
    """Return the grades of completions in order, as `verify` does; some are computed at a time.

    Blocks; callers with an event loop use a thread.
    """
    known = installed_verifiers()
    used = {problem.task_type for problem, _ in answers} & known.keys()
    parallel = max((known[task_type].parallel for task_type in used), default=1)
    return in_threads(lambda answer: verify(*answer), answers, parallel)


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

    Its verifier must be installed, accept its form, score the gold standard (if any) 1 and junk 0,
    and give the same grade every time, unless the run allows a verifier that does not.
    """
    for problem in problems:
        verifier = verifier_of(problem.task_type)
        if not (verifier.is_replayable or allows_judge):
            raise TaskError(
                f"grades of task type {problem.task_type!r} cannot be replayed by validators",
                hint="set `allows_judge = true` in the recipe to accept it; see docs/tasks.md",
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
