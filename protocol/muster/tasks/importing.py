"""Rows into a task set's document. Bad ones are named by number and reason, and refused or left
out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.protocol.errors import EncodingError, TaskError
from muster.protocol.ids import Hash32
from muster.tasks.row_files import Unreadable
from muster.tasks.rows import Columns, encode_row
from muster.tasks.writing import Added, DocumentWriter

MOST_NAMED = 20
"""Bad rows that are named."""
MOST_COLUMNS = 64
PROGRESS_ROWS = 1000
"""Progress is told every so many rows."""
_HEADER = {"count", "name", "schema_version", "version"}


@dataclass(slots=True)
class Imported:
    """What became of the rows."""

    rows: int = 0
    """Rows that were read."""
    problems: int = 0
    """Rows that are in the task set."""
    repeated: int = 0
    """Rows left out because the same problem came before; data sets with many answers have them."""
    bad: int = 0
    """Rows that are no problem."""
    named: list[tuple[int, str]] = field(default_factory=list)
    """Number, from 1, and reason of the first bad rows."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Bad rows by field or kind of fault."""
    unused: set[str] = field(default_factory=set)
    """Columns that became nothing."""
    columns: Set[str] = frozenset()
    """Of the row before."""
    root: Hash32 | None = None
    """The task set's root; none when it was not written."""


@dataclass(frozen=True, slots=True)
class Import:
    """How rows become a task set."""

    out: Path
    """Receives the document."""
    name: str
    """The set's name."""
    version: str
    """The set's version."""
    columns: Columns = field(default_factory=Columns)
    """Where fields are found."""
    skip_bad: bool = False
    """Whether bad rows are left out; else one refuses them all."""
    limit: int | None = None
    """Stop after so many problems."""


def import_rows(
    rows: Iterable[Any], plan: Import, on_progress: Callable[[int], None] = lambda _rows: None
) -> Imported:
    """Write the task set of these rows, and return what became of each.

    Nothing is written when a row is bad, unless bad rows are skipped. Raises TaskError when no
    problem is left, StorageError when the disk fails.
    """
    found = Imported()
    with DocumentWriter(plan.out, plan.name, plan.version) as writer:
        for row in rows:
            if found.rows == 0 and isinstance(row, dict) and row.keys() == _HEADER:
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
