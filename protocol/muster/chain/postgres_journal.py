"""A journal of transactions in PostgreSQL, for senders that take over from each other.

Everything goes over one connection, which holds an advisory lock for as long as it lives: whoever
has the lock is the sender. When the server loses the connection it gives the lock to another, and
this store refuses everything from then on, so that nothing is sent that the successor cannot see.

Needs `pip install muster-rl[postgres]`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import psycopg

from muster.chain.journal_store import Execute, schema, second_action
from muster.protocol.errors import StorageError

T = TypeVar("T")

CONNECT_TIMEOUT_S = 5
"""How long the server may take to take the connection."""
STATEMENT_TIMEOUT_S = 10
"""How long a statement may take, on a server that answers."""
SILENCE_S = 15
"""After how long without an acknowledgement the connection counts as lost, on either side."""

_OPTIONS = {
    "connect_timeout": CONNECT_TIMEOUT_S,
    "keepalives_idle": SILENCE_S // 3,
    "keepalives_interval": SILENCE_S // 3,
    "keepalives_count": 2,
    "tcp_user_timeout": 1000 * SILENCE_S,
    "options": f"-c statement_timeout={STATEMENT_TIMEOUT_S}s"
    f" -c tcp_keepalives_idle={SILENCE_S // 3} -c tcp_keepalives_interval={SILENCE_S // 3}"
    " -c tcp_keepalives_count=2",
}


class PostgresStore:
    """The journals of a database, while this process holds its lock. Its methods block."""

    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Use a connection that holds the lock; see `acquire`."""
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def acquire(cls, url: str, lock: int) -> Self | None:
        """Return the store of a database if nobody else holds the lock, a signed 64-bit number.

        Raises StorageError when the database cannot be reached.
        """
        try:
            connection = psycopg.connect(url, autocommit=True, **_OPTIONS)  # type: ignore[arg-type]
        except psycopg.Error as error:
            raise StorageError(f"the database does not answer: {_line(error)}") from error
        try:
            row = connection.execute("SELECT pg_try_advisory_lock(%s)", (lock,)).fetchone()
            if row is None or not row[0]:
                connection.close()
                return None
            for statement in schema(
                identity="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY", blob="BYTEA"
            ):
                connection.execute(statement)
        except psycopg.Error as error:
            connection.close()
            raise StorageError(f"the journal cannot be opened: {_line(error)}") from error
        return cls(connection)

    def run(self, work: Callable[[Execute], T]) -> T:
        """Return what the statements return."""

        def execute(sql: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
            cursor = self._connection.execute(sql.replace("?", "%s"), values)
            return cursor.fetchall() if cursor.description else []

        try:
            with self._lock, self._connection.transaction():
                return work(execute)
        except psycopg.errors.IntegrityError as error:
            raise second_action("in PostgreSQL", error) from error
        except psycopg.Error as error:
            raise StorageError(
                f"the journal cannot be used: {_line(error)}",
                hint="another replica sends from now on; nothing is sent that is not in it",
            ) from error

    def check(self) -> None:
        """Raise StorageError when the lock is lost."""
        self.run(lambda execute: execute("SELECT 1", ()))

    def close(self) -> None:
        """Let go of the lock."""
        with self._lock:
            self._connection.close()


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
