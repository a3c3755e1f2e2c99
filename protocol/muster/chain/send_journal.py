"""What a key has sent: on disk before it leaves, so that a crash neither loses nor repeats it.

One store per key, see `muster.chain.journal_store`. An *action* is what a caller asked for, perhaps
under a label; it has a nonce and one or more signed *attempts*, which differ in their fees only.
The store's own rules hold what must never happen: two live actions with one nonce, or one label.

Signatures are in it, keys are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self, TypeVar

from muster.chain.journal_store import Execute, JournalStore, SqliteStore
from muster.chain.outgoing import Signed
from muster.protocol.ids import Address

KEPT_NONCES = 512
"""Settled transactions of so many newest nonces are kept whole, to be sent again after a reorg."""

T = TypeVar("T")

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

    def __init__(self, store: JournalStore | Path | None, scope: str) -> None:
        """Use a store, or open the SQLite file of a path; with neither, nothing outlives the
        process.

        `scope` says which account on which chain: others' transactions in the store are left alone.
        Raises ConfigError while another process holds the file, StorageError when it cannot be
        used.
        """
        self._is_on_disk = store is not None
        self._store = SqliteStore(store) if store is None or isinstance(store, Path) else store
        self._scope = scope

    @classmethod
    def of(
        cls, store: JournalStore | Path | None, *, chain_id: int, genesis: str, account: Address
    ) -> Self:
        """Return the journal of an account on a chain that begins with a block's hash."""
        return cls(store, f"{chain_id}:{genesis}:{account}")

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    # --------------------------------------------------------------------- write

    async def begin(self, label: str | None, purpose: str, nonce: int, first: Signed) -> Action:
        """Note an action and its first attempt; on disk when it returns."""

        def write(execute: Execute) -> Action:
            [(number,)] = execute(
                "INSERT INTO actions (scope, label, purpose, nonce, state)"
                " VALUES (?, ?, ?, ?, 'pending') RETURNING id",
                (self._scope, label, purpose, nonce),
            )
            _add_attempt(execute, number, first)
            return _action(execute, number)

        return await self._transact(write)

    async def add_attempt(self, action: Action, attempt: Signed) -> Action:
        """Note another attempt at an action; on disk when it returns."""

        def write(execute: Execute) -> Action:
            _add_attempt(execute, action.number, attempt)
            return _action(execute, action.number)

        return await self._transact(write)

    async def resolve(
        self, action: Action, state: ActionState, place: Place | None = None
    ) -> Action:
        """Note what has become of an action."""

        def write(execute: Execute) -> Action:
            if state is ActionState.PENDING:
                self._pass_on_label(execute, action)
            where = (place.tx_hash, place.block_number, place.block_hash) if place else (None,) * 3
            execute(
                "UPDATE actions SET state = ?, tx_hash = ?, block_number = ?, block_hash = ?"
                " WHERE id = ?",
                (state, *where, action.number),
            )
            if place is not None:
                self._forget(execute, action.nonce - KEPT_NONCES)
            return _action(execute, action.number)

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
        def read(execute: Execute) -> list[Action]:
            rows = execute(
                f"SELECT id FROM actions WHERE scope = ? AND {where} ORDER BY nonce",
                (self._scope, *values),
            )
            return [_action(execute, number) for (number,) in rows]

        return await self._transact(read)

    async def _transact(self, work: Callable[[Execute], T]) -> T:
        # In a thread, if there is a disk or a network to wait for.
        if not self._is_on_disk:
            return self._store.run(work)
        return await asyncio.to_thread(self._store.run, work)

    def _pass_on_label(self, execute: Execute, action: Action) -> None:
        """Leave the label to the action that was sent after this one had reverted, if any was."""
        execute(
            "UPDATE actions SET label = NULL WHERE id = ? AND EXISTS (SELECT 1 FROM actions AS o"
            " WHERE o.scope = ? AND o.label = ? AND o.id != ? AND o.state IN ('pending', 'mined'))",
            (action.number, self._scope, action.label, action.number),
        )

    def _forget(self, execute: Execute, before_nonce: int) -> None:
        """Drop what no reorganisation brings back: attempts, and actions without a label."""
        old = "scope = ? AND nonce < ? AND state != 'pending'"
        execute(
            f"DELETE FROM attempts WHERE action IN (SELECT id FROM actions WHERE {old})",
            (self._scope, before_nonce),
        )
        execute(
            f"DELETE FROM actions WHERE {old} AND (label IS NULL OR state != 'mined')",
            (self._scope, before_nonce),
        )


def _add_attempt(execute: Execute, number: int, attempt: Signed) -> None:
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
        attempts=tuple(Signed(tx_hash, raw) for tx_hash, raw in attempts),
        place=Place(*where) if where[0] else None,
    )
