"""Where a journal of transactions keeps its rows: one SQLite file, or a PostgreSQL database.

Either is held by one process at a time, and refuses everything once it is not this one any more: a
sender that cannot write to its journal sends nothing.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from muster.protocol.errors import ConfigError, StorageError

LOCK_TIMEOUT_S = 5.0
"""How long an earlier process may take to let go of a journal."""

T = TypeVar("T")
Execute = Callable[[str, Sequence[object]], list[tuple[Any, ...]]]
"""Runs one statement, with `?` for every value, and returns its rows."""


class JournalStore(Protocol):
    """Rows of one or more journals, in the tables `actions` and `attempts`."""

    def run(self, work: Callable[[Execute], T]) -> T:
        """Return what some statements return; they happen together or not at all, for good.

        Blocks. Raises StorageError when they cannot be kept, or would make two live actions with
        one nonce or one label.
        """

    def close(self) -> None:
        """Let go of it."""


def schema(*, identity: str, blob: str) -> list[str]:
    """Return the statements that create the tables, with a dialect's words for types."""
    return [
        f"""CREATE TABLE IF NOT EXISTS actions (
            id {identity},
            scope TEXT NOT NULL,
            label TEXT,
            purpose TEXT NOT NULL,
            nonce BIGINT NOT NULL,
            state TEXT NOT NULL,
            tx_hash TEXT,
            block_number BIGINT,
            block_hash TEXT
        )""",
        """CREATE UNIQUE INDEX IF NOT EXISTS one_action_per_label ON actions (scope, label)
            WHERE label IS NOT NULL AND state IN ('pending', 'mined')""",
        """CREATE UNIQUE INDEX IF NOT EXISTS one_action_per_nonce ON actions (scope, nonce)
            WHERE state IN ('pending', 'mined', 'reverted')""",
        f"""CREATE TABLE IF NOT EXISTS attempts (
            number {identity},
            action BIGINT NOT NULL REFERENCES actions (id) ON DELETE CASCADE,
            tx_hash TEXT NOT NULL,
            raw {blob} NOT NULL
        )""",
        "CREATE INDEX IF NOT EXISTS attempts_of ON attempts (action)",
    ]


def second_action(shown: str, error: Exception) -> StorageError:
    """Return the error for rows that another action excludes."""
    return StorageError(
        f"the journal {shown} refuses a second action: {error}",
        hint="does another process send with the same key?",
    )


class SqliteStore:
    """One SQLite file, or memory without a path. Only its owner may read the file."""

    def __init__(self, path: Path | None) -> None:
        """Open or create the file.

        Raises ConfigError while another process holds it, StorageError when it cannot be used.
        """
        self._shown = str(path or "in memory")
        # Held across a statement and its commit: a cancelled caller's thread may still be at it.
        self._lock = threading.Lock()
        self._connection = _open(path)

    def run(self, work: Callable[[Execute], T]) -> T:
        """Return what the statements return."""
        try:
            with self._lock, self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                return work(lambda sql, values: self._connection.execute(sql, values).fetchall())
        except sqlite3.IntegrityError as error:
            raise second_action(self._shown, error) from error
        except sqlite3.Error as error:
            raise StorageError(
                f"the journal {self._shown} cannot be used: {error}",
                hint="is the disk full? nothing is sent that is not in it",
            ) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def _open(path: Path | None) -> sqlite3.Connection:
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Created by us, since SQLite would let everybody read it; its log inherits the mode.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            path.chmod(0o600)
        connection = sqlite3.connect(
            path or ":memory:",
            isolation_level=None,
            check_same_thread=False,
            timeout=LOCK_TIMEOUT_S,
        )
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"cannot open the journal {path}: {error}") from error
    try:
        # One process per key: the lock is the operating system's, so a killed one lets go of it.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        # Every commit is on disk before what it notes leaves.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        statements = schema(identity="INTEGER PRIMARY KEY", blob="BLOB")
        connection.executescript(f"BEGIN EXCLUSIVE; {'; '.join(statements)}; COMMIT;")
    except sqlite3.OperationalError as error:
        connection.close()
        raise ConfigError(
            f"the journal {path} is held by another process: {error}",
            hint="one process sends with a key: stop the other, or give this one its own key",
        ) from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise StorageError(
            f"the journal {path} is damaged: {error}",
            hint="restore it, or delete it once nothing of this key is waiting to be mined",
        ) from error
    return connection
