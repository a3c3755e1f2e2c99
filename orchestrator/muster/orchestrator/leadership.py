"""The election of the replica that writes to the chain: it holds the database's leader lock.

The lock belongs to the very connection over which the leader journals its transactions. A replica
that loses the lock cannot journal, so two leaders cannot both send. The next leader finds the
journaled transactions of the earlier one and sends them again as they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from muster.orchestrator.db.postgres import LEADER_LOCK
from muster.orchestrator.metrics import IS_LEADER
from muster.protocol.errors import StorageError

if TYPE_CHECKING:
    from muster.chain import JournalStore
    from muster.chain.send_journal import PostgresStore

logger = logging.getLogger(__name__)

CAMPAIGN_S = 1.0
"""Time between two attempts at the lock."""
CHECK_S = 1.0
"""Time between two looks whether it is still held."""


class SenderPort(Protocol):
    """A chain whose journal can be replaced."""

    async def journal_in(self, store: JournalStore) -> None:
        """Send with this journal from now on."""


class Leadership:
    """This replica's part in the election."""

    def __init__(self, url: str, chain: SenderPort) -> None:
        self._url = url
        self._chain = chain

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Wait until this replica leads; inside, it may send.

        Raises StorageError inside once the lock is lost.
        """
        store = await self._win()
        try:
            await self._chain.journal_in(store)
            IS_LEADER.set(1)
            logger.info("this replica writes to the chain from now on")
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(_watch(store))
                yield
                watch.cancel()
        finally:
            IS_LEADER.set(0)
            await asyncio.to_thread(store.close)

    async def _win(self) -> PostgresStore:
        from muster.chain.send_journal import PostgresStore

        while True:
            try:
                store = await asyncio.to_thread(PostgresStore.acquire, self._url, LEADER_LOCK)
            except StorageError as error:
                logger.warning("no election without the database", extra={"error": str(error)})
            else:
                if store is not None:
                    return store
            await asyncio.sleep(CAMPAIGN_S)


async def _watch(store: PostgresStore) -> None:
    while True:
        await asyncio.sleep(CHECK_S)
        await asyncio.to_thread(store.check)
