"""Verifiers by task type: the built-in ones, and those that installed packages announce.

A package adds one with an entry point in the group `muster.verifiers`, named as the task type:

    [project.entry-points."muster.verifiers"]
    my_task = "my_package:VERIFIER"

which is a `Verifier`, or a plain `grade(problem, completion)`: that one has the task type's name,
the package's version, and all source of its top-level package is hashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from muster.protocol.errors import TaskError
from muster.protocol.recipe import VerifierIdentity
from muster.tasks import code, exact_match, judge, output_prediction, reasoning_gym
from muster.tasks.environments.environment import Environment
from muster.tasks.environments.python_tool import with_python
from muster.tasks.math import verifier as math
from muster.tasks.verifier import Verifier

ENTRY_POINT_GROUP = "muster.verifiers"
"""Where packages announce verifiers."""

_BUILT_IN: Mapping[str, Verifier] = {
    "code_output_prediction": output_prediction.VERIFIER,
    "exact_match": exact_match.VERIFIER,
    "exact_match_with_python": with_python(exact_match.VERIFIER),
    "llm_judgeable_groundtruth_similarity": judge.VERIFIER,
    reasoning_gym.TASK_TYPE: reasoning_gym.VERIFIER,
    "verifiable_code": code.VERIFIER,
    "verifiable_math": math.VERIFIER,
    "verifiable_math_with_python": with_python(math.VERIFIER),
}


@cache
def installed_verifiers() -> Mapping[str, Verifier]:
    """Return the verifiers of this installation, by task type."""
    return load_verifiers(entry_points(group=ENTRY_POINT_GROUP))


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
    """Return what answers a model between its turns in this task type; None for a single turn."""
    verifier = installed_verifiers().get(task_type)
    return verifier.dialogue if verifier else None


def runs_completions(task_type: str) -> bool:
    """Return whether a completion of this task type is run as a program, by grader or dialogue."""
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
        found = verifier_of(wanted.task_type).identity(wanted.task_type)
        if found != wanted:
            raise TaskError(
                f"the run grades {wanted.task_type!r} by {_name(wanted)}, here is {_name(found)}",
                hint="install the versions that the run's owner had; "
                "a reward that differs from the run's verifier is a fraud",
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
        found[point.name] = _load(point)
    return found


def _load(point: EntryPoint) -> Verifier:
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise TaskError(f"cannot load the verifier {point.value}: {error}") from error
    if isinstance(loaded, Verifier):
        return loaded
    if not callable(loaded):
        raise TaskError(f"{point.value} is neither a Verifier nor a function")
    release = point.dist.version if point.dist else "0"
    return Verifier(point.name, release, loaded, sources=(point.module.partition(".")[0],))
