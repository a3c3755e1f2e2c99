"""What a key has sent: on disk before it leaves, so that a crash neither loses nor repeats it.

One SQLite file per key. An *action* is what a caller asked for, perhaps under a label; it has a
nonce and one or more signed *attempts*, which differ in their fees only. The file's own rules hold
what must never happen: two live actions with one nonce, or with one label.

Signatures are in the file, keys are not. Only its owner may read it.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self, TypeVar

from muster.chain.outgoing import Signed
from muster.protocol.errors import ConfigError, StorageError
from muster.protocol.ids import Address

KEPT_NONCES = 512
"""Settled transactions of so many newest nonces are kept whole, to be sent again after a reorg."""
LOCK_TIMEOUT_S = 5.0
"""How long an earlier process may take to let go of the file."""

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS actions (
    id INTEGER PRIMARY KEY,
    scope TEXT NOT NULL,
    label TEXT,
    purpose TEXT NOT NULL,
    nonce INTEGER NOT NULL,
    state TEXT NOT NULL,
    tx_hash TEXT,
    block_number INTEGER,
    block_hash TEXT
) STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS one_action_per_label ON actions (scope, label)
    WHERE label IS NOT NULL AND state IN ('pending', 'mined');
CREATE UNIQUE INDEX IF NOT EXISTS one_action_per_nonce ON actions (scope, nonce)
    WHERE state IN ('pending', 'mined', 'reverted');
CREATE TABLE IF NOT EXISTS attempts (
    number INTEGER PRIMARY KEY,
    action INTEGER NOT NULL REFERENCES actions (id) ON DELETE CASCADE,
    tx_hash TEXT NOT NULL,
    raw BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS attempts_of ON attempts (action);
"""
_COLUMNS = "id, label, purpose, nonce, state, tx_hash, block_number, block_hash"


class ActionState(StrEnum):
    """How far an action has come."""

    PENDING = "pending"
    """It may be mined, now or later."""
    MINED = "mined"
    """It succeeded, in the block that is noted."""
    REVERTED = "reverted"
    """It was mined and did nothing; its nonce is used."""
    REPLACED = "replaced"
    """Its nonce was used by a transaction that is not one of its attempts."""
    REFUSED = "refused"
    """No node took it: its nonce is free."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a transaction was mined."""

    tx_hash: str
    """The attempt that was."""
    block_number: int
    """Its block's height."""
    block_hash: str
    """Its block's hash."""


@dataclass(frozen=True, slots=True)
class Action:
    """Something that was, or is to be, done exactly once."""

    number: int
    """In the journal."""
    label: str | None
    """The caller's name for it."""
    purpose: str
    """Whom it calls, with which selector."""
    nonce: int
    """The account's nonce."""
    state: ActionState
    """How far it has come."""
    attempts: tuple[Signed, ...]
    """Signed transactions, oldest first; none once it is long settled."""
    place: Place | None = None
    """Where it was mined."""


class SendJournal:
    """The transactions of one account on one chain."""

    def __init__(self, path: Path | None, scope: str) -> None:
        """Open or create the file; without a path, nothing outlives the process.

        `scope` says which account on which chain: others' transactions in the file are left alone.
        Raises ConfigError while another process holds it, StorageError when it cannot be used.
        """
        self._path = path
        self._scope = scope
        # Held across a statement and its commit: a cancelled caller's thread may still be at it.
        self._lock = threading.Lock()
        self._connection = _open(path)

    @classmethod
    def of(cls, path: Path | None, *, chain_id: int, genesis: str, account: Address) -> Self:
        """Return the journal of an account on a chain that begins with a block's hash."""
        return cls(path, f"{chain_id}:{genesis}:{account}")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()

    # --------------------------------------------------------------------- write

    async def begin(self, label: str | None, purpose: str, nonce: int, first: Signed) -> Action:
        """Note an action and its first attempt; on disk when it returns."""

        def write() -> Action:
            row = self._connection.execute(
                "INSERT INTO actions (scope, label, purpose, nonce, state)"
                " VALUES (?, ?, ?, ?, 'pending') RETURNING id",
                (self._scope, label, purpose, nonce),
            ).fetchone()
            self._add_attempt(row[0], first)
            return self._action(row[0])

        return await self._transact(write)

    async def add_attempt(self, action: Action, attempt: Signed) -> Action:
        """Note another attempt at an action; on disk when it returns."""

        def write() -> Action:
            self._add_attempt(action.number, attempt)
            return self._action(action.number)

        return await self._transact(write)

    async def resolve(
        self, action: Action, state: ActionState, place: Place | None = None
    ) -> Action:
        """Note what has become of an action."""

        def write() -> Action:
            if state is ActionState.PENDING:
                self._pass_on_label(action)
            where = (place.tx_hash, place.block_number, place.block_hash) if place else (None,) * 3
            self._connection.execute(
                "UPDATE actions SET state = ?, tx_hash = ?, block_number = ?, block_hash = ?"
                " WHERE id = ?",
                (state, *where, action.number),
            )
            if place is not None:
                self._forget(action.nonce - KEPT_NONCES)
            return self._action(action.number)

        return await self._transact(write)

    # ---------------------------------------------------------------------- read

    async def find(self, label: str) -> Action | None:
        """Return the action of a label that is pending or mined."""
        found = await self._select("label = ? AND state IN ('pending', 'mined')", label)
        return found[0] if found else None

    async def pending(self) -> list[Action]:
        """Return what may still be mined, by nonce."""
        return await self._select("state = 'pending'")

    async def settled_from(self, nonce: int) -> list[Action]:
        """Return what was mined with this nonce or a later one, by nonce."""
        return await self._select("nonce >= ? AND state IN ('mined', 'reverted')", nonce)

    # ------------------------------------------------------------------- storage

    async def _select(self, where: str, *values: object) -> list[Action]:
        def read() -> list[Action]:
            rows = self._connection.execute(
                f"SELECT id FROM actions WHERE scope = ? AND {where} ORDER BY nonce",
                (self._scope, *values),
            ).fetchall()
            return [self._action(number) for (number,) in rows]

        return await self._transact(read)

    async def _transact(self, work: Callable[[], T]) -> T:
        def run() -> T:
            try:
                with self._lock, self._connection:
                    self._connection.execute("BEGIN IMMEDIATE")
                    return work()
            except sqlite3.IntegrityError as error:
                raise StorageError(
                    f"the journal {self._shown} refuses a second action: {error}",
                    hint="does another process send with the same key?",
                ) from error
            except sqlite3.Error as error:
                raise StorageError(
                    f"the journal {self._shown} cannot be used: {error}",
                    hint="is the disk full? nothing is sent that is not in it",
                ) from error

        # In a thread, if there is a disk to wait for.
        return run() if self._path is None else await asyncio.to_thread(run)

    @property
    def _shown(self) -> str:
        return str(self._path or "in memory")

    def _add_attempt(self, number: int, attempt: Signed) -> None:
        self._connection.execute(
            "INSERT INTO attempts (action, tx_hash, raw) VALUES (?, ?, ?)",
            (number, attempt.tx_hash, attempt.raw),
        )

    def _action(self, number: int) -> Action:
        row = self._connection.execute(
            f"SELECT {_COLUMNS} FROM actions WHERE id = ?", (number,)
        ).fetchone()
        attempts = self._connection.execute(
            "SELECT tx_hash, raw FROM attempts WHERE action = ? ORDER BY number", (number,)
        ).fetchall()
        found, label, purpose, nonce, state, *where = row
        return Action(
            number=found,
            label=label,
            purpose=purpose,
            nonce=nonce,
            state=ActionState(state),
            attempts=tuple(Signed(tx_hash, raw) for tx_hash, raw in attempts),
            place=Place(*where) if where[0] else None,
        )

    def _pass_on_label(self, action: Action) -> None:
        """Leave the label to the action that was sent after this one had reverted, if any was."""
        self._connection.execute(
            "UPDATE actions SET label = NULL WHERE id = ? AND EXISTS (SELECT 1 FROM actions AS o"
            " WHERE o.scope = ? AND o.label = ? AND o.id != ? AND o.state IN ('pending', 'mined'))",
            (action.number, self._scope, action.label, action.number),
        )

    def _forget(self, before_nonce: int) -> None:
        """Drop what no reorganisation brings back: attempts, and actions without a label."""
        old = "scope = ? AND nonce < ? AND state != 'pending'"
        self._connection.execute(
            f"DELETE FROM attempts WHERE action IN (SELECT id FROM actions WHERE {old})",
            (self._scope, before_nonce),
        )
        self._connection.execute(
            f"DELETE FROM actions WHERE {old} AND (label IS NULL OR state != 'mined')",
            (self._scope, before_nonce),
        )


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
        connection.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} COMMIT;")
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
