"""What grades answers: the states of a grade, the environment that replies, the verifier.

A verifier's name, version and hash of its code make its identity, which a run pins in its recipe:
who grades with another one is told so before it works or judges, instead of being called a liar
afterwards. An environment is a function from what a model said to what it is told next. Workers
call it while they generate, validators again while they check, so whatever it says must follow from
the problem and the model's turns alone.
"""

from __future__ import annotations

import errno
import logging
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
from muster.tasks.problem import Problem

logger = logging.getLogger(__name__)

MAX_REPLY_CHARS = 65_536
"""An environment that says more misbehaves."""
ATTEMPTS = 3
"""An environment that cannot decide (its machine was too busy, say) is asked this often."""


# ----------------------------------------------------------------------------------- grades


_SHORTAGES = frozenset(
    {errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO}
)
"""Errors of a machine that has no more memory, processes, descriptors or disk."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The verifier decided."""

    score: float
    """In [0, 1]; 1 is right."""
    detail: str = field(default="", compare=False)
    """Why, for people; two machines may word it differently."""
    is_repeatable: bool = field(default=True, compare=False)
    """Whether every honest machine comes to this score. It does not when a limit of time or memory
    decided, or nearly did: then a claim that differs is no proof of fraud."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """The verifier could not decide; never to be read as a score of 0."""

    reason: str
    """Why, for people."""
    is_disturbance: bool = field(default=False, compare=False)
    """Whether this machine is at fault (memory, time, a killed process), and not the verifier, the
    problem or the answer: nobody is judged by that, and another try may do."""


def undecided_by(error: Exception, who: str) -> Undecided:
    """Return what an exception says of a grading: nothing of the answer, perhaps of the machine."""
    is_disturbance = (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno in _SHORTAGES)
        or (isinstance(error, RuntimeError) and "can't start new thread" in str(error))
    )
    return Undecided(f"{who} raised {type(error).__name__}", is_disturbance)


Grade = Graded | Undecided
"""What a verifier answers."""


# ------------------------------------------------------------------------------- environments


@dataclass(frozen=True, slots=True)
class Reply:
    """The model is told something and goes on."""

    text: str
    """What it is told, with whatever marks its model needs around it; not empty."""
    is_repeatable: bool = True
    """Whether every honest machine says this; otherwise another reply is no proof of fraud."""


@dataclass(frozen=True, slots=True)
class Done:
    """The completion ends here."""

    answer: str
    """The text that the verifier grades."""


Turn = Reply | Done | Undecided
"""What an environment answers."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Answers a model between its turns."""

    turn: Callable[[Problem, tuple[str, ...]], Turn]
    """Answers the last of the model's turns so far (at least one); deterministic, without state,
    and total over any text."""
    sources: tuple[str, ...]
    """Modules and packages whose source decides replies; hashed with the verifier's."""
    machine: Callable[[], str] = str
    """What else on this machine decides replies, such as the Python that runs programs."""
    max_replies: int = 8
    """After so many the next turn is the last."""
    parallel: int = 1
    """How many turns it can answer at once, in threads."""

    def answer(self, problem: Problem, said: Sequence[str]) -> Turn:
        """Return `turn`'s answer; never raises, whatever the text or the environment does.

        What is malformed, or raised, is Undecided. Past `max_replies` the last turn is graded.
        """
        if len(said) > self.max_replies:
            return Done(said[-1])
        try:
            found = self.turn(problem, tuple(said))
        except Exception as error:  # a third party's code meets a stranger's text
            logger.warning("environment raised", extra={"task_type": problem.task_type})
            return undecided_by(error, "the environment")
        if isinstance(found, Reply) and not 1 <= len(found.text) <= MAX_REPLY_CHARS:
            return Undecided(f"the environment's reply has {len(found.text)} characters")
        if not isinstance(found, Reply | Done | Undecided):
            return Undecided(f"the environment returned a {type(found).__name__}")
        return found


@dataclass(frozen=True, slots=True)
class Question:
    """What an environment is asked."""

    environment: Environment
    problem: Problem
    said: tuple[str, ...]
    """The model's turns so far."""


def ask_all(questions: Sequence[Question]) -> list[Turn]:
    """Return what the environments answer, in order, some at the same time.

    One that is undecided is asked again, ATTEMPTS times in all. Blocks.
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


Grader = Callable[[Problem, str], Grade]
"""Grades a completion's text; deterministic, and total over any text."""


def _accept(_problem: Problem) -> None:
    """Find nothing wrong with a problem."""


def _gold_standard(problem: Problem) -> str | None:
    return problem.gold_standard_solution


@dataclass(frozen=True)
class Verifier:
    """Grades the problems of one task type."""

    name: str
    """What it is called; a package's own verifiers usually bear the name of their task type."""
    version: str
    """Changes with every score that changes."""
    grade: Grader
    """The grading function."""
    sources: tuple[str, ...]
    """Modules and packages whose source decides scores; their bytes are hashed."""
    requires: tuple[str, ...] = ()
    """Distributions whose installed versions decide scores too."""
    environment: Callable[[], str] = str
    """What else on this machine decides scores, such as the Python that runs programs."""
    check: Callable[[Problem], None] = _accept
    """Raises TaskError when a problem is not well formed for this verifier."""
    right_completion: Callable[[Problem], str | None] = _gold_standard
    """Returns a completion that must be graded 1, or None when none is known."""
    parallel: int = 1
    """How many gradings it can do at once, in threads."""
    is_replayable: bool = True
    """Whether grading again gives the same score; a run must allow one for which it does not."""
    runs_programs: bool = False
    """Whether grading runs what a completion says; validators then replay its tokens first."""
    dialogue: Environment | None = None
    """What answers the model between its turns; None where a completion is a single one."""

    def identity(self, task_type: str) -> VerifierIdentity:
        """Return what identifies it where it grades a task type."""
        return VerifierIdentity(
            task_type=task_type, name=self.name, version=self.version, code_hash=self.code_hash
        )

    @cached_property
    def code_hash(self) -> str:
        """The Keccak-256 over its sources, the versions it requires and its environment; with a
        dialogue, over that one's as well.
        """
        sources = self.sources + (self.dialogue.sources if self.dialogue else ())
        parts = [keccak(data) for name in sources for data in source_files(name)]
        stated = [*(f"{name}=={_installed(name)}" for name in self.requires), self.environment()]
        if self.dialogue:
            stated += [self.dialogue.machine(), str(self.dialogue.max_replies)]
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
    with ThreadPoolExecutor(parallel, thread_name_prefix="grading") as executor:
        return list(executor.map(function, given))
