"""Imports rows of existing data sets into a task set's document: GENESYS, SYNTHETIC-1, any columns.

A value in an unexpected form is read if its meaning is clear (dictionaries written as text, numbers
as ids). Otherwise the row is bad: it is reported by its number and the reason, and refused or left
out.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from muster.protocol.errors import EncodingError, TaskError
from muster.protocol.ids import Hash32
from muster.tasks.completions import nesting
from muster.tasks.document import HEADER_FIELDS, Added, DocumentWriter
from muster.tasks.problem import Problem
from muster.tasks.row_files import OBJECTS, Unreadable

MOST_NAMED = 20
"""Most bad rows that are reported."""
MOST_COLUMNS = 64
PROGRESS_ROWS = 1000
"""Rows between two progress reports."""
MAX_TEXT_CHARS = 1024 * 1024
"""Most characters of a dictionary as text; a longer one is not read."""
MAX_LITERAL_PARTS = 50_000
"""Most commas and colons of a Python literal: its syntax tree takes a kilobyte for each."""
MAX_NESTING = 50
"""Deepest nesting of brackets in a Python literal."""
FIELDS = tuple(Problem.model_fields)
"""Columns that become fields of a problem."""
_STRINGS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_TEXTS = ("problem_id", "in_source_id", "source", "task_type", "gold_standard_solution")


# --------------------------------------------------------------------------------------- a row


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
        """Return the columns of a row that are not used."""
        return {str(name) for name in row} - {column for _, column in self.places}


def encode_row(row: Any, columns: Columns, *, number: int) -> tuple[str, bytes]:
    """Return the id and the canonical JSON of the problem in a row.

    A row without an id gets one from its number. Raises EncodingError when it is no problem.
    """
    if not isinstance(row, Mapping):
        raise EncodingError(f"the row is a {type(row).__name__}, not an object")
    found = {name: row[column] for name, column in columns.places if row.get(column) is not None}
    fields = {**columns.fixed, **found}
    fields.setdefault("problem_id", f"row-{number}")
    for name in OBJECTS:
        if type(value := fields.get(name)) is str:
            fields[name] = parse_object(name, value)
    for name in _TEXTS:
        if type(value := fields.get(name)) is int:
            fields[name] = str(value)
    return fields["problem_id"], Problem.encode(fields)


def parse_object(name: str, text: str) -> dict[str, Any]:
    """Return the dictionary that a text holds as JSON or Python; an empty one for an empty text.

    Raises EncodingError on any other text; `name` is the name of the field.
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


# -------------------------------------------------------------------------------------- all rows


@dataclass(slots=True)
class Imported:
    """Result of an import."""

    rows: int = 0
    """Rows that were read."""
    problems: int = 0
    """Rows that are in the task set."""
    repeated: int = 0
    """Rows left out because the same problem occurred before, as in data sets of many answers."""
    bad: int = 0
    """Rows that are no problem."""
    named: list[tuple[int, str]] = field(default_factory=list)
    """Number (from 1) and reason of the first bad rows."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Bad rows by field or kind of fault."""
    unused: set[str] = field(default_factory=set)
    """Columns that were not used."""
    columns: Set[str] = frozenset()
    """Columns of the previous row."""
    root: Hash32 | None = None
    """The task set's root; none when it was not written."""


@dataclass(frozen=True, slots=True)
class Import:
    """The plan of an import."""

    out: Path
    """File that the document is written to."""
    name: str
    """The set's name."""
    version: str
    """The set's version."""
    columns: Columns = field(default_factory=Columns)
    """The columns of the fields."""
    skip_bad: bool = False
    """Whether bad rows are left out; else a single one makes the import fail."""
    limit: int | None = None
    """Stop after so many problems."""


def import_rows(
    rows: Iterable[Any], plan: Import, on_progress: Callable[[int], None] = lambda _rows: None
) -> Imported:
    """Write the task set of these rows, and return the result.

    Nothing is written when a row is bad, unless bad rows are skipped. Raises TaskError when no
    problem is left, StorageError when the disk fails.
    """
    found = Imported()
    with DocumentWriter(plan.out, plan.name, plan.version) as writer:
        for row in rows:
            if (
                found.rows == 0
                and isinstance(row, dict)
                and row.keys() - {"parts"} == HEADER_FIELDS
            ):
                continue  # the header of a task set's document
            found.rows += 1
            _take(row, writer, plan, found)
            if found.rows % PROGRESS_ROWS == 0:
                on_progress(found.rows)
            if plan.limit is not None and len(writer) >= plan.limit:
                break
        found.problems = len(writer)
        on_progress(found.rows)
        if found.bad and not plan.skip_bad:
            return found
        if not found.problems:
            raise TaskError(f"no row of {found.rows} is a problem")
        found.root = writer.finish()
    return found


def _take(row: Any, writer: DocumentWriter, plan: Import, found: Imported) -> None:
    try:
        if isinstance(row, Unreadable):
            raise EncodingError(row.reason)
        problem_id, line = encode_row(row, plan.columns, number=found.rows)
        added = writer.add(problem_id, line)
        if added is Added.CLASH:
            raise EncodingError(f"problem_id: {added.value}")
    except EncodingError as error:
        _refuse(found, str(error))
        return
    found.repeated += added is Added.REPEATED
    if row.keys() != found.columns and len(found.unused) < MOST_COLUMNS:
        found.columns = row.keys()
        found.unused |= plan.columns.unused(row)


def _refuse(found: Imported, reason: str) -> None:
    found.bad += 1
    found.reasons[reason.partition(":")[0][:64]] += 1
    if len(found.named) < MOST_NAMED:
        found.named.append((found.rows, reason[:200]))
