"""Writes groups into a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from muster.orchestrator.db.engine import unusable


class SqliteWriter:
    """A GroupWriter; who calls it holds the database's one lock for writers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("PRAGMA synchronous=NORMAL")
        # See `Database.checkpoint`.
        self._connection.execute("PRAGMA wal_autocheckpoint=0")

    async def commit(
        self, groups: Sequence[Sequence[tuple[str, tuple[object, ...]]]]
    ) -> list[bool]:
        """Write the groups whose first row is new; return which were."""
        try:
            # On the event loop on purpose. This connection neither syncs nor checkpoints, so a
            # commit copies a few pages, which takes less time than waking a thread for it; and the
            # lock that is held means that no other writer is waited for.
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                return self._insert(groups)
        except sqlite3.DatabaseError as error:
            raise unusable(self._path, error) from error

    def _insert(self, groups: Sequence[Sequence[tuple[str, tuple[object, ...]]]]) -> list[bool]:
        rows: dict[str, list[tuple[object, ...]]] = {}
        are_new = []
        for (first, values), *others in groups:
            is_new = self._connection.execute(first, values).rowcount == 1
            are_new.append(is_new)
            for statement, row in others if is_new else ():
                rows.setdefault(statement, []).append(row)
        for statement, several in rows.items():
            self._connection.executemany(statement, several)
        return are_new

    async def close(self) -> None:
        """Close the connection."""
        self._connection.close()
