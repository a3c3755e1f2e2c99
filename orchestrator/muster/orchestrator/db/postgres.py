"""A PostgreSQL database, which replicas share; statements sent together take one round trip."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, func, select

from muster.chain.send_journal import connection_options
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
SILENCE_S = STATEMENT_TIMEOUT_S + 5.0
"""Seconds without an answer after which a connection is shut down: its server keeps no deadline."""
MOST_AT_ONCE = 1000
"""Most statements that are sent before their rows are awaited."""
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
            connections.borrowed() as asked,
            asked.connection.pipeline(),
            asked.connection.transaction(),
        ):
            if lock_ms is not None:
                await asked.send(plain(f"SET LOCAL lock_timeout = {lock_ms}"))
            if is_exclusive:
                await asked.send(_LOCK)
            try:
                yield asked
            finally:
                asked.expect_answer()

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
        async with self.borrowed() as asked, asked.connection.pipeline():
            return await asked.ask(*statements)

    @asynccontextmanager
    async def borrowed(self) -> AsyncIterator[_Pipeline]:
        import psycopg

        async with self._free:
            connection = None
            try:
                connection = self._idle.pop() if self._idle else await self._connect()
                with closing(_Pipeline(connection, self._url)) as asked:
                    yield asked
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
            self._url, autocommit=True, **connection_options(STATEMENT_TIMEOUT_S)
        )

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()


class _Pipeline:
    """Sends statements on a connection while it is borrowed."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], url: str) -> None:
        self.connection = connection
        self._url = url
        self._deadline = self._begin_deadline()

    def close(self) -> None:
        """Expect no answer any more."""
        self._deadline.cancel()

    def expect_answer(self) -> None:
        """Begin the deadline of the next answer, however long the last one took."""
        self._deadline.cancel()
        self._deadline = self._begin_deadline()

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Send statements, then wait for their rows; if none returns rows, do not wait."""
        found: list[Rows] = []
        for start in range(0, len(statements), MOST_AT_ONCE):
            some = statements[start : start + MOST_AT_ONCE]
            cursors = [await self.send(statement) for statement in some]
            # The first rows come with the last ones.
            found += [
                await cursor.fetchall() if each.sql.has_rows else []
                for cursor, each in zip(cursors, some, strict=True)
            ]
        return found

    async def send(self, statement: Statement) -> psycopg.AsyncCursor[Any]:
        """Queue a statement, to be sent with the next `ask`."""
        self.expect_answer()
        try:
            return await self.connection.execute(statement.sql.postgresql, statement.values)
        except UNHOLDABLE as error:
            raise failure(self._url, error) from error

    def _begin_deadline(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(SILENCE_S, self._shut_down)

    def _shut_down(self) -> None:
        # Cancelling a task would not do: the driver then waits for the server once more. At a
        # connection that has ended, every wait fails.
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
