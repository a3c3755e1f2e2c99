"""The demo's task: sort digits in ascending order, `3172=` to `1237`; graded by exact match.

A 0.1M-parameter model learns it within seconds (see `configs/demo.toml`).
"""

from __future__ import annotations

import random

from muster.protocol.errors import TaskError
from muster.tasks.problem import Problem
from muster.tasks.task_set import TaskSet

SOURCE = "sort-digits"
"""What the problems state as their source."""


def make_task_set(
    count: int, seed: int, *, digits: int = 4, without: TaskSet | None = None
) -> TaskSet:
    """Return `count` different problems drawn by `seed`; none of them is in `without`.

    Raises TaskError when there are not enough inputs of that many digits.
    """
    taken = {problem.prompt for problem in without} if without else set()
    inputs = [f"{number:0{digits}d}" for number in range(10**digits)]
    free = [text for text in inputs if prompt_of(text) not in taken]
    if count > len(free):
        raise TaskError(f"there are only {len(free)} inputs of {digits} digits, not {count}")
    chosen = random.Random(f"{SOURCE} {digits} {seed}").sample(free, count)
    name = f"{SOURCE}-{digits}" + ("-held-out" if without else "")
    return TaskSet.of(name, f"seed-{seed}", (_problem(text) for text in chosen))


def make_split(
    training: int, held_out: int, seed: int, *, digits: int = 4
) -> tuple[TaskSet, TaskSet]:
    """Return a training and a held-out task set that share no input."""
    first = make_task_set(training, seed, digits=digits)
    return first, make_task_set(held_out, seed, digits=digits, without=first)


def prompt_of(digits: str) -> str:
    """Return what the model is asked."""
    return f"{digits}="


def _problem(digits: str) -> Problem:
    return Problem(
        problem_id=f"{SOURCE}-{digits}",
        source=SOURCE,
        task_type="exact_match",
        prompt=prompt_of(digits),
        gold_standard_solution="".join(sorted(digits)),
    )
