"""Nonces: every signed request is used once.

A nonce is taken in memory at once and is on disk before the request is answered; between replicas
the database decides. Nonces outlive the requests they belong to, see `muster.api.limits`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable

from sqlalchemy import CursorResult, delete, select, tuple_

from muster.api.limits import NONCE_LIFE_S
from muster.api.signing import SignedHeaders
from muster.orchestrator.db.direct import Statement
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.group import GroupCommit
from muster.orchestrator.db.models import NonceRow
from muster.orchestrator.services.refusals import refuse
from muster.protocol.errors import ApiError

_INSERT = """
INSERT INTO nonces (signer, nonce, seen_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING RETURNING 1
"""

_SPAN_S = 60
"""Nonces are forgotten together with those of the same so many seconds."""
_PURGED_ROWS = 2_000
"""Rows deleted at a time: requests wait that long to be written."""


class NonceStore:
    """The nonces of the last NONCE_LIFE_S seconds."""

    def __init__(
        self,
        database: Database,
        group: GroupCommit,
        *,
        clock: Callable[[], float],
        valid_from: int = 0,
    ) -> None:
        self._database = database
        self._group = group
        self._clock = clock
        self._valid_from = valid_from
        # 100 bytes per nonce: they are most of what a busy process holds.
        self._spans: deque[tuple[int, dict[bytes, int]]] = deque()

    async def load(self) -> None:
        """Read the nonces that still count, and forget the others."""
        await self.purge()
        columns = select(NonceRow.signer, NonceRow.nonce, NonceRow.seen_at)
        async with self._database.read() as session:
            for signer, nonce, seen_at in await session.execute(columns.order_by(NonceRow.seen_at)):
                self._remember(_key(signer, nonce), seen_at)

    async def use(self, headers: SignedHeaders, *writes: Statement) -> None:
        """Use a verified request's nonce, and write the caller's rows in the same transaction.

        Refuses a nonce that this signer used before, and requests older than the database, whose
        nonces nobody remembers. Call it only for signers with a role: strangers must not fill the
        memory.
        """
        now, signer, nonce = int(self._clock()), headers.address, headers.nonce
        key = _key(signer, nonce)
        if headers.issued_at < self._valid_from:
            raise refuse("nonce_reused", "the request is older than this orchestrator's database")
        self._forget(now - NONCE_LIFE_S)
        if self._was_seen(key, now - NONCE_LIFE_S):
            raise _reused()
        if self._group.is_full:
            raise refuse("overloaded", "too many requests are waiting for the disk")
        self._remember(key, now)
        if not await self._group.add((_INSERT, (signer, nonce, now)), *writes):
            # Another replica had it.
            raise _reused()

    async def purge(self) -> None:
        """Delete rows that no longer count, a few at a time."""
        oldest = int(self._clock()) - NONCE_LIFE_S
        primary = tuple_(NonceRow.signer, NonceRow.nonce)
        expired = select(NonceRow.signer, NonceRow.nonce).where(NonceRow.seen_at < oldest)
        statement = delete(NonceRow).where(primary.in_(expired.limit(_PURGED_ROWS)))
        deleted = _PURGED_ROWS
        while deleted == _PURGED_ROWS:
            async with self._database.write(is_exclusive=False) as session:
                result = await session.execute(statement)
                assert isinstance(result, CursorResult)
                deleted = result.rowcount

    def _was_seen(self, key: bytes, oldest: int) -> bool:
        return any(span.get(key, -1) >= oldest for _, span in self._spans)

    def _remember(self, key: bytes, seen_at: int) -> None:
        if not self._spans or seen_at >= self._spans[-1][0] + _SPAN_S:
            self._spans.append((seen_at, {}))
        self._spans[-1][1][key] = seen_at

    def _forget(self, before: int) -> None:
        while self._spans and self._spans[0][0] + _SPAN_S <= before:
            self._spans.popleft()


def _key(signer: str, nonce: bytes) -> bytes:
    return hashlib.blake2b(signer.encode() + nonce, digest_size=16).digest()


def _reused() -> ApiError:
    return refuse("nonce_reused", "this request was received before", "sign a new request")
