"""Group commit: rows of many requests share one transaction.

A signed request must not be answered before its nonce is on disk. One transaction per request would
bound the process to a few hundred per second; one for all that wait at the same moment does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from muster.orchestrator.db.direct import Statement
from muster.orchestrator.db.engine import Database
from muster.protocol.errors import StorageError

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after a shared database did not take a group."""

_Group = tuple[tuple[Statement, ...], asyncio.Future[bool]]


class GroupCommit:
    """A queue of groups of rows and the task that writes them."""

    def __init__(self, database: Database, *, max_waiting: int = 20_000) -> None:
        self._database = database
        self._max_waiting = max_waiting
        self._waiting: list[_Group] = []
        self._wake = asyncio.Event()

    @property
    def is_full(self) -> bool:
        """Whether no more requests should wait."""
        return len(self._waiting) >= self._max_waiting

    async def add(self, *writes: Statement) -> bool:
        """Write rows if the first of them is new; return whether it was, once it is on disk.

        Its statement does nothing where its key exists, and returns something where it does not.
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
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._commit()
        finally:
            _fail(self._waiting, StorageError("the orchestrator is stopping"))

    async def _commit(self) -> None:
        waiting: list[_Group] = []
        try:
            async with self._database.direct.transaction(is_exclusive=False) as asked:
                # Only now that it is this one's turn: whoever came meanwhile comes along.
                waiting, self._waiting = self._in_order(), []
                found = await asked.ask(*(writes[0] for writes, _ in waiting))
                kept = [g for (g, _), rows in zip(waiting, found, strict=True) if rows]
                await asked.ask(*(statement for writes in kept for statement in writes[1:]))
        # Cancelled, too, it leaves nobody waiting for an answer that will never come.
        except BaseException as error:
            if not waiting:
                waiting, self._waiting = self._waiting, []
            reason = StorageError("the database did not take the request")
            _fail(waiting, error if isinstance(error, StorageError) else reason)
            if not (self._database.is_shared and isinstance(error, StorageError)):
                raise
            logger.warning("the database is away", extra={"error": str(error)})
            await asyncio.sleep(RETRY_S)
            return
        for (_, done), rows in zip(waiting, found, strict=True):
            if not done.done():
                done.set_result(bool(rows))

    def _in_order(self) -> list[_Group]:
        """Return what waits; two replicas write in the same order and never wait for each other."""
        if not self._database.is_shared:
            return self._waiting
        return sorted(self._waiting, key=lambda group: repr(group[0][0]))


def _fail(waiting: Sequence[_Group], error: StorageError) -> None:
    for _, done in waiting:
        if not done.done():
            done.set_exception(error)
