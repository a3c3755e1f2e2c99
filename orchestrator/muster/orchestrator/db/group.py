"""Group commit: rows of many requests share one transaction.

A signed request must not be answered before its nonce is on disk. One transaction per request would
bound the process to a few hundred per second; one for all that wait at the same moment does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.postgres_writer import PostgresWriter
from muster.orchestrator.db.sqlite_writer import SqliteWriter
from muster.protocol.errors import StorageError

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after a shared database did not take a group."""

Write = tuple[str, tuple[object, ...]]
"""An INSERT statement, with `?` for values, and one row for it."""


class GroupWriter(Protocol):
    """Writes groups over a connection of its own."""

    async def commit(self, groups: Sequence[Sequence[Write]]) -> list[bool]:
        """Write, in one transaction, the groups whose first row is new; return which were.

        A first row's statement does nothing where its key exists. Raises StorageError.
        """

    async def close(self) -> None:
        """Close the connection."""


class GroupCommit:
    """A queue of groups of rows and the task that writes them."""

    def __init__(self, database: Database, *, max_waiting: int = 20_000) -> None:
        self._database = database
        self._max_waiting = max_waiting
        self._waiting: list[tuple[Sequence[Write], asyncio.Future[bool]]] = []
        self._wake = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether no more requests should wait."""
        return len(self._waiting) >= self._max_waiting

    async def add(self, *writes: Write) -> bool:
        """Write rows if the first of them is new; return whether it was, once it is on disk.

        Raises StorageError when it may not be.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((writes, done))
        self._wake.set()
        return await done

    async def run(self) -> None:
        """Commit what waits, again and again, until cancelled.

        Raises StorageError when the database fails that is this process's own.
        """
        writer = self._writer()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._commit(writer)
        finally:
            await writer.close()
            _fail(self._waiting, StorageError("the orchestrator is stopping"))

    def _writer(self) -> GroupWriter:
        place = self._database.place
        return SqliteWriter(place) if isinstance(place, Path) else PostgresWriter(place)

    async def _commit(self, writer: GroupWriter) -> None:
        async with self._database.writing:
            waiting, self._waiting = self._waiting, []
            try:
                are_new = await writer.commit([writes for writes, _ in waiting])
            except BaseException as error:
                reason = StorageError("the database did not take the request")
                _fail(waiting, error if isinstance(error, StorageError) else reason)
                if not (self._database.is_shared and isinstance(error, StorageError)):
                    raise
                logger.warning("the database is away", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)
                return
        for (_, done), is_new in zip(waiting, are_new, strict=True):
            if not done.done():
                done.set_result(is_new)


def _fail(
    waiting: Sequence[tuple[Sequence[Write], asyncio.Future[bool]]], error: StorageError
) -> None:
    for _, done in waiting:
        if not done.done():
            done.set_exception(error)
