"""Toy tasks that a tiny model learns within seconds: short prompts, answers graded exactly.

Each makes `count` different problems by seed. Length budgets are in the recipe (`target_lengths`)
and in every ticket, so every toy task can be trained with budgets.

    3172=     1237    sort digits: the demo's task (`configs/demo.toml`)
    37*12=    444     multiply with a tool, which a 0.1M-parameter model cannot do without
    abcd~     dcba    reverse letters
    17+25=    42      add or subtract
"""

import random
import string
from collections.abc import Callable

from muster.protocol.errors import TaskError
from muster.tasks.problem import Problem
from muster.tasks.task_set import TaskSet

FACTORS = range(10, 100)
"""Range of the numbers that are multiplied."""
LETTERS = 4
"""Number of letters that are reversed."""
DIGITS = 2
"""Digits of each number that is added or subtracted."""
_SORT = "sort-digits"
_CALCULATOR = "calculator"


# ----------------------------------------------------------------------------------- sort digits


def make_sort(count: int, seed: int, *, digits: int = 4, without: TaskSet | None = None) -> TaskSet:
    """Return problems such as `3172=`, whose answer is `1237`; none of them is in `without`.

    Raises TaskError when there are not enough inputs of that many digits.
    """
    taken = {problem.prompt for problem in without} if without else set()
    inputs = [f"{number:0{digits}d}" for number in range(10**digits)]
    free = [text for text in inputs if sort_prompt(text) not in taken]
    if count > len(free):
        raise TaskError(f"there are only {len(free)} inputs of {digits} digits, not {count}")
    chosen = random.Random(f"{_SORT} {digits} {seed}").sample(free, count)
    name = f"{_SORT}-{digits}" + ("-held-out" if without else "")
    problems = (_problem(_SORT, text, sort_prompt(text), "".join(sorted(text))) for text in chosen)
    return TaskSet.of(name, f"seed-{seed}", problems)


def split_sort(
    training: int, held_out: int, seed: int, *, digits: int = 4
) -> tuple[TaskSet, TaskSet]:
    """Return a training and a held-out task set that share no input."""
    first = make_sort(training, seed, digits=digits)
    return first, make_sort(held_out, seed, digits=digits, without=first)


def sort_prompt(digits: str) -> str:
    """Return the prompt."""
    return f"{digits}="


# ------------------------------------------------------------------------- multiply with a tool


def split_products(training: int, held_out: int, seed: int) -> tuple[TaskSet, TaskSet]:
    """Return a training and a held-out task set that share no product.

    Raises TaskError when there are not enough of them.
    """
    pairs = [(a, b) for a in FACTORS for b in FACTORS]
    if training + held_out > len(pairs):
        raise TaskError(f"there are only {len(pairs)} products, not {training + held_out}")
    drawn = random.Random(f"{_CALCULATOR} {seed}").sample(pairs, training + held_out)
    problems = [
        _problem(
            _CALCULATOR, f"{a}-{b}", product_prompt(a, b), str(a * b), "exact_match_with_python"
        )
        for a, b in drawn
    ]
    return (
        TaskSet.of(_CALCULATOR, f"seed-{seed}", problems[:training]),
        TaskSet.of(f"{_CALCULATOR}-held-out", f"seed-{seed}", problems[training:]),
    )


def product_prompt(a: int, b: int) -> str:
    """Return the prompt."""
    return f"{a}*{b}="


# ------------------------------------------------------------------------- letters and numbers


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
    # Drawing until all are different becomes slow when most possible problems are used.
    if count > possible // 2:
        raise TaskError(f"{name} makes up to {possible // 2} different problems, not {count}")
    source, answers = random.Random(f"{name} {seed}"), dict[str, str]()
    while len(answers) < count:
        prompt, answer = draw(source)
        answers[prompt] = answer
    problems = (_problem(name, prompt[:-1], prompt, answer) for prompt, answer in answers.items())
    return TaskSet.of(name, f"seed-{seed}", problems)


def _problem(
    source: str, number: str, prompt: str, answer: str, task_type: str = "exact_match"
) -> Problem:
    return Problem(
        problem_id=f"{source}-{number}",
        source=source,
        task_type=task_type,
        prompt=prompt,
        gold_standard_solution=answer,
    )
