"""Reads completions: the end of a thought, the last fenced block, the last call, a JSON value.

For verifiers of programs and of predicted outputs, which compare values by `are_equal`.
"""

import json
import math
import re
from typing import Any

THOUGHT_END = "</think>"
"""End of a model's thought; the answer comes after it."""
MAX_PROGRAM_CHARS = 65_536
"""Most characters of a program; a longer one is wrong without being read."""
MAX_CALL_CHARS = 8 * MAX_PROGRAM_CHARS
"""Most characters of a call: JSON needs at most six per character."""
# Possessive, so that a run of blanks takes linear time: a search holds Python's lock.
_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([A-Za-z0-9_+-]*+)[ \t]*+\r?$", re.MULTILINE)


def last_block(completion: str, languages: frozenset[str]) -> str | None:
    """Return the last fenced block; None when there is none, or it is not closed, too long or in
    another language.

    Blocks before the end of a thought are drafts.
    """
    text = completion.rpartition(THOUGHT_END)[2]
    opened: re.Match[str] | None = None
    found: str | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened, found = fence, None
        elif not fence[1]:
            block = text[opened.end() + 1 : fence.start()]
            is_wanted = opened[1].lower() in languages and len(block) <= MAX_PROGRAM_CHARS
            opened, found = None, block if is_wanted else None
    return found


_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
CALL, CALL_END = "<tool_call>", "</tool_call>"
"""Marks around a call, in model families that mark calls."""


def last_call(completion: str, name: str, argument: str) -> str | None:
    """Return a text argument of the last call of a function; None when there is none.

    A call is a JSON object with `name`, and `arguments` or `parameters`. It stands between marks,
    as in Qwen's family, or it is the whole turn, alone or last in a list, as in Llama's and
    Mistral's. Calls before the end of a thought are drafts.
    """
    text = completion.rpartition(THOUGHT_END)[2]
    before, is_marked, _ = text.rpartition(CALL_END)
    written = before.rpartition(CALL)[2] if is_marked else text
    # How deep a parser gets depends on who calls it.
    if len(written) > MAX_CALL_CHARS or _deepest(_STRING.sub("", written)) > MAX_DEPTH:
        return None
    try:
        called = json.loads(written)
    except ValueError:
        return None
    if isinstance(called, list) and called:
        called = called[-1]
    if not isinstance(called, dict) or called.get("name") != name:
        return None
    given = called.get("arguments", called.get("parameters"))
    value = given.get(argument) if isinstance(given, dict) else None
    return value if isinstance(value, str) and len(value) <= MAX_PROGRAM_CHARS else None


RELATIVE_TOLERANCE = 1e-9
"""Relative tolerance for floats: sums in another order differ in the last bits."""
MAX_DEPTH = 100
"""Deepest nesting of values; deeper ones are unequal."""


def are_equal(one: Any, other: Any, depth: int = MAX_DEPTH) -> bool:
    """Return whether two JSON values are equal; true is not equal to 1, but 1 is to 1.0."""
    if not depth:
        return False
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return _are_equal_numbers(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(are_equal(a, b, depth - 1) for a, b in pairs)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            are_equal(value, other[key], depth - 1) for key, value in one.items()
        )
    return bool(one == other)


def _are_equal_numbers(one: float, other: float) -> bool:
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    try:
        return math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE)
    except OverflowError:
        return False


def nesting(text: str) -> int:
    """Return the nesting of brackets and signs; those in strings count too."""
    return max(_deepest(text), text.count("--"), text.count("- -"), text.count("~"))


def _deepest(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def as_json(value: Any) -> Any:
    """Return a Python literal's value as a JSON value; raises ValueError if there is none."""
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("an object's keys are text")
        return {key: as_json(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"a {type(value).__name__} has no JSON")
