"""The status feed: hands every listener the newest status, in bounded memory."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from muster.orchestrator.services.refusals import refuse


@dataclass(frozen=True, slots=True)
class Notice:
    """One status on its way to a listener."""

    event_id: str
    """Names it in this process: a listener that comes back says what it saw last."""
    status: str
    """The status as JSON."""


class StatusFeed:
    """The newest status and who listens. A slow listener skips to the newest; none is queued."""

    def __init__(
        self, *, max_listeners: int, max_per_host: int = 10_000, keepalive_s: float = 15.0
    ) -> None:
        self._max_listeners = max_listeners
        self._keepalive_s = keepalive_s
        self._max_per_host = max_per_host
        self._by_host: Counter[str] = Counter()
        self._latest = ""
        self._published = 0
        self._process = secrets.token_hex(4)
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def listeners(self) -> int:
        """How many listen now."""
        return self._by_host.total()

    @property
    def event_id(self) -> str:
        """The newest status's name."""
        return f"{self._process}-{self._published}"

    def publish(self, status: str) -> None:
        """Hand a status to everybody, unless it is the one they have."""
        if status == self._latest:
            return
        self._latest = status
        self._published += 1
        self._ring()

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        self._ring()

    def require_room(self, host: str = "") -> None:
        """Refuse a listener beyond the limits of all, and of a network address."""
        if self.listeners >= self._max_listeners:
            raise refuse("too_many_listeners", f"{self.listeners} streams are open already")
        if self._by_host[host] >= self._max_per_host:
            raise refuse(
                "too_many_streams", f"{self._by_host[host]} streams of your address are open"
            )

    async def listen(
        self, first: str, last_seen: str | None = None, host: str = ""
    ) -> AsyncGenerator[Notice | None, None]:
        """Yield `first`, then each newer status; None now and then, to keep a connection alive.

        A listener whose `last_seen` is the newest status waits for the next one at once.
        """
        self._by_host[host] += 1
        seen = self._published
        try:
            if last_seen != self.event_id:
                yield Notice(self.event_id, first)
            while not self._is_closed:
                # A status published while the listener was busy is due at once.
                if seen == self._published and not await self._is_changed_soon():
                    yield None
                    continue
                seen = self._published
                if not self._is_closed:
                    yield Notice(self.event_id, self._latest)
        finally:
            self._by_host -= Counter([host])

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
