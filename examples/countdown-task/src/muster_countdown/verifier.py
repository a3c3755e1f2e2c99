"""The verifier: an expression of the given numbers, each used once, whose value is the target."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

from muster.protocol.errors import TaskError
from muster.tasks import Graded, Problem, Verifier

MAX_ANSWER_CHARS = 200
"""A longer answer is wrong unread."""
MAX_NUMBER = 10**6
"""Numbers and targets are up to this."""
_TOKEN = re.compile(r"[0-9]+|[-+*/()]")


def grade_countdown(problem: Problem, completion: str) -> Graded:
    """Return 1 when the last line is such an expression, else 0."""
    answer = completion.strip().rpartition("\n")[2].replace(" ", "")
    if len(answer) > MAX_ANSWER_CHARS:
        return Graded(0.0, f"the answer exceeds {MAX_ANSWER_CHARS} characters")
    tokens = _TOKEN.findall(answer)
    if "".join(tokens) != answer:
        return Graded(0.0, "the answer is not arithmetic")
    given = Counter(str(number) for number in problem.verification_info["numbers"])
    if Counter(token for token in tokens if token.isdigit()) != given:
        return Graded(0.0, "the answer does not use each number once")
    value = _Expression(tokens).value()
    return Graded(float(value == problem.verification_info["target"]), f"its value is {value}")


class _Expression:
    """A recursive-descent reader: sums of products of numbers and parentheses."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]

    def value(self) -> Fraction | None:
        """Return the value, or None when the text is malformed or divides by zero."""
        try:
            value = self._sum()
        except (ValueError, IndexError, ZeroDivisionError):
            return None
        return None if self._tokens else value

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next_is("+-"):
            value += self._product() if self._tokens.pop() == "+" else -self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self._next_is("*/"):
            value = value * self._factor() if self._tokens.pop() == "*" else value / self._factor()
        return value

    def _factor(self) -> Fraction:
        token = self._tokens.pop()
        if token != "(":
            return Fraction(int(token))
        value = self._sum()
        if self._tokens.pop() != ")":
            raise ValueError("a parenthesis is not closed")
        return value

    def _next_is(self, signs: str) -> bool:
        return bool(self._tokens) and self._tokens[-1] in signs


def check_countdown(problem: Problem) -> None:
    """Raise TaskError unless the problem states `numbers` and a `target`."""
    numbers, target = (problem.verification_info.get(name) for name in ("numbers", "target"))
    are_numbers = isinstance(numbers, list) and 2 <= len(numbers) <= 8
    if not are_numbers or not all(_is_number(number) for number in (*numbers, target)):
        raise TaskError(
            f"problem {problem.problem_id!r} needs verification_info "
            f'{{"numbers": [2 to 8 integers], "target": integer}}, all from 0 to {MAX_NUMBER}'
        )


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER


VERIFIER = Verifier(
    name="countdown",
    version="1",
    grade=grade_countdown,
    check=check_countdown,
    sources=("muster_countdown",),
)
"""What the entry point announces."""
