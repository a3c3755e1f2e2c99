"""Statements written with SQLAlchemy Core, turned into SQL once, when their modules are imported.

Names of tables and columns are checked then. Later a statement is its SQL for both databases and a
dictionary of values: SQLAlchemy is not asked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from sqlalchemy import ClauseElement, Column, Table, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect

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


class Asked(Protocol):
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
