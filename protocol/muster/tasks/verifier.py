"""What a verifier is: a grading function with a name, a version and a hash of its code.

The three make its identity, which a run pins in its recipe: who grades with another one is told so
before it works or judges, instead of being called a liar afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import TaskError
from muster.protocol.recipe import VerifierIdentity
from muster.tasks.environments.environment import Environment
from muster.tasks.grades import Grade
from muster.tasks.problem import Problem

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
