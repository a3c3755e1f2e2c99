"""Grading of answers: the states of a grade, the environment that replies, the verifier.

A verifier's name, version and code hash are its identity, which a run pins in its recipe. A worker
or validator with another verifier is refused at its start, and not accused of fraud afterwards; a
juror with another one does not rule where it decides. An environment is a function from a model's
turns to the next reply. Workers call it during generation, validators again during checking, so its
replies must depend only on the problem and the model's turns.
"""

import errno
import logging
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import TaskError
from muster.protocol.recipe import VerifierIdentity
from muster.tasks.given_up import GIVEN_UP, REASON, is_given_up
from muster.tasks.problem import Problem

logger = logging.getLogger(__name__)

MAX_REPLY_CHARS = 65_536
"""Most characters of an environment's reply."""
ATTEMPTS = 3
"""How often an environment is asked that cannot decide, for example on a busy machine."""


# ----------------------------------------------------------------------------------- grades


_SHORTAGES = frozenset(
    {errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO}
)
"""Errors of a machine that ran out of memory, processes, descriptors or disk."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The verifier decided."""

    score: float
    """Score in [0, 1]; 1 is right."""
    detail: str = field(default="", compare=False)
    """The reason, for people; its wording may differ between machines."""
    is_repeatable: bool = field(default=True, compare=False)
    """Whether every honest machine gets this score. False if a limit of time or memory decided, or
    nearly did: then a different claim is no proof of fraud."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """The verifier could not decide; this must never be read as a score of 0."""

    reason: str
    """Why, for people."""
    is_disturbance: bool = field(default=False, compare=False)
    """Whether this machine is at fault (memory, time, a killed process), not the verifier, the
    problem or the answer: nobody is judged by it, and a retry may succeed."""


def undecided_by(error: Exception, who: str) -> Undecided:
    """Return the grade after an exception, which may be due to the verifier or the machine."""
    is_disturbance = (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno in _SHORTAGES)
        or (isinstance(error, RuntimeError) and "can't start new thread" in str(error))
    )
    return Undecided(f"{who} raised {type(error).__name__}", is_disturbance)


Grade = Graded | Undecided
"""Result of a verifier."""


# ------------------------------------------------------------------------------- environments


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to the model, which then goes on."""

    text: str
    """The reply's text, with the marks that its model needs around it; not empty."""
    is_repeatable: bool = True
    """Whether every honest machine gives this reply; if not, another reply is no proof of fraud."""


@dataclass(frozen=True, slots=True)
class Done:
    """The completion ends here."""

    answer: str
    """The text that the verifier grades."""


Turn = Reply | Done | Undecided
"""Result of an environment."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Answers a model between its turns."""

    turn: Callable[[Problem, tuple[str, ...]], Turn]
    """Answers the last of the model's turns so far (at least one). Deterministic, stateless, and
    never raises for any text."""
    sources: tuple[str, ...]
    """Modules and packages whose source decides replies; hashed with the verifier's."""
    machine: Callable[[], str] = str
    """Returns what on this machine determines replies beside the Python that computes them, such as
    the Python that runs programs."""
    max_replies: int = 8
    """Most replies; the turn after the last reply ends the completion."""
    parallel: int = 1
    """How many turns it can answer at once, in threads."""

    def answer(self, problem: Problem, said: Sequence[str]) -> Turn:
        """Return `turn`'s answer; never raises, whatever the text or the environment does.

        A malformed answer or an exception becomes Undecided, and so does work that was given up.
        After `max_replies` the last turn is graded.
        """
        if is_given_up():
            return Undecided(REASON, is_disturbance=True)
        if len(said) > self.max_replies:
            return Done(said[-1])
        try:
            found = self.turn(problem, tuple(said))
        except Exception as error:  # third-party code with untrusted text may raise anything
            logger.warning("environment raised", extra={"task_type": problem.task_type})
            return undecided_by(error, "the environment")
        if isinstance(found, Reply) and not 1 <= len(found.text) <= MAX_REPLY_CHARS:
            return Undecided(f"the environment's reply has {len(found.text)} characters")
        if not isinstance(found, Reply | Done | Undecided):
            return Undecided(f"the environment returned a {type(found).__name__}")
        return found


@dataclass(frozen=True, slots=True)
class Question:
    """A question to an environment."""

    environment: Environment
    problem: Problem
    said: tuple[str, ...]
    """The model's turns so far."""


def ask_all(questions: Sequence[Question]) -> list[Turn]:
    """Return the environments' answers in order; some are computed at the same time.

    An undecided one is asked again, ATTEMPTS times in all. Blocks.
    """
    parallel = max((each.environment.parallel for each in questions), default=1)
    return in_threads(_ask, questions, parallel)


def _ask(question: Question) -> Turn:
    turn: Turn = Undecided("never asked")
    for _ in range(ATTEMPTS):
        turn = question.environment.answer(question.problem, question.said)
        if not isinstance(turn, Undecided):
            break
    return turn


# ----------------------------------------------------------------------------------- verifiers


def python_here() -> str:
    """Return the Python that grades: versions differ in what they read as a number or a name."""
    return f"{platform.python_implementation()} {sys.version_info[0]}.{sys.version_info[1]}"


Grader = Callable[[Problem, str], Grade]
"""Grades a completion's text; deterministic, and never raises for any text."""


def _accept(_problem: Problem) -> None:
    """Find nothing wrong with a problem."""


def _gold_standard(problem: Problem) -> str | None:
    return problem.gold_standard_solution


@dataclass(frozen=True)
class Verifier:
    """Grades the problems of one task type."""

    name: str
    """Its name; usually that of its task type."""
    version: str
    """Version; it must change whenever any score changes."""
    grade: Grader
    """The grading function. It ends in bounded time for any text: code that can hang runs in a
    process with a deadline, since nothing interrupts a thread."""
    sources: tuple[str, ...]
    """Modules and packages whose source determines scores; their bytes are hashed."""
    requires: tuple[str, ...] = ()
    """Distributions whose installed versions determine scores too."""
    machine: Callable[[], str] = python_here
    """Returns what else on this machine determines scores, such as the Python that runs programs;
    `str` for nothing. It is part of the version that a run pins."""
    check: Callable[[Problem], None] = _accept
    """Raises TaskError when a problem is not well formed for this verifier."""
    right_completion: Callable[[Problem], str | None] = _gold_standard
    """Returns a completion that must be graded 1, or None when none is known."""
    parallel: int = 1
    """Number of gradings that it can do at once, in threads."""
    is_replayable: bool = True
    """Whether grading again gives the same score; if not, a run must allow the verifier."""
    runs_programs: bool = False
    """Whether grading executes the completion; validators then replay its tokens first."""
    dialogue: Environment | None = None
    """The environment that answers between the model's turns; None for a single turn."""

    def identity(self, task_type: str) -> VerifierIdentity:
        """Return its identity as the verifier of a task type."""
        machine = ", ".join(self._machines)
        version = f"{self.version} ({machine})" if machine else self.version
        return VerifierIdentity(
            task_type=task_type, name=self.name, version=version, code_hash=self.code_hash
        )

    @property
    def stated(self) -> list[str]:
        """What determines scores beside its sources: versions of distributions, the machine."""
        return [*(f"{name}=={_installed(name)}" for name in self.requires), *self._machines]

    @property
    def _machines(self) -> list[str]:
        found = [self.machine()]
        if self.dialogue:
            found += [python_here(), self.dialogue.machine()]
        return [each for each in dict.fromkeys(found) if each]

    @cached_property
    def code_hash(self) -> str:
        """The Keccak-256 over its sources, its required versions and its machine, and over those of
        its dialogue, if any.
        """
        sources = self.sources + (self.dialogue.sources if self.dialogue else ())
        parts = [keccak(data) for name in sources for data in source_files(name)]
        stated = self.stated
        if self.dialogue:
            stated += [str(self.dialogue.max_replies)]
        return hex0x(keccak(b"".join(parts) + "\n".join(stated).encode()))


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def source_files(module: str) -> Iterator[bytes]:
    """Yield names and contents of a module's Python files, a package's in order of path."""
    for root, path in _source_paths(module):
        yield path.relative_to(root).as_posix().encode()
        yield path.read_bytes()


def _source_paths(module: str) -> Iterable[tuple[Path, Path]]:
    spec = find_spec(module)
    if spec is None:
        raise TaskError(f"there is no module {module!r} to hash")
    if spec.submodule_search_locations is None:
        if spec.origin is None or not Path(spec.origin).is_file():
            raise TaskError(f"module {module!r} has no file to hash")
        return [(Path(spec.origin).parent, Path(spec.origin))]
    roots = [Path(location) for location in spec.submodule_search_locations]
    return [(root, path) for root in roots for path in sorted(root.rglob("*.py"))]


# ------------------------------------------------------------------------------------- threads


T = TypeVar("T")
R = TypeVar("R")


def in_threads(function: Callable[[T], R], given: Sequence[T], parallel: int) -> list[R]:
    """Return the function's results in order, up to `parallel` computed at a time. Blocks."""
    if parallel == 1 or len(given) < 2:
        return [function(each) for each in given]
    with ThreadPoolExecutor(
        parallel, "grading", initializer=GIVEN_UP.set, initargs=(GIVEN_UP.get(),)
    ) as executor:
        return list(executor.map(function, given))
