"""The orchestrator's database on a connection that answers at once, without a thread of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import aiosqlite

from muster.orchestrator.db.engine import Database


class InlineConnection(aiosqlite.Connection):
    """aiosqlite's connection, whose statements run where they are asked for."""

    async def _execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._connection is None:
            raise ValueError("Connection closed")
        return fn(*args, **kwargs)

    async def _connect(self) -> InlineConnection:
        if self._connection is None:
            self._connection = self._connector()
        return self

    def __await__(self) -> Generator[Any, None, InlineConnection]:
        return self._connect().__await__()

    def stop(self) -> None:
        """Close the connection."""
        self._running = False
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def close(self) -> None:
        """Close the connection."""
        self.stop()


async def open_inline(path: Path) -> Database:
    """Open or create the orchestrator's SQLite file, migrated."""

    async def connect() -> InlineConnection:
        return await InlineConnection(
            lambda: sqlite3.connect(path, check_same_thread=False), iter_chunk_size=64
        )

    return await Database.open(path, connect=connect)
