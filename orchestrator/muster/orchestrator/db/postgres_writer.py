"""Writes groups into a PostgreSQL database, over one connection that is renewed when it is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from muster.orchestrator.db.engine import unusable

if TYPE_CHECKING:
    import psycopg

STATEMENT_TIMEOUT_S = 10
"""How long the server may take for a statement."""


class PostgresWriter:
    """A GroupWriter; constraints decide between replicas that write the same key."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: psycopg.AsyncConnection[tuple[Any, ...]] | None = None

    async def commit(
        self, groups: Sequence[Sequence[tuple[str, tuple[object, ...]]]]
    ) -> list[bool]:
        """Write the groups whose first row is new; return which were."""
        import psycopg

        # In order of their keys, so that two replicas never wait for each other.
        order = sorted(range(len(groups)), key=lambda i: repr(groups[i][0]))
        try:
            connection = await self._connected()
            async with connection.transaction(), connection.cursor() as cursor:
                are_new = await _insert_new(cursor, [groups[i][0] for i in order])
                kept = [groups[i][1:] for i, is_new in zip(order, are_new, strict=True) if is_new]
                for statement, rows in _by_statement(kept).items():
                    await cursor.executemany(statement, sorted(rows, key=repr))
        except psycopg.Error as error:
            await self.close()
            raise unusable(self._url, error) from error
        verdicts = dict(zip(order, are_new, strict=True))
        return [verdicts[i] for i in range(len(groups))]

    async def _connected(self) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        import psycopg

        if self._connection is None:
            self._connection = await psycopg.AsyncConnection.connect(
                self._url,
                autocommit=True,
                connect_timeout=5,
                options=f"-c statement_timeout={STATEMENT_TIMEOUT_S}s",
            )
        return self._connection

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


async def _insert_new(
    cursor: psycopg.AsyncCursor[Any], writes: Sequence[tuple[str, tuple[object, ...]]]
) -> list[bool]:
    """Insert rows that share a statement; return which were new."""
    are_new: list[bool] = []
    for statement, rows in _by_statement([writes]).items():
        await cursor.executemany(statement, rows, returning=True)
        for _ in rows:
            are_new.append(cursor.rowcount == 1)
            cursor.nextset()
    return are_new


def _by_statement(
    groups: Sequence[Sequence[tuple[str, tuple[object, ...]]]],
) -> dict[Any, list[tuple[object, ...]]]:
    """Return the rows of each statement, with PostgreSQL's placeholders."""
    rows: dict[Any, list[tuple[object, ...]]] = {}
    for group in groups:
        for statement, row in group:
            rows.setdefault(statement.replace("?", "%s"), []).append(row)
    return rows
