"""A PostgreSQL database, asked directly; what is asked together takes one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from muster.orchestrator.db.direct import Asked, Rows, Statement
from muster.orchestrator.db.places import unusable

if TYPE_CHECKING:
    import psycopg


class PostgresDirect:
    """A Direct over a few connections, which are opened when they are needed."""

    def __init__(
        self, url: str, *, connections: int, writer_lock: int, statement_timeout_s: int
    ) -> None:
        """`writer_lock` is the number of the advisory lock of exclusive transactions."""
        self._url = url
        self._lock: Statement = ("SELECT pg_advisory_xact_lock(?)", (writer_lock,))
        self._options = f"-c statement_timeout={statement_timeout_s}s"
        self._free = asyncio.Semaphore(connections)
        self._idle: list[psycopg.AsyncConnection[Any]] = []

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Run statements, each on what is committed when it starts."""
        async with self._borrowed() as connection, connection.pipeline():
            return await _Pipeline(connection).ask(*statements)

    @asynccontextmanager
    async def transaction(self, *, is_exclusive: bool = True) -> AsyncIterator[Asked]:
        """Yield a transaction; it starts, and takes the lock, with what is asked first."""
        async with (
            self._borrowed() as connection,
            connection.pipeline(),
            connection.transaction(),
        ):
            asked = _Pipeline(connection)
            if is_exclusive:
                await asked.send(self._lock)
            yield asked

    @asynccontextmanager
    async def _borrowed(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        import psycopg

        async with self._free:
            try:
                connection = self._idle.pop() if self._idle else await self._connect()
                try:
                    yield connection
                except BaseException:
                    # Whatever is left of it on the server ends with the connection.
                    await connection.close()
                    raise
            except psycopg.Error as error:
                # A server that was away has left none of the others open either.
                await self.close()
                raise unusable(self._url, error) from error
            self._idle.append(connection)

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        import psycopg

        return await psycopg.AsyncConnection.connect(
            self._url, autocommit=True, connect_timeout=5, options=self._options
        )

    async def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            await self._idle.pop().close()


class _Pipeline:
    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Send statements, then wait for the rows of all; without rows, for nothing yet."""
        cursors = [await self.send(statement) for statement in statements]
        return [
            await cursor.fetchall() if _translated(sql)[1] else []
            for cursor, (sql, _) in zip(cursors, statements, strict=True)
        ]

    async def send(self, statement: Statement) -> psycopg.AsyncCursor[Any]:
        """Send a statement with whatever is asked next."""
        sql, values = statement
        return await self._connection.execute(_translated(sql)[0], values)


@lru_cache(maxsize=256)
def _translated(sql: str) -> tuple[Any, bool]:
    """Return SQL with PostgreSQL's placeholders, and whether it answers rows."""
    return sql.replace("?", "%s"), sql.lstrip().startswith("SELECT") or "RETURNING" in sql
