"""A SQLite file, asked directly and on the event loop.

Neither connection syncs or checkpoints, so a commit copies a few pages, which takes less time than
waking a thread for it; and the lock that is held means that no other writer is waited for.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from muster.orchestrator.db.direct import Asked, Rows, Statement
from muster.orchestrator.db.places import SQLITE_CACHE, unusable


class SqliteDirect:
    """A Direct over two connections: one writes, the other sees only what is committed."""

    def __init__(self, path: Path, writing: asyncio.Lock) -> None:
        """`writing` is the lock of all who write."""
        self._path = path
        self._writing = writing
        self._reader: _Connection | None = None
        self._writer: _Connection | None = None

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Run statements that only read."""
        if self._reader is None:
            self._reader = _Connection(self._path)
        return await self._reader.ask(*statements)

    @asynccontextmanager
    async def transaction(self, *, is_exclusive: bool = True) -> AsyncIterator[Asked]:
        """Yield the connection that writes, when it is this one's turn; SQLite has one writer."""
        del is_exclusive
        async with self._writing:
            if self._writer is None:
                self._writer = _Connection(self._path)
            writer = self._writer
            writer.run("BEGIN IMMEDIATE")
            try:
                yield writer
                writer.run("COMMIT")
            except BaseException:
                writer.roll_back()
                raise

    async def close(self) -> None:
        """Close both connections."""
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self._reader = self._writer = None


class _Connection:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = sqlite3.connect(path, isolation_level=None)
        # A checkpoint would wait for the disk: see `Database.checkpoint`.
        settings = ("synchronous=NORMAL", "wal_autocheckpoint=0", "foreign_keys=ON", SQLITE_CACHE)
        for pragma in settings:
            self._connection.execute(f"PRAGMA {pragma}")

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Run statements in order; return the rows of each."""
        return [self.run(sql, values) for sql, values in statements]

    def run(self, sql: str, values: tuple[object, ...] = ()) -> Rows:
        """Run one statement; return its rows."""
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise unusable(self._path, error) from error

    def roll_back(self) -> None:
        """End a transaction that failed, unless it is over."""
        if self._connection.in_transaction:
            self._connection.rollback()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
