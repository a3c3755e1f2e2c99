"""Group commit: rows of many requests share one transaction.

A signed request must not be answered before its nonce is on disk. One transaction per request would
bound the process to a few hundred per second; one for all that wait at the same moment does not.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Executable

from muster.orchestrator.db.engine import Database

Write = tuple[Executable, Mapping[str, Any]]
"""A statement and one row for it; statements are compared by identity."""


class GroupCommit:
    """A queue of rows and the task that writes them."""

    def __init__(self, database: Database, *, max_waiting: int = 20_000) -> None:
        self._database = database
        self._max_waiting = max_waiting
        self._waiting: list[tuple[tuple[Write, ...], asyncio.Future[None]]] = []
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
        while True:
            await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            try:
                await self._commit([write for writes, _ in waiting for write in writes])
            except BaseException as error:
                _finish(waiting, error)
                raise
            _finish(waiting, None)

    async def _commit(self, writes: list[Write]) -> None:
        rows: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
        statements: dict[int, Executable] = {}
        for statement, row in writes:
            statements[id(statement)] = statement
            rows[id(statement)].append(row)
        async with self._database.write() as session:
            connection = await session.connection()
            for key, statement in statements.items():
                await connection.execute(statement, rows[key])


def _finish(
    waiting: list[tuple[tuple[Write, ...], asyncio.Future[None]]], error: BaseException | None
) -> None:
    for _, done in waiting:
        if done.done():
            continue
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(ConnectionAbortedError("the orchestrator is stopping"))
