"""Group commit: rows of many requests share one transaction.

A signed request must not be answered before its nonce is on disk. One transaction per request would
bound the process to a few hundred per second; one for all that wait at the same moment does not.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence

from muster.orchestrator.db.engine import Database, unusable

Write = tuple[str, tuple[object, ...]]
"""An INSERT statement and one row for it."""
_Waiting = list[tuple[tuple[Write, ...], "asyncio.Future[None]"]]


class GroupCommit:
    """A queue of rows and the task that writes them."""

    def __init__(self, database: Database, *, max_waiting: int = 20_000) -> None:
        self._database = database
        self._max_waiting = max_waiting
        self._waiting: _Waiting = []
        self._wake = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether no more requests should wait."""
        return len(self._waiting) >= self._max_waiting

    async def add(self, *writes: Write) -> None:
        """Write rows; returns when they are committed."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((writes, done))
        self._wake.set()
        await done

    async def run(self) -> None:
        """Commit what waits, again and again, until cancelled."""
        connection = _connect(self._database)
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                async with self._database.writing:
                    waiting, self._waiting = self._waiting, []
                    self._commit(connection, waiting)
        finally:
            connection.close()
            _finish(self._waiting, failed=True)

    def _commit(self, connection: sqlite3.Connection, waiting: _Waiting) -> None:
        rows: dict[str, list[Sequence[object]]] = {}
        for writes, _ in waiting:
            for statement, row in writes:
                rows.setdefault(statement, []).append(row)
        try:
            # On the event loop on purpose. This connection neither syncs nor checkpoints, so a
            # commit copies a few pages, which takes less time than waking a thread for it; and the
            # lock that is held means that no other writer is waited for.
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                for statement, values in rows.items():
                    connection.executemany(statement, values)
        except sqlite3.DatabaseError as error:
            _finish(waiting, failed=True)
            raise unusable(self._database.path, error) from error
        _finish(waiting, failed=False)


def _connect(database: Database) -> sqlite3.Connection:
    connection = sqlite3.connect(database.path, isolation_level=None)
    connection.execute("PRAGMA synchronous=NORMAL")
    # The other connections checkpoint, in their threads.
    connection.execute("PRAGMA wal_autocheckpoint=0")
    return connection


def _finish(waiting: _Waiting, *, failed: bool) -> None:
    for _, done in waiting:
        if done.done():
            continue
        if failed:
            done.set_exception(ConnectionAbortedError("the orchestrator is stopping"))
        else:
            done.set_result(None)
