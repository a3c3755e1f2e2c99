"""Toy families that a tiny model learns within seconds: short prompts, answers graded exactly.

Each makes `count` different problems by seed. Length budgets are the recipe's (`target_lengths`)
and come with every ticket, so any of them can be trained with budgets.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

from muster.protocol.errors import TaskError
from muster.tasks import sort_digits
from muster.tasks.problem import Problem
from muster.tasks.task_set import TaskSet

LETTERS = 4
"""Letters that are reversed."""
DIGITS = 2
"""Digits of each number that is added or subtracted."""


def make_sort(count: int, seed: int) -> TaskSet:
    """Return problems such as `3172=`, whose answer is `1237`."""
    return sort_digits.make_task_set(count, seed)


def make_reverse(count: int, seed: int) -> TaskSet:
    """Return problems such as `abcd~`, whose answer is `dcba`."""

    def draw(source: random.Random) -> tuple[str, str]:
        letters = "".join(source.choices(string.ascii_lowercase, k=LETTERS))
        return f"{letters}~", letters[::-1]

    return _drawn("reverse", count, seed, draw, possible=26**LETTERS)


def make_arithmetic(count: int, seed: int) -> TaskSet:
    """Return problems such as `17+25=`, whose answer is `42`; half of them subtract."""

    def draw(source: random.Random) -> tuple[str, str]:
        one, other = (source.randrange(10**DIGITS) for _ in range(2))
        sign = source.choice("+-")
        return f"{one}{sign}{other}=", str(one + other if sign == "+" else one - other)

    return _drawn("arithmetic", count, seed, draw, possible=2 * 10 ** (2 * DIGITS))


def _drawn(
    name: str,
    count: int,
    seed: int,
    draw: Callable[[random.Random], tuple[str, str]],
    *,
    possible: int,
) -> TaskSet:
    # Drawing until all are different slows down near the end of what there is.
    if count > possible // 2:
        raise TaskError(f"{name} makes up to {possible // 2} different problems, not {count}")
    source, answers = random.Random(f"{name} {seed}"), dict[str, str]()
    while len(answers) < count:
        prompt, answer = draw(source)
        answers[prompt] = answer
    problems = (_problem(name, prompt, answer) for prompt, answer in answers.items())
    return TaskSet.of(name, f"seed-{seed}", problems)


def _problem(name: str, prompt: str, answer: str) -> Problem:
    return Problem(
        problem_id=f"{name}-{prompt[:-1]}",
        source=name,
        task_type="exact_match",
        prompt=prompt,
        gold_standard_solution=answer,
    )
