"""A PostgreSQL database, which replicas share; statements sent together take one round trip."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, func, select

from muster.orchestrator.db.query import (
    UNHOLDABLE,
    Query,
    Queryable,
    RowError,
    Rows,
    Statement,
    failure,
    plain,
)
from muster.protocol.errors import ConfigError, StorageError, install_hint

if TYPE_CHECKING:
    import psycopg

WRITER_LOCK, LEADER_LOCK = 0x6D7573_74_02, 0x6D7573_74_03
"""Advisory locks: one per exclusive transaction, one of the leader."""
QUICK_CONNECTIONS, SLOW_CONNECTIONS = 4, 8
"""Connections of one process: for quick statements, and for those that read many rows or wait for
files. Further statements wait for a free connection.
"""
STATEMENT_TIMEOUT_S = 30
"""Deadline in seconds for a statement, including the wait for locks."""
_LOCK = Query(select(func.pg_advisory_xact_lock(bindparam("key"))))(key=WRITER_LOCK)


class PostgresDatabase:
    """Connections to one server, which are opened when they are needed."""

    is_shared = True
    dialect = "postgresql"

    def __init__(self, url: str) -> None:
        """Raises ConfigError when the URL is malformed, or the driver is not installed."""
        try:
            from psycopg import ProgrammingError
            from psycopg.conninfo import conninfo_to_dict
        except ModuleNotFoundError as error:
            raise ConfigError(
                "PostgreSQL needs its driver", hint=install_hint("postgres")
            ) from error
        try:
            conninfo_to_dict(url)
        except ProgrammingError as error:
            raise ConfigError(
                f"{url!r} is not a database's URL",
                hint="write postgresql://user@host/database, the password in PGPASSWORD or "
                "~/.pgpass",
            ) from error
        self.place = url
        self._quick = _Connections(url, QUICK_CONNECTIONS)
        self._slow = _Connections(url, SLOW_CONNECTIONS)

    async def check(self) -> None:
        """Do nothing: the server checks its own files."""

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Run statements that read a few rows; each sees the data committed at its start."""
        return await self._quick.ask(statements)

    async def search(self, *statements: Statement) -> list[Rows]:
        """Run statements that may read many rows."""
        return await self._slow.ask(statements)

    @asynccontextmanager
    async def transaction(
        self,
        *,
        is_exclusive: bool = True,
        is_quick: bool = False,
        is_durable: bool = False,
        lock_ms: int | None = None,
    ) -> AsyncIterator[Queryable]:
        """Yield a transaction; its first statement starts it and takes the lock. All are
        durable.
        """
        del is_durable
        connections = self._quick if is_quick else self._slow
        async with (
            connections.borrowed() as connection,
            connection.pipeline(),
            connection.transaction(),
        ):
            asked = _Pipeline(connection, self.place)
            if lock_ms is not None:
                await asked.send(plain(f"SET LOCAL lock_timeout = {lock_ms}"))
            if is_exclusive:
                await asked.send(_LOCK)
            yield asked

    async def checkpoint(self) -> None:
        """Do nothing: the server manages its own log."""

    async def close(self) -> None:
        """Close the idle connections."""
        await self._quick.close()
        await self._slow.close()


class _Connections:
    def __init__(self, url: str, most: int) -> None:
        self._url = url
        self._free = asyncio.Semaphore(most)
        self._idle: list[psycopg.AsyncConnection[Any]] = []

    async def ask(self, statements: tuple[Statement, ...]) -> list[Rows]:
        async with self.borrowed() as connection, connection.pipeline():
            return await _Pipeline(connection, self._url).ask(*statements)

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
        import psycopg

        async with self._free:
            connection = None
            try:
                connection = self._idle.pop() if self._idle else await self._connect()
                yield connection
            except BaseException as error:
                found = failure(self._url, error) if isinstance(error, psycopg.Error) else error
                await self._take_back(connection, found)
                if found is error:
                    raise
                raise found from error
            self._idle.append(connection)

    async def _take_back(
        self, connection: psycopg.AsyncConnection[Any] | None, error: BaseException
    ) -> None:
        """Keep a connection if only a row was refused; else close it."""
        from psycopg.pq import TransactionStatus

        if connection is not None:
            is_idle = connection.info.transaction_status is TransactionStatus.IDLE
            if isinstance(error, RowError) and is_idle:
                self._idle.append(connection)
                return
            # Closing the connection also ends its transaction.
            await connection.close()
        if isinstance(error, StorageError) and not isinstance(error, RowError):
            # If the server was unreachable, all other idle connections are broken too.
            await self.close()

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        import psycopg

        return await psycopg.AsyncConnection.connect(
            self._url,
            autocommit=True,
            connect_timeout=5,
            options=f"-c statement_timeout={STATEMENT_TIMEOUT_S}s",
        )

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()


class _Pipeline:
    def __init__(self, connection: psycopg.AsyncConnection[Any], url: str) -> None:
        self._connection = connection
        self._url = url

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Send statements, then wait for their rows; if none returns rows, do not wait."""
        cursors = [await self.send(statement) for statement in statements]
        return [
            await cursor.fetchall() if each.sql.has_rows else []
            for cursor, each in zip(cursors, statements, strict=True)
        ]

    async def send(self, statement: Statement) -> psycopg.AsyncCursor[Any]:
        """Queue a statement, to be sent with the next `ask`."""
        try:
            return await self._connection.execute(statement.sql.postgresql, statement.values)
        except UNHOLDABLE as error:
            raise failure(self._url, error) from error
