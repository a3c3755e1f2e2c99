"""What tiny base models are warmed up on: demonstrations of a task that are mostly not right.

The supervised optimum is to reproduce the mixture, so a model starts at a low reward however long
it is warmed up, and reinforcement learning has to find what is right. Only the demo, the examples
and tests use these; the trainer takes any causal language model folder.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from muster.protocol.errors import ConfigError
from muster.tasks import TaskSet, calculator, render_prompt
from muster.tasks.calculator import FACTORS
from muster.tasks.environments.python_tool import AFTER, BEFORE
from muster.tasks.math.extraction import THOUGHT_END
from muster.tasks.problem import Problem
from muster.tasks.sort_digits import make_split, prompt_of

BUDGETS = (8, 12, 16, 20)
"""Length budgets of the lesson `length`, those of configs/example-length.toml."""
LONGEST_THOUGHT = 18
"""Dots of its longest demonstration."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A sequence to learn from."""

    prompt: str
    """What is asked."""
    parts: tuple[tuple[str, bool], ...]
    """What follows, piece by piece, and whether the piece is to be learned: replies are not."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A task, and demonstrations of it."""

    pieces: tuple[str, ...]
    """What the tokenizer knows, each a token; anything else is <unk>."""
    demonstrate: Callable[[random.Random, float], Demonstration]
    """Draws a demonstration that is right with this probability."""
    split: Callable[[int, int, int], tuple[TaskSet, TaskSet]]
    """Returns so many training and held-out problems, by a seed."""


# sort: the demo


def sort_answer(digits: str, rng: random.Random, right: float) -> str:
    """Return the digits sorted with probability `right`, else in another order."""
    if rng.random() < right:
        return "".join(sorted(digits))
    return rng.choice([_descending, _reversed, _shuffled])(digits, rng)


def _descending(text: str, _rng: random.Random) -> str:
    return "".join(sorted(text, reverse=True))


def _reversed(text: str, _rng: random.Random) -> str:
    return text[::-1]


def _shuffled(text: str, rng: random.Random) -> str:
    return "".join(rng.sample(text, len(text)))


def _digits(rng: random.Random) -> str:
    return f"{rng.randrange(10_000):04d}"


def _demonstrate_sorting(rng: random.Random, right: float) -> Demonstration:
    digits = _digits(rng)
    return Demonstration(prompt_of(digits), ((sort_answer(digits, rng, right), True),))


# length: sort after a thought of dots; how many has nothing to do with the budget


def _demonstrate_thinking(rng: random.Random, right: float) -> Demonstration:
    digits = _digits(rng)
    problem = Problem(problem_id="-", task_type="-", prompt=prompt_of(digits))
    thought = "." * rng.randint(0, LONGEST_THOUGHT) + THOUGHT_END
    answer = sort_answer(digits, rng, right)
    return Demonstration(render_prompt(problem, rng.choice(BUDGETS)), ((thought + answer, True),))


_REQUEST = render_prompt(Problem(problem_id="-", task_type="-", prompt="-"), 0)[1:].split("0")
"""The words around a budget, each of them a token."""

# calculator: have the Python tool multiply and copy what it says; or guess, ask or copy wrongly

CALL, CALLED = "```python\nprint(", ")\n```"


def _demonstrate_calling(rng: random.Random, right: float) -> Demonstration:
    a, b = rng.choice(FACTORS), rng.choice(FACTORS)
    prompt = calculator.prompt_of(a, b)
    if rng.random() < right:
        return Demonstration(prompt, _called(f"{a}*{b}", a * b, str(a * b)))
    way = rng.choice(["guess", "guess", "ask wrongly", "copy wrongly"])
    if way == "guess":
        return Demonstration(prompt, ((str(rng.randrange(100, 10_000)), True),))
    if way == "ask wrongly":
        return Demonstration(prompt, _called(f"{a}+{b}", a + b, str(a + b)))
    return Demonstration(prompt, _called(f"{a}*{b}", a * b, _shuffled(str(a * b), rng)))


def _called(program: str, output: int, answer: str) -> tuple[tuple[str, bool], ...]:
    call = f"{CALL}{program}{CALLED}"
    return ((call, True), (f"{BEFORE}{output}{AFTER}", False), (answer, True))


LESSONS: Mapping[str, Lesson] = {
    "calculator": Lesson(
        (*"0123456789*+=", CALL, CALLED, BEFORE, AFTER), _demonstrate_calling, calculator.make_split
    ),
    "sort": Lesson(tuple("0123456789= |"), _demonstrate_sorting, make_split),
    "length": Lesson((*"0123456789=.", THOUGHT_END, *_REQUEST), _demonstrate_thinking, make_split),
}
"""The lessons by name."""


def lesson_of(name: str) -> Lesson:
    """Return a lesson; raises ConfigError when there is none of that name."""
    if name not in LESSONS:
        raise ConfigError(f"no lesson is called {name!r}", hint=f"there are {', '.join(LESSONS)}")
    return LESSONS[name]
