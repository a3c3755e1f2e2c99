r"""From a completion to a grade: compares the last boxed answer with the gold answer.

The answer is only the content of the last `\boxed{...}`: without a box, or if the last box is not
closed, there is no answer.

1. If both are numbers or lists of numbers, they are compared exactly, in plain Python.
2. Other expressions beyond the limits are wrong without being parsed.
3. The rest is compared by math-verify, in a process that may be killed.
"""

import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from muster.protocol.errors import TaskError
from muster.tasks.completions import THOUGHT_END
from muster.tasks.math.answers import Answer, Scalar, read_answer
from muster.tasks.math.comparison import Known, Unknown, compare
from muster.tasks.math.engine import EngineUnavailable, shared_engine
from muster.tasks.math.parse_limits import refusal
from muster.tasks.math.spelling import parse_number
from muster.tasks.problem import Problem
from muster.tasks.verifier import Grade, Graded, Undecided, Verifier

MAX_PAIRS = 24
"""Most pairs of expressions of one answer for the engine; such a request fits into a pipe."""

_BOX = "\\boxed"
MAX_ANSWER_CHARS = 512
"""Most characters of an answer; a longer one is wrong without being read."""
_OPENED = re.compile(r"\s*\{")
_BRACE = re.compile(r"\\[{}\\]|[{}]")

RIGHT = Graded(1.0)
WRONG = Graded(0.0)
NO_ANSWER = Graded(0.0, "there is no closed \\boxed{…} of at most 512 characters")


def grade_math(problem: Problem, completion: str) -> Grade:
    """Return 1 when the last box holds the gold answer, by the policy of docs/tasks.md."""
    stated = _stated_gold(problem)
    if stated is None:
        return Undecided("the problem has no gold standard to compare with")
    gold_text, gold, gold_number = _gold(stated)
    answer_text = final_answer(completion)
    if answer_text is None:
        return NO_ANSWER
    if answer_text == gold_text:
        return RIGHT
    if gold_number is not None and (number := parse_number(answer_text)) is not None:
        is_right = number == gold_number or _is_within(number, gold_number, problem)
        return RIGHT if is_right else WRONG
    return _grade_read(problem, gold, read_answer(answer_text))


def _stated_gold(problem: Problem) -> str | None:
    """Return the text with the gold answer; in GENESYS rows it is a whole solution."""
    stated = problem.verification_info.get("ground_truth", problem.gold_standard_solution)
    return stated if isinstance(stated, str) else None


@lru_cache(maxsize=4096)
def _gold(solution: str) -> tuple[str, Answer | None, Fraction | None]:
    text = gold_answer(solution)
    if len(text) > MAX_ANSWER_CHARS:
        return text, None, None
    return text, read_answer(text), parse_number(text)


def _is_within(number: Fraction, gold: Fraction, problem: Problem) -> bool:
    tolerance = problem.verification_info.get("tolerance")
    return tolerance is not None and abs(number - gold) <= _tolerance(tolerance)


def _are_within(gold: Answer, answer: Answer, problem: Problem) -> bool:
    if not isinstance(gold, Scalar) or not isinstance(answer, Scalar):
        return False
    if gold.number is None or answer.number is None or gold.is_percent != answer.is_percent:
        return False
    return _is_within(answer.number, gold.number, problem)


def _tolerance(value: Any) -> Fraction:
    found = parse_number(value) if isinstance(value, str) else None
    if found is None or found < 0:
        raise TaskError(f'tolerance is the text of a number from 0, such as "0.01", not {value!r}')
    return found


def _grade_read(problem: Problem, gold: Answer | None, answer: Answer | None) -> Grade:
    if gold is None:
        return Undecided("the gold standard is no answer that can be compared")
    if answer is None:
        return Graded(0.0, "the answer is empty, or holds signs or lists that are not read")
    if _are_within(gold, answer, problem):
        return RIGHT
    unknown: Unknown = set()
    is_equal = compare(gold, answer, {}, unknown)
    if is_equal is not None:
        return RIGHT if is_equal else WRONG
    return _grade_symbolic(gold, answer, unknown)


def _grade_symbolic(gold: Answer, answer: Answer, unknown: Unknown) -> Grade:
    if reason := _refusals(text for text, _ in unknown):
        return Undecided(f"the gold standard has {reason}")
    if reason := _refusals(text for _, text in unknown):
        return Graded(0.0, f"the answer has {reason}")
    if len(unknown) > MAX_PAIRS:
        return Graded(0.0, f"the answer has more than {MAX_PAIRS} pairs of expressions to compare")
    pairs = sorted(unknown)
    try:
        answered = shared_engine().ask({"pairs": pairs})
    except EngineUnavailable as error:
        return Undecided(str(error), is_disturbance=True)
    if answered.limit:
        detail = f"the answer takes too much {answered.limit} to compare"
        return Graded(0.0, detail, is_repeatable=False)
    equal = answered.answer["equal"]
    if None in equal:
        return Undecided("the gold standard is no expression that can be parsed")
    known: Known = {p: bool(e) for p, e in zip(pairs, equal, strict=True)}
    is_equal = compare(gold, answer, known, set())
    return Graded(float(bool(is_equal)), is_repeatable=not answered.is_near_limit)


def _refusals(texts: Iterable[str]) -> str | None:
    return next((reason for text in sorted(set(texts)) if (reason := refusal(text))), None)


# ------------------------------------------------------------------------------- extraction


def final_answer(completion: str) -> str | None:
    """Return the content of the last box; None if there is none, or it is open or too long."""
    start = _last_box(completion)
    if start is None or completion.find(THOUGHT_END, start) >= 0:
        return None
    window = completion[start : start + MAX_ANSWER_CHARS + 1]
    end = window.find("}")
    if end >= 0 and "{" not in window[:end] and "\\" not in window[:end]:
        return window[:end]
    return _balanced(window)


def _last_box(text: str) -> int | None:
    """Return where the content of the last box begins; blanks may precede its brace."""
    at = len(text)
    while (at := text.rfind(_BOX, 0, at)) >= 0:
        if opened := _OPENED.match(text, at + len(_BOX)):
            return opened.end()
    return None


def _balanced(window: str) -> str | None:
    """Return the text up to the brace that closes the one opened just before the window."""
    depth = 1
    for match in _BRACE.finditer(window):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if not depth:
            return window[: match.start()]
    return None


def gold_answer(gold: str) -> str:
    """Return a gold standard's answer: its last box, or all of it when it has none."""
    return (gold if _last_box(gold) is None else final_answer(gold)) or ""


# ------------------------------------------------------------------------------- admission


def check_math(problem: Problem) -> None:
    """Raise TaskError unless the gold standard can be compared and the tolerance is a number."""
    stated = _stated_gold(problem)
    if stated is None:
        raise TaskError(f"problem {problem.problem_id!r} has no gold standard")
    if _gold(stated)[1] is None:
        raise TaskError(f"the gold standard of {problem.problem_id!r} cannot be read as an answer")
    _check_expressions(problem.problem_id, _gold(stated)[1])
    if (tolerance := problem.verification_info.get("tolerance")) is not None:
        _tolerance(tolerance)


def _check_expressions(problem_id: str, gold: Answer | None) -> None:
    """Raise TaskError when the engine cannot process the gold answer's expressions."""
    texts = sorted(set(_expressions(gold)))
    if reason := _refusals(texts):
        raise TaskError(f"the gold standard of {problem_id!r} has {reason}")
    if not texts:
        return
    try:
        answered = shared_engine().ask({"pairs": [(text, text) for text in texts[:MAX_PAIRS]]})
    except EngineUnavailable as error:
        raise TaskError(f"problem {problem_id!r} cannot be graded here: {error}") from error
    if answered.limit or not all(answered.answer["equal"]):
        raise TaskError(f"the gold standard of {problem_id!r} cannot be parsed")


def _expressions(answer: Answer | None) -> Iterator[str]:
    if isinstance(answer, Scalar):
        if answer.number is None and not answer.is_word and not set(answer.text) & set(":;?"):
            yield answer.text
    elif answer is not None:
        for item in answer.items:
            yield from _expressions(item)


def right_completion(problem: Problem) -> str | None:
    """Return a completion whose box holds the gold answer."""
    stated = _stated_gold(problem)
    return None if stated is None else f"\\boxed{{{_gold(stated)[0]}}}"


VERIFIER = Verifier(
    name="math",
    version="2",
    grade=grade_math,
    check=check_math,
    right_completion=right_completion,
    sources=("muster.tasks.math", "muster.tasks.children", "muster.tasks.completions"),
    requires=("math-verify", "latex2sympy2_extended", "sympy", "mpmath", "antlr4-python3-runtime"),
    parallel=4,
)
"""The verifier of the task type `verifiable_math`."""
