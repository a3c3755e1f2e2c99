"""The verifier of predicted outputs: the JSON or Python literal that an answer ends with.

The expected value is `verification_info["output"]`, or the value of the gold standard. An answer is
the last fenced block, or without one the last line; an object with the single key "output" stands
for its value.
"""

import ast
import json
from typing import Any

from muster.protocol.errors import TaskError
from muster.tasks.completions import are_equal, as_json, last_block, nesting
from muster.tasks.problem import Problem
from muster.tasks.verifier import Grade, Graded, Undecided, Verifier

MAX_LITERAL_CHARS = 16_384
"""Most characters of a literal; a longer one is wrong without being read."""
MAX_NESTING = 50
"""Deepest nesting of brackets."""
LANGUAGES = frozenset({"", "json", "python", "py", "text"})
"""Languages that a fence may name."""


def grade_output_prediction(problem: Problem, completion: str) -> Grade:
    """Return 1 when the answer is the expected value, else 0."""
    try:
        expected = expected_output(problem)
    except TaskError as error:
        return Undecided(str(error))
    block = last_block(completion, LANGUAGES)
    if block is None and "```" in completion:
        return Graded(0.0, "the last fenced block is not closed, or in another language")
    text = block if block is not None else completion.rstrip().rpartition("\n")[2]
    try:
        found = _unwrapped(parse_literal(text))
    except ValueError as error:
        # A parser's limits depend on the build of Python, and its memory on the machine.
        is_limit = isinstance(error.__cause__, MemoryError | RecursionError)
        return Graded(0.0, f"the answer is no literal: {error}", is_repeatable=not is_limit)
    return Graded(float(are_equal(found, expected)))


def parse_literal(text: str) -> Any:
    """Return the JSON value of a text, or of a Python literal; raises ValueError on any other."""
    text = text.strip()
    if len(text) > MAX_LITERAL_CHARS:
        raise ValueError(f"longer than {MAX_LITERAL_CHARS} characters")
    if nesting(text) > MAX_NESTING:
        raise ValueError(f"nested deeper than {MAX_NESTING}")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    except ValueError:
        pass
    try:
        return as_json(ast.literal_eval(text))
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"neither JSON nor Python ({type(error).__name__})") from error


def _unwrapped(value: Any) -> Any:
    is_wrapped = isinstance(value, dict) and value.keys() == {"output"}
    return value["output"] if is_wrapped else value


def expected_output(problem: Problem) -> Any:
    """Return the expected value; raises TaskError when the problem states none."""
    if "output" in problem.verification_info:
        return problem.verification_info["output"]
    gold = problem.gold_standard_solution
    try:
        if gold is not None:
            return _unwrapped(parse_literal(gold))
    except ValueError as error:
        raise TaskError(f"the gold standard of {problem.problem_id!r} is {error}") from error
    raise TaskError(f"problem {problem.problem_id!r} states no expected output")


def check_output_prediction(problem: Problem) -> None:
    """Raise TaskError unless the problem states an expected value."""
    expected_output(problem)


def right_completion(problem: Problem) -> str:
    """Return a completion that holds the expected value."""
    return json.dumps({"output": expected_output(problem)})


VERIFIER = Verifier(
    name="output_prediction",
    version="2",
    grade=grade_output_prediction,
    check=check_output_prediction,
    right_completion=right_completion,
    sources=(__name__, "muster.tasks.completions"),
)
"""The verifier of the task type `code_output_prediction`."""
