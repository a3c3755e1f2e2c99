"""Statements written with SQLAlchemy Core, turned into SQL once, when their modules are imported.

Names of tables and columns are checked at import. Later a statement is just SQL for both databases
and a dictionary of values, without SQLAlchemy.

When a database is unreachable, all requests fail until it is back. When it refuses a row, only the
owner of the row gets an error; others must not wait.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sqlalchemy import ClauseElement, Column, ColumnElement, Table, bindparam, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.engine import Dialect

from muster.protocol.errors import StorageError, StorageFailed, may_pass

DIALECTS: dict[str, Dialect] = {
    "sqlite": sqlite.dialect(paramstyle="named"),
    "postgresql": postgresql.dialect(),  # type: ignore[no-untyped-call]
}
Rows = Sequence[tuple[Any, ...]]
"""The rows of a statement; empty for one that returns none."""


@dataclass(frozen=True, slots=True)
class Sql:
    """One statement's SQL for each database, with named parameters."""

    sqlite: str
    postgresql: str
    has_rows: bool
    """Whether it returns rows."""


class Statement(NamedTuple):
    """A statement with its values."""

    sql: Sql
    values: Mapping[str, object]
    """The values by parameter name."""


class Queryable(Protocol):
    """A transaction, or a connection."""

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Run statements in order, in one round trip; return the rows of each."""


class Query:
    """A prepared statement; call it with the values of its `bindparam`s."""

    def __init__(self, expression: ClauseElement) -> None:
        """Raises SQLAlchemy's CompileError if one of the databases does not support the
        expression."""
        made = {name: expression.compile(dialect=each) for name, each in DIALECTS.items()}
        sql = {name: " ".join(str(each).split()) for name, each in made.items()}
        params = {name: value for each in made.values() for name, value in each.params.items()}
        self._constants = {name: value for name, value in params.items() if value is not None}
        self._names = params.keys() - self._constants.keys()
        has_rows = sql["sqlite"].startswith("SELECT") or "RETURNING" in sql["sqlite"]
        self._sql = Sql(sql["sqlite"], sql["postgresql"], has_rows)

    def __call__(self, **values: object) -> Statement:
        """Return the statement with its values; raises TypeError for wrong parameter names."""
        if values.keys() != self._names:
            raise TypeError(f"the statement has values {sorted(self._names)}, not {sorted(values)}")
        return Statement(self._sql, values | self._constants if self._constants else values)


def plain(sql: str, **values: object) -> Statement:
    """Return a statement from raw SQL, for which SQLAlchemy has no expression; `:name` is a
    parameter."""
    return Query(text(sql))(**values)


def columns(table: Table, row: type) -> list[Column[Any]]:
    """Return the columns with the names of a dataclass's fields, in their order."""
    return [table.c[field.name] for field in fields(row)]


def given(table: Table, *names: str) -> list[ColumnElement[bool]]:
    """Return conditions `column = :column` for the named columns."""
    return [table.c[name] == bindparam(name) for name in names]


def new_row(table: Table, *names: str) -> Insert:
    """Return an INSERT of the named columns, or of all columns if none is named."""
    return insert(table).values({name: bindparam(name) for name in names or table.c.keys()})


def latest_row(table: Table) -> Query:
    """Return an upsert: it replaces the row with the same primary key."""
    row = new_row(table)
    said = {each.name: row.excluded[each.name] for each in table.c if not each.primary_key}
    return Query(
        row.on_conflict_do_update(index_elements=list(table.primary_key.columns), set_=said)
    )


# Meaning of failures


def is_url(place: Path | str) -> bool:
    """Return whether a database's place is a server's URL rather than a file's path."""
    return str(place).startswith(("postgresql:", "postgres:"))


class RowError(StorageError):
    """The database works but refused one caller's statement; other callers are still served."""

    def __init__(self, message: str, *, is_busy: bool = False) -> None:
        """`is_busy` means that only a lock or a timeout was the cause, so a retry may succeed."""
        super().__init__(message)
        self.is_busy = is_busy


UNHOLDABLE = (OverflowError, UnicodeError)
"""Errors of both drivers about a value that they cannot send: a large integer, a lone surrogate."""
_OF_A_ROW = frozenset({"DataError", "IntegrityError"})
"""Exception names of PEP 249: a value that a column cannot hold, or a key that exists."""
_BUSY_STATES = ("40", "55", "57014")
"""PostgreSQL's SQLSTATE prefixes for a rollback such as a deadlock, a lock, a statement timeout."""
_TOO_LARGE_STATE = "54"
"""PostgreSQL's SQLSTATE prefix for exceeded limits, such as a value too large for an index page."""
_PASSWORD = re.compile(r"(//[^:/@]*):[^/]*@")


def failure(place: Path | str, error: Exception) -> StorageError:
    """Return the error for an exception of a database's driver: RowError if the database works."""
    state = getattr(error, "sqlstate", None) or ""
    if state.startswith(_BUSY_STATES):
        return RowError(f"the database is busy: {_line(error)}", is_busy=True)
    if may_pass(error):
        return StorageFailed(f"the disk of the database {place} is full or fails: {_line(error)}")
    names = {kind.__name__ for kind in type(error).__mro__}
    is_value = isinstance(error, UNHOLDABLE) or state.startswith(_TOO_LARGE_STATE)
    if is_value or names & _OF_A_ROW:
        return RowError(f"the database cannot store a row: {_line(error)}")
    return unusable(place, error)


def unusable(place: Path | str, error: BaseException) -> StorageError:
    """Return the error for a failed database, with a hint what to do."""
    reason = _line(error)
    if is_url(place):
        shown = _PASSWORD.sub(r"\1:***@", str(place))
        hint = "check that the server runs and that this user may create tables in it"
    else:
        shown = str(place)
        hint = f"delete {place}* and start again: chain and files folder rebuild the database"
        if "locked" in reason:
            hint = "stop the other process that uses it, or choose another file with --database"
    return StorageError(f"the database {shown} is unusable: {reason}", hint=hint)


def _line(error: BaseException) -> str:
    reason = str(error).strip()
    return reason.splitlines()[0] if reason else type(error).__name__
