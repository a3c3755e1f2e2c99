"""The status feed: hands every listener the newest status, in bounded memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from muster.orchestrator.services.refusals import refuse


class StatusFeed:
    """The newest status and who listens. A slow listener skips to the newest; none is queued."""

    def __init__(self, *, max_listeners: int, keepalive_s: float = 15.0) -> None:
        self._max_listeners = max_listeners
        self._keepalive_s = keepalive_s
        self._listeners = 0
        self._latest = ""
        self._published = 0
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def listeners(self) -> int:
        """How many listen now."""
        return self._listeners

    def publish(self, status: str) -> None:
        """Hand a status to everybody."""
        self._latest = status
        self._published += 1
        self._ring()

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        self._ring()

    def require_room(self) -> None:
        """Refuse a listener beyond the limit."""
        if self._listeners >= self._max_listeners:
            raise refuse("too_many_listeners", f"{self._listeners} streams are open already")

    async def listen(self, first: str) -> AsyncIterator[str | None]:
        """Yield `first`, then each newer status; None now and then, to keep a connection alive."""
        self._listeners += 1
        seen = self._published
        try:
            yield first
            while not self._is_closed:
                # A status published while the listener was busy is due at once.
                if seen == self._published and not await self._is_changed_soon():
                    yield None
                    continue
                seen = self._published
                if not self._is_closed:
                    yield self._latest
        finally:
            self._listeners -= 1

    async def _is_changed_soon(self) -> bool:
        changed = self._changed
        try:
            async with asyncio.timeout(self._keepalive_s):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    def _ring(self) -> None:
        rung, self._changed = self._changed, asyncio.Event()
        rung.set()
