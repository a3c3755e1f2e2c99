"""Statements written with SQLAlchemy Core, turned into SQL once, when their modules are imported.

Names of tables and columns are checked then. Later a statement is its SQL for both databases and a
dictionary of values: SQLAlchemy is not asked again.

A database that is away serves nobody until it is back. One that does not take a row serves
everybody else: the row's owner must not make others wait.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sqlalchemy import ClauseElement, Column, ColumnElement, Table, bindparam, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.engine import Dialect

from muster.protocol.errors import StorageError

DIALECTS: dict[str, Dialect] = {
    "sqlite": sqlite.dialect(paramstyle="named"),
    "postgresql": postgresql.dialect(),  # type: ignore[no-untyped-call]
}
Rows = Sequence[tuple[Any, ...]]
"""The answer to a statement; empty for one that answers nothing."""


@dataclass(frozen=True, slots=True)
class Sql:
    """One statement's text for each database, with names for values."""

    sqlite: str
    postgresql: str
    has_rows: bool
    """Whether it answers any."""


class Statement(NamedTuple):
    """What a database is asked."""

    sql: Sql
    values: Mapping[str, object]
    """By name."""


class Queryable(Protocol):
    """A transaction, or a connection."""

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Run statements in order, in one round trip; return the rows of each."""


class Query:
    """A statement that still needs its values: call it with those of its `bindparam`s."""

    def __init__(self, expression: ClauseElement) -> None:
        """Raises SQLAlchemy's CompileError for what one of the databases cannot say."""
        made = {name: expression.compile(dialect=each) for name, each in DIALECTS.items()}
        sql = {name: " ".join(str(each).split()) for name, each in made.items()}
        params = {name: value for each in made.values() for name, value in each.params.items()}
        self._constants = {name: value for name, value in params.items() if value is not None}
        self._names = params.keys() - self._constants.keys()
        has_rows = sql["sqlite"].startswith("SELECT") or "RETURNING" in sql["sqlite"]
        self._sql = Sql(sql["sqlite"], sql["postgresql"], has_rows)

    def __call__(self, **values: object) -> Statement:
        """Return the statement with its values; raises TypeError for other names than it has."""
        if values.keys() != self._names:
            raise TypeError(f"the statement has values {sorted(self._names)}, not {sorted(values)}")
        return Statement(self._sql, values | self._constants if self._constants else values)


def plain(sql: str, **values: object) -> Statement:
    """Return a statement in words that SQLAlchemy has no expression for; `:name` for a value."""
    return Query(text(sql))(**values)


def columns(table: Table, row: type) -> list[Column[Any]]:
    """Return the columns that a dataclass's fields are named after, in their order."""
    return [table.c[field.name] for field in fields(row)]


def given(table: Table, *names: str) -> list[ColumnElement[bool]]:
    """Return the conditions that columns have the values which are given by their names."""
    return [table.c[name] == bindparam(name) for name in names]


def new_row(table: Table, *names: str) -> Insert:
    """Return what writes a row: values of the named columns, of all if none is named."""
    return insert(table).values({name: bindparam(name) for name in names or table.c.keys()})


def latest_row(table: Table) -> Query:
    """Return what writes a row in place of the one with its primary key."""
    row = new_row(table)
    said = {each.name: row.excluded[each.name] for each in table.c if not each.primary_key}
    return Query(
        row.on_conflict_do_update(index_elements=list(table.primary_key.columns), set_=said)
    )


# What a failure means


def is_url(place: Path | str) -> bool:
    """Return whether a database's place is a server's URL rather than a file's path."""
    return str(place).startswith(("postgresql:", "postgres:"))


class RowError(StorageError):
    """The database is well, and did not take what one caller wanted of it; others are served on."""

    def __init__(self, message: str, *, is_busy: bool = False) -> None:
        """`is_busy` says that only a lock or a time limit stood in the way, which passes."""
        super().__init__(message)
        self.is_busy = is_busy


UNHOLDABLE = (OverflowError, UnicodeError)
"""Errors of both drivers about a value that they cannot send: a large integer, a lone surrogate."""
_OF_A_ROW = frozenset({"DataError", "IntegrityError"})
"""PEP 249's names: a value that a column cannot hold, or a key that is taken."""
_BUSY_STATES = ("40", "55", "57014")
"""PostgreSQL's: a deadlock or another rollback, a lock, a statement that took too long."""
_TOO_LARGE_STATE = "54"
"""PostgreSQL's: a value that does not fit into a page of an index, for one."""
_PASSWORD = re.compile(r"(//[^:/@]*):[^/]*@")


def failure(place: Path | str, error: Exception) -> StorageError:
    """Return the error for what a database's driver raised: a RowError if the database is well."""
    state = getattr(error, "sqlstate", None) or ""
    if state.startswith(_BUSY_STATES):
        return RowError(f"the database waits for somebody else: {_line(error)}", is_busy=True)
    names = {kind.__name__ for kind in type(error).__mro__}
    is_value = isinstance(error, UNHOLDABLE) or state.startswith(_TOO_LARGE_STATE)
    if is_value or names & _OF_A_ROW:
        return RowError(f"the database cannot keep a row: {_line(error)}")
    return unusable(place, error)


def unusable(place: Path | str, error: BaseException) -> StorageError:
    """Return the error for a database that failed, saying what to do about it."""
    reason = _line(error)
    if is_url(place):
        shown = _PASSWORD.sub(r"\1:***@", str(place))
        hint = "is the server up, and may this user create tables there?"
    else:
        shown = str(place)
        hint = f"delete {place}* and start again: it is rebuilt from the chain and the files folder"
        if "locked" in reason:
            hint = "another process uses it: stop that one, or choose another with --database"
    return StorageError(f"the database {shown} is unusable: {reason}", hint=hint)


def _line(error: BaseException) -> str:
    reason = str(error).strip()
    return reason.splitlines()[0] if reason else type(error).__name__
