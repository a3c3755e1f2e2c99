"""The task set: problems drawn by seed, each with an answer that is known to be right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

from muster.tasks import Problem, TaskSet


def make_task_set(count: int, seed: int) -> TaskSet:
    """Return `count` problems; the same for the same seed."""
    source = random.Random(f"countdown {seed}")
    problems = _problems(source)
    return TaskSet.of("countdown", f"seed-{seed}", (next(problems) for _ in range(count)))


def _problems(source: random.Random) -> Iterator[Problem]:
    number = 0
    while True:
        numbers = [source.randint(1, 9) for _ in range(3)]
        expression, value = _combine(numbers, source)
        if value.denominator != 1 or not 1 <= value <= 99:
            continue
        yield _problem(number, numbers, int(value), expression)
        number += 1


def _combine(numbers: list[int], source: random.Random) -> tuple[str, Fraction]:
    expression, value = str(numbers[0]), Fraction(numbers[0])
    for number in numbers[1:]:
        sign = source.choice("+-*")
        expression = f"({expression}){sign}{number}"
        value = {"+": value + number, "-": value - number, "*": value * number}[sign]
    return expression, value


def _problem(number: int, numbers: list[int], target: int, gold: str) -> Problem:
    listed = ", ".join(str(n) for n in numbers)
    return Problem(
        problem_id=f"countdown-{number}",
        source="countdown",
        task_type="countdown",
        prompt=f"Use {listed} once each with + - * / and parentheses to make {target}. "
        "Answer with the expression on the last line.",
        gold_standard_solution=gold,
        verification_info={"numbers": numbers, "target": target},
    )
