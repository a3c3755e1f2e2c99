"""The transactions of a key: each is on disk before it is sent, so a crash loses and repeats none.

An *action* is a caller's request, perhaps with a label; it has a nonce and one or more signed
*attempts*, which differ only in their fees. Signatures are in the journal, keys are not.

Rows are in one SQLite file, or in a PostgreSQL database. One process at a time holds the store, and
the store refuses everything once another process has it: a sender that cannot write to its journal
sends nothing. Constraints of the store forbid two live actions with the same nonce or the same
label.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from muster.chain.outgoing import SignedTransaction
from muster.protocol.errors import (
    ConfigError,
    StorageError,
    StorageFailed,
    may_pass,
    storage_error_of,
)
from muster.protocol.ids import Address

if TYPE_CHECKING:
    from psycopg import Connection

KEPT_NONCES = 512
"""Settled transactions of this many newest nonces keep their attempts, to be sent again after a
reorg."""

T = TypeVar("T")

_COLUMNS = "id, label, purpose, nonce, state, tx_hash, block_number, block_hash"
_SEARCHED = {
    "pending": "state = 'pending'",
    "settled": "state IN ('mined', 'reverted')",
    "forgettable": "(label IS NULL OR state != 'mined')",
}
"""Conditions of actions that are searched for among all that were ever sent."""


class ActionState(StrEnum):
    """State of an action."""

    PENDING = "pending"
    """It is not mined yet, but may be."""
    MINED = "mined"
    """It succeeded in the recorded block."""
    REVERTED = "reverted"
    """It was mined and reverted; its nonce is used."""
    REPLACED = "replaced"
    """Its nonce was used by a transaction that is not one of its attempts."""
    REFUSED = "refused"
    """No node took it: its nonce is free."""


@dataclass(frozen=True, slots=True)
class Inclusion:
    """The block in which a transaction was mined."""

    tx_hash: str
    """The attempt that was mined."""
    block_number: int
    """Its block's height."""
    block_hash: str


@dataclass(frozen=True, slots=True)
class Action:
    """A transaction that a caller wants once."""

    number: int
    """Number in the journal."""
    label: str | None
    """The caller's name for it."""
    purpose: str
    """The called contract and selector."""
    nonce: int
    """The account's nonce."""
    state: ActionState
    """Its state."""
    attempts: tuple[SignedTransaction, ...]
    """Signed transactions, oldest first; empty once it was settled long ago."""
    inclusion: Inclusion | None = None
    """The block in which it was mined."""


class SendJournal:
    """The transactions of one account on one chain."""

    def __init__(self, store: JournalStore | Path | None, scope: str) -> None:
        """Use a store, or open the SQLite file of a path; with neither, nothing outlives the
        process.

        `scope` names the account and the chain: transactions of other scopes in the store are
        ignored. Raises ConfigError while another process holds the file, StorageError when it
        cannot be used.
        """
        self.is_kept = store is not None
        """Whether it outlives the process."""
        self._store = SqliteStore(store) if store is None or isinstance(store, Path) else store
        self._scope = scope

    @classmethod
    def of(
        cls, store: JournalStore | Path | None, *, chain_id: int, genesis: str, account: Address
    ) -> Self:
        """Return the journal of an account on the chain with this genesis hash."""
        return cls(store, f"{chain_id}:{genesis}:{account}")

    def close(self) -> None:
        """Release the store."""
        self._store.close()

    # --------------------------------------------------------------------- write

    async def begin(
        self, label: str | None, purpose: str, nonce: int, first: SignedTransaction
    ) -> Action:
        """Write an action and its first attempt; on disk when it returns."""

        def write(execute: Execute) -> Action:
            [(number,)] = execute(
                "INSERT INTO actions (scope, label, purpose, nonce, state)"
                " VALUES (?, ?, ?, ?, 'pending') RETURNING id",
                (self._scope, label, purpose, nonce),
            )
            _add_attempt(execute, number, first)
            return _action(execute, number)

        return await self._transact(write)

    async def add_attempt(self, action: Action, attempt: SignedTransaction) -> Action:
        """Write another attempt at an action; on disk when it returns."""

        def write(execute: Execute) -> Action:
            _add_attempt(execute, action.number, attempt)
            return _action(execute, action.number)

        return await self._transact(write)

    async def resolve(
        self, action: Action, state: ActionState, inclusion: Inclusion | None = None
    ) -> Action:
        """Write the new state of an action."""

        def write(execute: Execute) -> Action:
            if state is ActionState.PENDING:
                self._pass_on_label(execute, action)
            where = (
                (inclusion.tx_hash, inclusion.block_number, inclusion.block_hash)
                if inclusion
                else (None,) * 3
            )
            execute(
                "UPDATE actions SET state = ?, tx_hash = ?, block_number = ?, block_hash = ?"
                " WHERE id = ?",
                (state, *where, action.number),
            )
            if inclusion is not None:
                self._forget(execute, action.nonce - KEPT_NONCES)
            return _action(execute, action.number)

        return await self._transact(write)

    # ---------------------------------------------------------------------- read

    async def find(self, label: str) -> Action | None:
        """Return the pending or mined action with a label."""
        found = await self._select("label = ? AND state IN ('pending', 'mined')", label)
        return found[0] if found else None

    async def pending(self) -> list[Action]:
        """Return the pending actions, by nonce."""
        return await self._select(_SEARCHED["pending"])

    async def settled_from(self, nonce: int) -> list[Action]:
        """Return the mined or reverted actions with this nonce or a later one, by nonce."""
        return await self._select(f"nonce >= ? AND {_SEARCHED['settled']}", nonce)

    # ------------------------------------------------------------------- storage

    async def _select(self, where: str, *values: object) -> list[Action]:
        def read(execute: Execute) -> list[Action]:
            rows = execute(
                f"SELECT id FROM actions WHERE scope = ? AND {where} ORDER BY nonce",
                (self._scope, *values),
            )
            return [_action(execute, number) for (number,) in rows]

        return await self._transact(read)

    async def _transact(self, work: Callable[[Execute], T]) -> T:
        # In a thread, if it may wait for a disk or a network.
        if not self.is_kept:
            return self._store.run(work)
        return await asyncio.to_thread(self._store.run, work)

    def _pass_on_label(self, execute: Execute, action: Action) -> None:
        """Drop the label if another action with it was sent after this one had reverted."""
        execute(
            "UPDATE actions SET label = NULL WHERE id = ? AND EXISTS (SELECT 1 FROM actions AS o"
            " WHERE o.scope = ? AND o.label = ? AND o.id != ? AND o.state IN ('pending', 'mined'))",
            (action.number, self._scope, action.label, action.number),
        )

    def _forget(self, execute: Execute, before_nonce: int) -> None:
        """Drop rows that no reorganisation needs again: old attempts, and old actions without a
        label.
        """
        # The attempts are few, the actions with a label stay for good.
        execute(
            "DELETE FROM attempts WHERE EXISTS (SELECT 1 FROM actions WHERE id = attempts.action"
            " AND scope = ? AND nonce < ? AND state != 'pending')",
            (self._scope, before_nonce),
        )
        execute(
            "DELETE FROM actions WHERE scope = ? AND nonce < ? AND state != 'pending'"
            f" AND {_SEARCHED['forgettable']}",
            (self._scope, before_nonce),
        )


def _add_attempt(execute: Execute, number: int, attempt: SignedTransaction) -> None:
    execute(
        "INSERT INTO attempts (action, tx_hash, raw) VALUES (?, ?, ?)",
        (number, attempt.tx_hash, attempt.raw),
    )


def _action(execute: Execute, number: int) -> Action:
    [row] = execute(f"SELECT {_COLUMNS} FROM actions WHERE id = ?", (number,))
    attempts = execute(
        "SELECT tx_hash, raw FROM attempts WHERE action = ? ORDER BY number", (number,)
    )
    found, label, purpose, nonce, state, *where = row
    return Action(
        number=found,
        label=label,
        purpose=purpose,
        nonce=nonce,
        state=ActionState(state),
        attempts=tuple(SignedTransaction(tx_hash, raw) for tx_hash, raw in attempts),
        inclusion=Inclusion(*where) if where[0] else None,
    )


# ------------------------------------------------------------------------- stores

LOCK_TIMEOUT_S = 5.0
"""Seconds that an earlier process may take to release a journal."""

Execute = Callable[[str, Sequence[object]], list[tuple[Any, ...]]]
"""Runs one statement, with `?` for every value, and returns its rows."""


class JournalStore(Protocol):
    """Rows of one or more journals, in the tables `actions` and `attempts`."""

    def run(self, work: Callable[[Execute], T]) -> T:
        """Run statements in one durable transaction, and return the result of `work`.

        Blocks. Raises StorageError when the statements fail, or would make two live actions with
        the same nonce or label.
        """

    def close(self) -> None:
        """Release the store."""


def schema(*, identity: str, blob: str) -> list[str]:
    """Return the statements that create the tables, with an SQL dialect's types."""
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
        # A condition must stand in a query as it does in its index: else SQLite reads all rows.
        *(
            f"CREATE INDEX IF NOT EXISTS actions_{name} ON actions (scope, nonce) WHERE {condition}"
            for name, condition in _SEARCHED.items()
        ),
        f"""CREATE TABLE IF NOT EXISTS attempts (
            number {identity},
            action BIGINT NOT NULL REFERENCES actions (id) ON DELETE CASCADE,
            tx_hash TEXT NOT NULL,
            raw {blob} NOT NULL
        )""",
        "CREATE INDEX IF NOT EXISTS attempts_of ON attempts (action)",
    ]


def second_action(shown: str, error: Exception) -> StorageError:
    """Return the error for rows that conflict with another action."""
    return StorageError(
        f"the journal {shown} refuses a second action: {error}",
        hint="stop any other process that sends with the same key",
    )


class SqliteStore:
    """One SQLite file, or memory without a path. Only its owner may read the file."""

    def __init__(self, path: Path | None) -> None:
        """Open or create the file.

        Raises ConfigError while another process holds it, StorageError when it cannot be used.
        """
        self._shown = str(path or "in memory")
        # Held from a statement to its commit: the thread of a cancelled caller may still be
        # running.
        self._lock = threading.Lock()
        self._connection = _open(path)

    def run(self, work: Callable[[Execute], T]) -> T:
        """Return the result of `work`."""
        try:
            with self._lock, self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                return work(lambda sql, values: self._connection.execute(sql, values).fetchall())
        except sqlite3.IntegrityError as error:
            raise second_action(self._shown, error) from error
        except sqlite3.Error as error:
            raise storage_error_of(
                error,
                f"the journal {self._shown} cannot be used: {error}",
                hint="check the disk's space: a transaction is sent only after it is in the "
                "journal",
            ) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def _open(path: Path | None) -> sqlite3.Connection:
    try:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Created here, because SQLite would let everybody read it; its WAL inherits the mode.
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            path.chmod(0o600)
        connection = sqlite3.connect(
            path or ":memory:",
            isolation_level=None,
            check_same_thread=False,
            timeout=LOCK_TIMEOUT_S,
        )
    except (OSError, sqlite3.Error) as error:
        raise storage_error_of(error, f"cannot open the journal {path}: {error}") from error
    try:
        # One process per key: the operating system releases the lock when a process is killed.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        # Every commit is on disk before its transaction is sent.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        statements = schema(identity="INTEGER PRIMARY KEY", blob="BLOB")
        connection.executescript(f"BEGIN EXCLUSIVE; {'; '.join(statements)}; COMMIT;")
    except sqlite3.OperationalError as error:
        connection.close()
        if may_pass(error):
            raise StorageFailed(f"cannot open the journal {path}: {error}") from error
        raise ConfigError(
            f"the journal {path} is held by another process: {error}",
            hint="only one process may send with a key: stop the other process, or give this "
            "one its own key",
        ) from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise StorageError(
            f"the journal {path} is damaged: {error}",
            hint="restore the file from a backup; or delete it when no transaction of this "
            "key is waiting to be mined",
        ) from error
    return connection


CONNECT_TIMEOUT_S = 5
"""Deadline of a connection to the server, in seconds."""
STATEMENT_TIMEOUT_S = 10
"""Deadline of a statement on a server that answers, in seconds."""
SILENCE_S = 15
"""Seconds without an acknowledgement after which either side treats the connection as lost."""


def connection_options(statement_timeout_s: int) -> dict[str, Any]:
    """Return options of a connection to PostgreSQL which either side gives up when the other's host
    is gone; a server that answers ends a statement after its deadline.
    """
    return {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "keepalives_idle": SILENCE_S // 3,
        "keepalives_interval": SILENCE_S // 3,
        "keepalives_count": 2,
        "tcp_user_timeout": 1000 * SILENCE_S,
        "options": f"-c statement_timeout={statement_timeout_s}s"
        f" -c tcp_keepalives_idle={SILENCE_S // 3} -c tcp_keepalives_interval={SILENCE_S // 3}"
        " -c tcp_keepalives_count=2",
    }


class PostgresStore:
    """The journals of a database, for senders that take over from each other. Its methods block.

    All statements use one connection, which holds an advisory lock while it is open: the process
    with the lock is the sender. When the server loses the connection it gives the lock to another
    process. From then on this store refuses everything, so that nothing is sent that the successor
    cannot see. Needs the extra `postgres`.
    """

    def __init__(self, connection: Connection[tuple[Any, ...]]) -> None:
        """Use a connection that holds the lock; see `acquire`."""
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def acquire(cls, url: str, lock: int) -> Self | None:
        """Return the store of a database, None while another holds `lock`, a signed 64-bit number.

        Raises StorageError when the database cannot be reached.
        """
        import psycopg

        try:
            options = connection_options(STATEMENT_TIMEOUT_S)
            connection = psycopg.connect(url, autocommit=True, **options)
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
        """Return the result of `work`."""
        import psycopg

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
                hint="another replica sends from now on; a transaction is sent only after it "
                "is in the journal",
            ) from error

    def check(self) -> None:
        """Raise StorageError when the lock is lost."""
        self.run(lambda execute: execute("SELECT 1", ()))

    def close(self) -> None:
        """Release the lock."""
        with self._lock:
            self._connection.close()


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
