"""A SQLite file, owned by one process: the one that holds the lock on the journal of transactions,
which is in the files folder (`muster.chain.send_journal.SqliteStore`). Nothing keeps a process with
another files folder from this file.

SQLite has one writer at a time, so all writers queue for one lock, which does not block a thread.
Statements run on the event loop: most writers do not sync or checkpoint, so a write copies a few
pages, which is faster than waking a thread. Statements that may read many rows, and commits of what
a power failure must not take back, run in a thread.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from muster.orchestrator.db.query import (
    UNHOLDABLE,
    Queryable,
    Rows,
    Statement,
    failure,
    plain,
    unusable,
)
from muster.protocol.errors import StorageError
from muster.shardcast.download import in_thread

LOG_BYTES = 8 << 20
"""Length of the write-ahead log from which it is checkpointed into the file."""
_CACHE_KIB = 512
"""Page cache of each connection in KiB; SQLite's default is 2 MB.

The operating system caches the file too: pages over 1,000,000 submissions take equally long with
either size.
"""
_CHECKPOINT = plain("PRAGMA wal_checkpoint(PASSIVE)")
_CHECK = plain("PRAGMA quick_check(1)")


class SqliteDatabase:
    """One connection writes, one reads on the event loop, and some read in threads."""

    is_shared = False
    dialect = "sqlite"

    def __init__(self, path: Path) -> None:
        """Raises StorageError when the file is corrupt, not an SQLite file, or cannot be
        created."""
        self.place = path
        self._writing = asyncio.Lock()
        self._idle: list[_Connection] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot create {path.parent}: {error.strerror}") from error
        self._writer, self._reader = _Connection(path), _Connection(path)
        self._writer.run("PRAGMA journal_mode=WAL")

    async def check(self) -> None:
        """Raise StorageError when the file is damaged."""
        [[(verdict,)]] = await self.search(_CHECK)
        if verdict != "ok":
            raise unusable(self.place, StorageError(str(verdict)))

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Run statements that read a few rows by an index."""
        return self._reader.run_all(statements)

    async def search(self, *statements: Statement) -> list[Rows]:
        """Run statements that may read many rows."""
        return await asyncio.to_thread(self._search, statements)

    def _search(self, statements: tuple[Statement, ...]) -> list[Rows]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = _Connection(self.place)
        try:
            return connection.run_all(statements)
        finally:
            self._idle.append(connection)

    @asynccontextmanager
    async def transaction(
        self,
        *,
        is_exclusive: bool = True,
        is_quick: bool = False,
        is_durable: bool = False,
        lock_ms: int | None = None,
    ) -> AsyncIterator[Queryable]:
        """Wait for this writer's turn and yield the writing connection. A power failure takes back
        the newest transactions, but none before a durable one.
        """
        del is_exclusive, is_quick, lock_ms
        async with self._writing:
            if is_durable:
                self._writer.run("PRAGMA synchronous=FULL")
            self._writer.run("BEGIN IMMEDIATE")
            try:
                yield self._writer
                if is_durable:
                    await in_thread(self._writer.run, "COMMIT")
                else:
                    self._writer.run("COMMIT")
            except BaseException:
                self._writer.roll_back()
                raise
            finally:
                if is_durable:
                    self._writer.run("PRAGMA synchronous=NORMAL")

    async def checkpoint(self) -> None:
        """Checkpoint the log into the file once it is long; in a thread."""
        if _log_bytes(self.place) > LOG_BYTES:
            await self.search(_CHECKPOINT)
            # Writers continued meanwhile. Now, with writers locked out, the small rest is moved
            # too, and the next write restarts the log.
            async with self._writing:
                await self.search(_CHECKPOINT)

    async def close(self) -> None:
        """Close all connections."""
        for connection in (self._reader, self._writer, *self._idle):
            connection.close()


class _Connection:
    def __init__(self, path: Path) -> None:
        self._path = path
        # One thread at a time uses the connection, but not always the same thread.
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for pragma in (
            "synchronous=NORMAL",
            # `checkpoint` runs before SQLite reaches this limit, except during the start.
            "wal_autocheckpoint=16384",
            "foreign_keys=ON",
            f"cache_size=-{_CACHE_KIB}",
        ):
            self.run(f"PRAGMA {pragma}")

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Run statements in order; return the rows of each."""
        return self.run_all(statements)

    def run_all(self, statements: tuple[Statement, ...]) -> list[Rows]:
        """Run statements in order; return the rows of each; blocking."""
        return [self.run(each.sql.sqlite, each.values) for each in statements]

    def run(self, sql: str, values: Mapping[str, object] | None = None) -> Rows:
        """Run one statement; return its rows."""
        try:
            return self._connection.execute(sql, values or {}).fetchall()
        except (sqlite3.Error, *UNHOLDABLE) as error:
            raise failure(self._path, error) from error

    def roll_back(self) -> None:
        """Roll back a failed transaction, unless it has ended."""
        if self._connection.in_transaction:
            self._connection.rollback()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def _log_bytes(path: Path) -> int:
    try:
        return path.with_name(path.name + "-wal").stat().st_size
    except OSError:
        return 0
