"""Problems of reasoning-gym's families: made by seed, graded by the family's own scorer.

Only a score of 1 is right, anything less is wrong: many families give junk a hundredth, and a group
whose answers are all wrong must be recognised. The answer is the text between the last `<answer>`
and the `</answer>` after it. Scorers run in the engine's processes (`muster.tasks.math.engine`),
which are no sandbox. Scorers of some families evaluate the answer as Python: a family whose code
names `eval` or the like is refused, by whoever makes, admits or grades its problems.
"""

import ast
import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from muster.protocol.encoding import canonical_json
from muster.protocol.errors import EncodingError, TaskError, install_hint
from muster.tasks.math.engine import EngineTask, EngineUnavailable, shared_engine
from muster.tasks.problem import Problem
from muster.tasks.verifier import Grade, Graded, Undecided, Verifier

TASK_TYPE = "reasoning_gym"
MAX_ANSWER_CHARS = 16_384
"""Most characters of an answer; a longer one is wrong without being read."""
OPEN, CLOSE = "<answer>", "</answer>"
INSTRUCTION = f"Give the final answer between {OPEN} and {CLOSE}."
"""End of every prompt."""
JUNK = ("zzz", "", "0", "\x00", "1" * 200, "{}", "[]", "null")
"""Answers that no family may score 1 for every problem, and on which no scorer may raise."""
EVALUATING = frozenset(
    {"eval", "exec", "compile", "parse_expr", "sympify", "lambdify", "unsafe_load"}
    | {"__import__", "import_module", "builtins", "__builtins__", "globals", "__globals__"}
    | {"__subclasses__", "os", "posix", "pty", "shutil", "subprocess", "system", "popen", "ctypes"}
    | {"sys", "runpy", "codeop", "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib"}
    | {"marshal", "shelve"}
)
"""Names by which code may run a text as a program. A family is refused if its code has one."""
RAISED = "the scorer raised"
"""Begins the detail of a grade whose scorer raised."""
SCORER = "score_answer"
"""The method that scores an answer."""
_WORK = EngineTask("muster.tasks.reasoning_gym", "reasoning-gym", "reasoning-gym")


def grade_reasoning_gym(problem: Problem, completion: str) -> Grade:
    """Return 1 when the family's scorer accepts the answer, else 0, also when the scorer raises.

    A family that is refused is undecided: the worker of such a problem is not at fault.
    """
    answer = extract_answer(completion)
    if answer is None:
        return Graded(0.0, f"no answer between {OPEN} and {CLOSE}")
    if len(answer) > MAX_ANSWER_CHARS:
        return Graded(0.0, f"the answer exceeds {MAX_ANSWER_CHARS} characters")
    try:
        # The run's owner may have left out the check of the task set.
        check_reasoning_gym(problem)
    except _NotInstalled as error:
        return Undecided(str(error), is_disturbance=True)
    except TaskError as error:
        return Undecided(str(error))
    info = problem.verification_info
    request = {"family": info.get("family"), "entry": info.get("entry"), "answer": answer}
    try:
        answered = shared_engine(_WORK).ask(request)
    except EngineUnavailable as error:
        return Undecided(str(error), is_disturbance=True)
    if answered.limit:
        return Graded(0.0, f"met the limit of {answered.limit}", is_repeatable=False)
    if "failed" in answered.answer:
        # The answer's worker must not lose what else is in its ticket.
        return Graded(0.0, f"{RAISED} {answered.answer['failed']}", is_repeatable=False)
    score = float(answered.answer["score"])
    is_repeatable = not answered.is_near_limit
    return Graded(float(score >= 1.0), f"scored {score}", is_repeatable=is_repeatable)


def extract_answer(completion: str) -> str | None:
    """Return the text between the last pair of tags, without blanks around it."""
    before, closed, _ = completion.rpartition(CLOSE)
    _, opened, answer = before.rpartition(OPEN)
    return answer.strip() if opened and closed else None


# Called by the engine's process


def warm_up() -> None:
    """Load what scorers need; raises ImportError when reasoning-gym is not installed."""
    import reasoning_gym  # noqa: F401


@cache
def _scorer(family: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(family)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the score of an answer, or the name of the scorer's exception."""
    try:
        score = float(_scorer(request["family"])(request["answer"], request["entry"]))
    except MemoryError:
        raise
    except Exception as error:  # scorers raise on answers that they do not expect
        return {"failed": type(error).__name__}
    return {"score": score} if math.isfinite(score) else {"failed": "a score that is no number"}


# Admitting problems


def check_reasoning_gym(problem: Problem) -> None:
    """Raise TaskError unless the problem has an entry and a family that can be graded safely."""
    info = problem.verification_info
    entry = info.get("entry")
    if not isinstance(info.get("family"), str) or not isinstance(entry, dict):
        raise TaskError(
            f"problem {problem.problem_id!r} needs verification_info "
            '{"family": name, "entry": {"question", "answer", "metadata"}}'
        )
    danger = find_danger(info["family"])
    if danger:
        raise TaskError(
            f"reasoning-gym's family {info['family']!r} is refused: {danger}",
            hint="take another family (`muster tasks list --families`) or a task type with a "
            "sandbox, such as `verifiable_code`",
        )


def right_completion(problem: Problem) -> str | None:
    """Return a completion that holds the entry's own answer."""
    answer = problem.verification_info["entry"].get("answer")
    return None if answer is None else f"{OPEN}{answer}{CLOSE}"


VERIFIER = Verifier(
    name="reasoning_gym",
    version="2",
    grade=grade_reasoning_gym,
    check=check_reasoning_gym,
    right_completion=right_completion,
    sources=(
        __name__,
        "muster.tasks.children",
        "muster.tasks.math.engine",
        "muster.tasks.math.engine_process",
    ),
    # What scorers compute with, as far as an extra can pin it. numpy differs between honest
    # installations: scorers only read, round and compare numbers with it. The other libraries of
    # reasoning-gym only make problems, or serve families that are refused.
    requires=("reasoning-gym", "magiccube", "mpmath", "sympy"),
    parallel=2,
)
"""The verifier of the task type `reasoning_gym`."""


# Finding scorers that evaluate answers


@cache
def find_danger(family: str) -> str | None:
    """Return where the code of a family may run an answer as a program; None if nowhere.

    Looks at the modules of the family's class and of its base classes, and at all modules of
    reasoning-gym that these import. Raises TaskError when there is no such family.
    """
    datasets = _library().factory.DATASETS
    if family not in datasets:
        raise TaskError(f"reasoning-gym has no family {family!r}")
    bases = datasets[family][0].__mro__
    modules = [base.__module__ for base in bases]
    waiting = [each for each in modules if each.partition(".")[0] not in sys.stdlib_module_names]
    seen: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        source = _source(module)
        if source is None:
            return f"{module} is no readable source of reasoning-gym"
        if source.evaluating:
            name = min(source.evaluating)
            return f"{module} names `{name}`, which may run an answer as a program"
        waiting += source.imported
    return None


@dataclass(frozen=True, slots=True)
class _Source:
    """What the source of a module says."""

    evaluating: frozenset[str]
    """Names by which it may run an answer as a program."""
    imported: tuple[str, ...]
    """Modules of the library that it imports."""


@cache
def _source(module: str) -> _Source | None:
    """Return what a module of the library says; None if it is another's or has no source."""
    spec = find_spec(module)
    if not _is_of_library(module) or not spec or not spec.origin or spec.origin[-3:] != ".py":
        return None
    tree = ast.parse(Path(spec.origin).read_bytes())
    package = module if spec.submodule_search_locations else module.rpartition(".")[0]
    return _Source(evaluating_names(tree), tuple(_imported(package, tree)))


def evaluating_names(tree: ast.Module) -> frozenset[str]:
    """Return the names by which a module's code may run an answer as a program.

    These are the names in EVALUATING, wherever they stand, and those of sympy that the scorer may
    reach: sympy evaluates any text that it is given.
    """
    return EVALUATING & set(_names(tree)) | (_names_of_sympy(tree) & _reached(tree))


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] == "reasoning_gym"


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that code uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            # `re.compile` is harmless, and the builtin needs no attribute.
            if node.attr != "compile":
                yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")


def _names_of_sympy(tree: ast.Module) -> set[str]:
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sympy":
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.partition(".")[0] == "sympy"]
            bound |= {alias.asname or "sympy" for alias in names}
    return bound


def _reached(tree: ast.Module) -> set[str]:
    """Return the names that scorers use, and all functions and classes with one of these names."""
    bodies: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bodies.setdefault(node.name, []).append(node)
    reached, waiting = set[str](), [SCORER]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [used for body in bodies.get(name, ()) for used in _names(body)]
    return reached


def _imported(package: str, tree: ast.Module) -> Iterator[str]:
    """Yield the modules of the library that a module in a package imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_of_library(alias.name))
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            if _is_of_library(source):
                yield from _from_package(source, [alias.name for alias in node.names])


def _from_package(source: str, names: list[str]) -> Iterator[str]:
    spec = find_spec(source)
    is_package = spec is not None and spec.submodule_search_locations is not None
    parts = [f"{source}.{name}" for name in names]
    modules = [part for part in parts if is_package and find_spec(part)]
    yield from modules
    # The whole package is used only if a name is none of its modules.
    if len(modules) < len(names):
        yield source


# Making problems


def families() -> list[str]:
    """Return the names of the installed families; raises TaskError when there are none."""
    return sorted(_library().factory.DATASETS)


def make_problems(family: str, count: int, seed: int) -> Iterator[Problem]:
    """Yield `count` problems of a family; the same for the same seed and version.

    Raises TaskError when the family does not pass its self-check.
    """
    fault = find_fault(family, seed=seed)
    if fault:
        raise TaskError(
            f"reasoning-gym's family {family!r} is refused: {fault}",
            hint="`muster tasks list --families` shows those that pass",
        )
    for number, entry in enumerate(_entries(family, count, seed)):
        yield _problem(family, seed, number, entry)


def find_fault(family: str, *, seed: int = 0, items: int = 3) -> str | None:
    """Return why a family cannot be used; None if it can.

    Its entries must be reproducible and fit into JSON, their own answers must score 1, and junk
    must not.
    """
    try:
        danger = find_danger(family)
        if danger:
            return danger
        entries, again = (_entries(family, items, seed) for _ in range(2))
        first, second = ([canonical_json(entry) for entry in made] for made in (entries, again))
    except (TaskError, EncodingError) as error:
        return str(error)
    if first != second:
        return "the same seed makes other problems"
    for number, entry in enumerate(entries):
        problem = _problem(family, seed, number, entry)
        right = right_completion(problem)
        if right is None:
            return "an entry has no answer"
        grade = grade_reasoning_gym(problem, right)
        if grade != Graded(1.0):
            return f"its own answer is {_described(grade)}"
        for junk in JUNK:
            grade = grade_reasoning_gym(problem, f"{OPEN}{junk}{CLOSE}")
            is_wrong = grade == Graded(0.0) and not _described(grade).startswith(RAISED)
            if not is_wrong and junk != entry["answer"]:
                return f"the answer {junk[:10]!r} is {_described(grade)}"
    return None


def _described(grade: Grade) -> str:
    return f"{grade.detail}" if isinstance(grade, Graded) else grade.reason


def _entries(family: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Return entries after a round trip through JSON, which turns tuples into lists."""
    library = _library()
    if family not in library.factory.DATASETS:
        raise TaskError(f"reasoning-gym has no family {family!r}")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            made = library.create_dataset(family, size=count, seed=seed)
            entries = [made[i] for i in range(count)]
        return [json.loads(json.dumps(entry, allow_nan=False)) for entry in entries]
    except Exception as error:  # third-party code; some families need a configuration
        raise TaskError(f"cannot be made: {type(error).__name__}: {str(error)[:80]}") from error


def _problem(family: str, seed: int, number: int, entry: dict[str, Any]) -> Problem:
    kept = {name: entry.get(name) for name in ("question", "answer", "metadata")}
    return Problem(
        problem_id=f"{family}-{seed}-{number}",
        source="reasoning-gym",
        task_type=TASK_TYPE,
        prompt=f"{entry['question']}\n\n{INSTRUCTION}",
        gold_standard_solution=None if entry["answer"] is None else str(entry["answer"]),
        verification_info={"family": family, "entry": kept},
    )


class _NotInstalled(TaskError):
    """reasoning-gym cannot be imported."""


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise _NotInstalled(
            "reasoning-gym is not installed", hint=install_hint("reasoning-gym")
        ) from error
    return reasoning_gym
