"""Exercises of three kinds, with worked solutions that are right or have typical human errors.

    math    sums, differences and comparisons; the answer in \\boxed{}
    code    functions of one number, as Python programs
    words   reasoning-gym's `spell_backward`; the answer between <answer> and </answer>

A solution is a thought, `</think>` and an answer. Knows nothing of models.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from muster.tasks import Problem
from muster.tasks.reasoning_gym import make_problems

BUDGETS = (30, 42)
"""Length budgets of mathematics, in tokens of a whole completion."""
THOUGHT_END = "\n</think>\n\n"
LONGEST_WORD = 5
INPUTS = (-3, 4, 11, 60)
"""Arguments with which a function is tested."""

Solve = Callable[[random.Random, bool], tuple[str, str]]
"""Draws a thought and an answer, right or wrong."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """A problem, and how it is solved."""

    problem: Problem
    """Problem in the form of a task set."""
    solve: Solve
    """Draws a solution."""

    def completion(self, rng: random.Random, *, is_right: bool) -> str:
        """Return a worked solution as a model writes it, after the `<think>` of its prompt."""
        thought, answer = self.solve(rng, is_right)
        return f"{thought}{THOUGHT_END}{answer}"


# ---------------------------------------------------------------------------------------- math


def draw_math(rng: random.Random) -> Exercise:
    """Return a sum, a difference or a comparison."""
    return rng.choice([_sum, _difference, _comparison])(rng)


def _sum(rng: random.Random) -> Exercise:
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)

    def solve(rng: random.Random, is_right: bool) -> tuple[str, str]:
        ones = a % 10 + b % 10
        carry = ones // 10
        tens = a // 10 + b // 10 + carry
        carried = f"+{carry}" if carry else ""
        if not is_right:
            # A carry is forgotten, or a digit is wrong.
            slip = -carry if carry and rng.random() < 0.5 else rng.choice([-1, 1])
            tens, carried = tens + slip, "" if slip == -carry else carried
        result = 10 * tens + ones % 10
        thought = f"{a}+{b}: {a % 10}+{b % 10}={ones}, {a // 10}+{b // 10}{carried}={tens}"
        return _checked(thought, f"{result}-{b}={a}", rng), _boxed(result)

    return _math(f"{a}+{b}", f"Calculate {a}+{b}.", a + b, solve)


def _difference(rng: random.Random) -> Exercise:
    b, a = sorted((rng.randrange(10, 100), rng.randrange(10, 100)))

    def solve(rng: random.Random, is_right: bool) -> tuple[str, str]:
        borrow = a % 10 < b % 10
        ones = a % 10 + 10 * borrow - b % 10
        top = a // 10 - borrow
        if not is_right:
            # A borrow is forgotten, or a digit is wrong.
            if borrow and rng.random() < 0.5:
                top += 1
            else:
                ones = (ones + rng.choice([-1, 1])) % 10
        result = 10 * (top - b // 10) + ones
        digits = f"{a % 10 + 10 * borrow}-{b % 10}={ones}, {top}-{b // 10}={top - b // 10}"
        thought = f"{a}-{b}: {digits}"
        return _checked(thought, f"{result}+{b}={a}", rng), _boxed(result)

    return _math(f"{a}-{b}", f"Calculate {a}-{b}.", a - b, solve)


def _comparison(rng: random.Random) -> Exercise:
    one, other = rng.sample(range(100, 1000), 2)
    if rng.random() < 0.5:  # alike at first sight
        other = one // 100 * 100 + rng.choice([n for n in range(100) if n != one % 100])
    larger = max(one, other)

    def solve(rng: random.Random, is_right: bool) -> tuple[str, str]:
        pairs = list(zip(str(one), str(other), strict=True))
        place = next(i for i, (a, b) in enumerate(pairs) if a != b)
        signs = [f"{a}{'=' if a == b else '>' if a > b else '<'}{b}" for a, b in pairs]
        thought = f"{one}, {other}: " + ", ".join(signs[: place + 1])
        said = larger if is_right else min(one, other)
        return _checked(thought, f"{said}>{min(one, other)}", rng), _boxed(said)

    return _math(f"{one}?{other}", f"Which is larger, {one} or {other}?", larger, solve)


def _checked(thought: str, check: str, rng: random.Random) -> str:
    """Return a thought, half of the times with a check at its end, which finds no fault."""
    return thought + (f". Check: {check}" if rng.random() < 0.5 else "")


def _boxed(result: int) -> str:
    return f"\\boxed{{{result}}}"


def _math(name: str, question: str, answer: int, solve: Solve) -> Exercise:
    problem = Problem(
        problem_id=f"math-{name}",
        task_type="verifiable_math",
        prompt=f"{question} Put the answer in \\boxed{{}}.",
        gold_standard_solution=str(answer),
        verification_info={"ground_truth": str(answer)},
    )
    return Exercise(problem, solve)


# ---------------------------------------------------------------------------------------- code

RULES = (
    ("{a} times x, plus {b}", "{a} * x + {b}", "{b} * x + {a}"),
    ("{a} times x, minus {b}", "{a} * x - {b}", "{a} * x + {b}"),
    ("the sum of x and {a}, times {b}", "(x + {a}) * {b}", "x + {a} * {b}"),
    ("{a} minus x, times {b}", "({a} - x) * {b}", "{a} - x * {b}"),
    ("the larger of x and {a}, plus {b}", "max(x, {a}) + {b}", "max(x, {a} + {b})"),
    ("x modulo {a}, minus {b}", "x % {a} - {b}", "x // {a} - {b}"),
)
"""Rules of functions: in words, as an expression, and as a typical wrong expression."""
CONSTANTS = range(2, 30)


def draw_code(rng: random.Random) -> Exercise:
    """Return a function to write."""
    words, right, wrong = rng.choice(RULES)
    a, b = rng.sample(CONSTANTS, 2)
    text, expression = words.format(a=a, b=b), right.format(a=a, b=b)

    def solve(rng: random.Random, is_right: bool) -> tuple[str, str]:
        said = expression if is_right else _misread(a, b, rng.choice([right, wrong]), wrong, rng)
        return f"{text}: {said}", f"```python\ndef f(x):\n    return {said}\n```"

    problem = Problem(
        problem_id=f"code-{text}".replace(" ", "-").replace(",", ""),
        task_type="verifiable_code",
        prompt=f"Write a Python function f(x) that returns {text}.",
        gold_standard_solution=solve(rng, True)[1],
        verification_info={
            "language": "python",
            "test_cases": [
                {"type": "function_call", "fn_name": "f", "input": [x], "output": value}
                for x in INPUTS
                for value in [eval(expression, {"x": x, "max": max})]
            ],
        },
    )
    return Exercise(problem, solve)


def _misread(a: int, b: int, form: str, wrong: str, rng: random.Random) -> str:
    """Return an expression with its rule or one of its numbers misread."""
    if form == wrong:
        return wrong.format(a=a, b=b)
    return form.format(a=a, b=rng.choice([n for n in CONSTANTS if n != b]))


# --------------------------------------------------------------------------------------- words


def spelling(problem: Problem) -> Exercise:
    """Return a problem of `spell_backward` with its solutions."""
    word = problem.verification_info["entry"]["metadata"]["word"]

    def solve(rng: random.Random, is_right: bool) -> tuple[str, str]:
        letters = list(word[::-1])
        if not is_right:
            letters = _misspelled(letters, rng)
        return (
            f"{word}: {' '.join(word)}, {' '.join(letters)}",
            f"<answer>{''.join(letters)}</answer>",
        )

    return Exercise(problem, solve)


def _misspelled(letters: list[str], rng: random.Random) -> list[str]:
    """Return letters of which two neighbours change places, or one is left out."""
    at = rng.randrange(len(letters) - 1)
    if rng.random() < 0.5 and letters[at] != letters[at + 1]:
        return [*letters[:at], letters[at + 1], letters[at], *letters[at + 2 :]]
    return letters[:at] + letters[at + 1 :]


def short_words(count: int, seed: int) -> Iterator[Exercise]:
    """Yield the exercises with short words among `count` of `spell_backward`."""
    for problem in make_problems("spell_backward", count, seed):
        if len(problem.verification_info["entry"]["metadata"]["word"]) <= LONGEST_WORD:
            yield spelling(problem)
