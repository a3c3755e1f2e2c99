"""Nonces: every signed request is used once.

A nonce is taken in memory at once and is on disk before the request is answered; between replicas
the database decides. Nonces outlive the requests they belong to, see `muster.api.limits`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sqlalchemy import delete, select

from muster.api.limits import NONCE_LIFE_S
from muster.api.signing import SignedHeaders
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.group import GroupCommit, Write
from muster.orchestrator.db.models import NonceRow
from muster.orchestrator.services.refusals import refuse
from muster.protocol.errors import ApiError
from muster.protocol.ids import Address, Hash32

_INSERT = "INSERT INTO nonces (signer, nonce, seen_at) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"


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
        self._seen: set[tuple[Address, Hash32]] = set()
        self._by_age: deque[tuple[float, tuple[Address, Hash32]]] = deque()

    async def load(self) -> None:
        """Read the nonces that still count, and forget the others."""
        oldest = int(self._clock()) - NONCE_LIFE_S
        async with self._database.write() as session:
            await session.execute(delete(NonceRow).where(NonceRow.seen_at < oldest))
            rows = await session.scalars(select(NonceRow).order_by(NonceRow.seen_at))
            for row in rows:
                self._remember(Address(row.signer), Hash32(row.nonce), row.seen_at)

    async def use(self, headers: SignedHeaders, *writes: Write) -> None:
        """Use a verified request's nonce, and write the caller's rows in the same transaction.

        Refuses a nonce that this signer used before, and requests older than the database, whose
        nonces nobody remembers. Call it only for signers with a role: strangers must not fill the
        memory.
        """
        now, signer, nonce = self._clock(), headers.address, headers.nonce
        if headers.issued_at < self._valid_from:
            raise refuse("nonce_reused", "the request is older than this orchestrator's database")
        self._forget(now - NONCE_LIFE_S)
        if (signer, nonce) in self._seen:
            raise _reused()
        if self._group.is_full:
            raise refuse("overloaded", "too many requests are waiting for the disk")
        self._remember(signer, nonce, now)
        if not await self._group.add((_INSERT, (signer, nonce, int(now))), *writes):
            # Another replica had it.
            raise _reused()

    async def purge(self) -> None:
        """Delete rows that no longer count."""
        oldest = int(self._clock()) - NONCE_LIFE_S
        async with self._database.write() as session:
            await session.execute(delete(NonceRow).where(NonceRow.seen_at < oldest))

    def _remember(self, signer: Address, nonce: Hash32, seen_at: float) -> None:
        self._seen.add((signer, nonce))
        self._by_age.append((seen_at, (signer, nonce)))

    def _forget(self, before: float) -> None:
        while self._by_age and self._by_age[0][0] < before:
            self._seen.discard(self._by_age.popleft()[1])


def _reused() -> ApiError:
    return refuse("nonce_reused", "this request was received before", "sign a new request")
