"""Problems of reasoning-gym's families: made by seed, graded by the family's own scorer.

Only a score of 1 is right, anything less is wrong: many families give junk a hundredth, and a group
whose answers are all wrong must be recognised. The answer is the text between the last `<answer>`
and the `</answer>` after it. Scorers run in the engine's processes (`muster.tasks.math.engine`).
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

from muster.protocol.encoding import canonical_json
from muster.protocol.errors import EncodingError, TaskError
from muster.tasks.math.engine import EngineTask, EngineUnavailable, shared_engine
from muster.tasks.problem import Problem
from muster.tasks.verifier import Grade, Graded, Undecided, Verifier

TASK_TYPE = "reasoning_gym"
MAX_ANSWER_CHARS = 16_384
"""Most characters of an answer; a longer one is wrong without being read."""
OPEN, CLOSE = "<answer>", "</answer>"
INSTRUCTION = f"Give the final answer between {OPEN} and {CLOSE}."
"""End of every prompt."""
JUNK = ("zzz", "", "0", "\x00", "1" * 200)
"""Answers that no family may score 1 for every problem."""
_WORK = EngineTask("muster.tasks.reasoning_gym", "reasoning-gym", "reasoning-gym")


def grade_reasoning_gym(problem: Problem, completion: str) -> Grade:
    """Return 1 when the family's scorer accepts the answer, else 0."""
    answer = extract_answer(completion)
    if answer is None:
        return Graded(0.0, f"no answer between {OPEN} and {CLOSE}")
    if len(answer) > MAX_ANSWER_CHARS:
        return Graded(0.0, f"the answer exceeds {MAX_ANSWER_CHARS} characters")
    info = problem.verification_info
    request = {"family": info.get("family"), "entry": info.get("entry"), "answer": answer}
    try:
        answered = shared_engine(_WORK).ask(request)
    except EngineUnavailable as error:
        return Undecided(str(error), is_disturbance=True)
    if answered.limit:
        return Graded(0.0, f"met the limit of {answered.limit}", is_repeatable=False)
    if "failed" in answered.answer:
        return Undecided(f"the scorer raised {answered.answer['failed']}")
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
    """Raise TaskError unless the problem has a family and an entry with a question and answer."""
    info = problem.verification_info
    entry = info.get("entry")
    if not isinstance(info.get("family"), str) or not isinstance(entry, dict):
        raise TaskError(
            f"problem {problem.problem_id!r} needs verification_info "
            '{"family": name, "entry": {"question", "answer", "metadata"}}'
        )


def right_completion(problem: Problem) -> str | None:
    """Return a completion that holds the entry's own answer."""
    answer = problem.verification_info["entry"].get("answer")
    return None if answer is None else f"{OPEN}{answer}{CLOSE}"


VERIFIER = Verifier(
    name="reasoning_gym",
    version="1",
    grade=grade_reasoning_gym,
    check=check_reasoning_gym,
    right_completion=right_completion,
    sources=(
        __name__,
        "muster.tasks.children",
        "muster.tasks.math.engine",
        "muster.tasks.math.engine_process",
    ),
    requires=("reasoning-gym", "sympy"),
    parallel=2,
)
"""The verifier of the task type `reasoning_gym`."""


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
            if grade != Graded(0.0) and junk != entry["answer"]:
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


def _library() -> Any:
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise TaskError(
            "reasoning-gym is not installed", hint="pip install 'muster-rl[reasoning-gym]'"
        ) from error
    return reasoning_gym
