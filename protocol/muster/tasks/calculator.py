"""The calculator's task: multiply two numbers of two digits, `37*12=` to `444`, with a tool.

What a 0.1M-parameter model cannot do in its head it learns to have done: `make example-calculator`.
"""

from __future__ import annotations

import random

from muster.protocol.errors import TaskError
from muster.tasks.problem import Problem
from muster.tasks.task_set import TaskSet

SOURCE = "calculator"
"""What the problems state as their source."""
FACTORS = range(10, 100)
"""Numbers of two digits."""


def make_split(training: int, held_out: int, seed: int) -> tuple[TaskSet, TaskSet]:
    """Return a training and a held-out task set that share no product.

    Raises TaskError when there are not enough of them.
    """
    pairs = [(a, b) for a in FACTORS for b in FACTORS]
    if training + held_out > len(pairs):
        raise TaskError(f"there are only {len(pairs)} products, not {training + held_out}")
    drawn = random.Random(f"{SOURCE} {seed}").sample(pairs, training + held_out)
    problems = [_problem(a, b) for a, b in drawn]
    return (
        TaskSet.of(SOURCE, f"seed-{seed}", problems[:training]),
        TaskSet.of(f"{SOURCE}-held-out", f"seed-{seed}", problems[training:]),
    )


def prompt_of(a: int, b: int) -> str:
    """Return what the model is asked."""
    return f"{a}*{b}="


def _problem(a: int, b: int) -> Problem:
    return Problem(
        problem_id=f"{SOURCE}-{a}-{b}",
        source=SOURCE,
        task_type="exact_match_with_python",
        prompt=prompt_of(a, b),
        gold_standard_solution=str(a * b),
    )
