"""Rows of other people's data sets as problems: GENESYS, SYNTHETIC-1, or columns of any names.

What a row says in an unexpected form is read where there is one meaning (dictionaries written as
text, numbers as ids) and refused where there is none.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from muster.protocol.errors import EncodingError
from muster.tasks.literals import nesting
from muster.tasks.problem import Problem

MAX_TEXT_CHARS = 1024 * 1024
"""A dictionary in a longer text is refused unread."""
MAX_LITERAL_PARTS = 50_000
"""Commas and colons of a Python literal: its syntax tree takes a kilobyte for each."""
MAX_NESTING = 50
"""Brackets within brackets, in a Python literal."""
FIELDS = tuple(Problem.model_fields)
"""Columns that become fields of a problem."""
_STRINGS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_OBJECTS = ("verification_info", "metadata")
_TEXTS = ("problem_id", "in_source_id", "source", "task_type", "gold_standard_solution")


@dataclass(frozen=True)
class Columns:
    """Where a problem's fields are found in a row."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Columns by the field that they become, where names differ."""
    fixed: Mapping[str, str] = field(default_factory=dict)
    """Fields that are the same in every row and come from no column."""

    @cached_property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Fields and the columns they are found in."""
        return tuple((name, self.renamed.get(name, name)) for name in FIELDS)

    def unused(self, row: Mapping[str, Any]) -> set[str]:
        """Return the columns of a row that become nothing."""
        return {str(name) for name in row} - {column for _, column in self.places}


def encode_row(row: Any, columns: Columns, *, number: int) -> tuple[str, bytes]:
    """Return the id and the canonical JSON of the problem in a row.

    A row without an id is called after its number. Raises EncodingError when it is no problem.
    """
    if not isinstance(row, Mapping):
        raise EncodingError(f"the row is a {type(row).__name__}, not an object")
    found = {name: row[column] for name, column in columns.places if row.get(column) is not None}
    fields = {**columns.fixed, **found}
    fields.setdefault("problem_id", f"row-{number}")
    for name in _OBJECTS:
        if type(value := fields.get(name)) is str:
            fields[name] = parse_object(name, value)
    for name in _TEXTS:
        if type(value := fields.get(name)) is int:
            fields[name] = str(value)
    return fields["problem_id"], Problem.encode(fields)


def parse_object(name: str, text: str) -> dict[str, Any]:
    """Return the dictionary that a text spells as JSON or as Python; an empty one for no text.

    Raises EncodingError on any other text; `name` is what the field is called.
    """
    if not text.strip():
        return {}
    if len(text) > MAX_TEXT_CHARS:
        raise EncodingError(f"{name}: a text of more than {MAX_TEXT_CHARS} characters")
    value = _value_of(name, text)
    if not isinstance(value, dict):
        raise EncodingError(f"{name}: the text holds a {type(value).__name__}, not an object")
    return value


def _value_of(name: str, text: str) -> Any:
    if not text.startswith("{'"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
    if len(text) > MAX_NESTING and _is_large(_STRINGS.sub("", text)):
        raise EncodingError(
            f"{name}: a Python literal of more than {MAX_LITERAL_PARTS} parts, "
            f"or nested deeper than {MAX_NESTING}"
        )
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise EncodingError(f"{name}: the text is neither JSON nor a Python literal") from error


def _is_large(literal: str) -> bool:
    return (
        literal.count(",") + literal.count(":") > MAX_LITERAL_PARTS
        or nesting(literal) > MAX_NESTING
    )
