"""The status feed: sends every listener the newest status, in bounded memory."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from muster.orchestrator.http.crowd import Crowd, place_of
from muster.orchestrator.http.errors import refuse


@dataclass(frozen=True, slots=True)
class Notice:
    """One status on its way to a listener."""

    event_id: str
    """Id within this process; a listener that reconnects sends the last one it saw."""
    status: str
    """The status as JSON."""


@dataclass(eq=False, slots=True)
class _Listener:
    place: tuple[str, str]
    is_told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is a new status, or the stream ends."""
    is_ended: bool = False


class StatusFeed:
    """The newest status and its listeners. A slow listener skips to the newest status; nothing is
    queued.

    When all places are taken, the oldest stream of the network and address with most streams ends.
    Its listener may reconnect, and an address without streams always gets a place.
    """

    def __init__(
        self, *, max_listeners: int, max_per_host: int = 10_000, keepalive_s: float = 15.0
    ) -> None:
        self._max_listeners = max_listeners
        self._keepalive_s = keepalive_s
        self._max_per_host = max_per_host
        self._listeners: Crowd[_Listener] = Crowd()
        self._latest = ""
        self._published = 0
        self._process = secrets.token_hex(4)
        self._is_closed = False

    @property
    def listeners(self) -> int:
        """Number of current listeners."""
        return len(self._listeners)

    @property
    def event_id(self) -> str:
        """Id of the newest status."""
        return f"{self._process}-{self._published}"

    def publish(self, status: str) -> None:
        """Send a status to all listeners, unless it equals the last one."""
        if status == self._latest:
            return
        self._latest = status
        self._published += 1
        for listener in self._listeners:
            listener.is_told.set()

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        for listener in list(self._listeners):
            self._end(listener)

    def require_room(self, host: str = "") -> None:
        """Refuse a listener beyond the limit of its address, or one that would be evicted
        itself."""
        place = place_of(host)
        own = len(self._listeners.part(*place))
        if own >= self._max_per_host:
            raise refuse(
                "too_many_streams", f"your address has {own} streams open, which is the limit"
            )
        if self.listeners >= self._max_listeners:
            first = next(iter(self._listeners), None)
            if first is None or own >= len(self._listeners.part(*first.place)):
                raise refuse(
                    "too_many_listeners", f"{self.listeners} streams are open, which is the limit"
                )

    async def listen(
        self, first: str, last_seen: str | None = None, host: str = ""
    ) -> AsyncGenerator[Notice | None, None]:
        """Yield `first`, then each newer status; None at intervals, to keep the connection alive.

        If `last_seen` is the newest status, `first` is skipped.
        """
        listener = _Listener(place_of(host))
        self._make_room()
        self._listeners.add(listener, *listener.place)
        seen = self._published
        try:
            if last_seen != self.event_id:
                yield Notice(self.event_id, first)
            while not (listener.is_ended or self._is_closed):
                # A status published while the listener was busy is sent at once.
                if seen == self._published and not await self._is_told_soon(listener):
                    yield None
                    continue
                seen = self._published
                if not listener.is_ended:
                    yield Notice(self.event_id, self._latest)
        finally:
            self._end(listener)

    def _make_room(self) -> None:
        while self._listeners and self.listeners >= self._max_listeners:
            self._end(next(iter(self._listeners)))

    def _end(self, listener: _Listener) -> None:
        if not listener.is_ended:
            listener.is_ended = True
            listener.is_told.set()
            self._listeners.remove(listener, *listener.place)

    async def _is_told_soon(self, listener: _Listener) -> bool:
        listener.is_told.clear()
        try:
            async with asyncio.timeout(self._keepalive_s):
                await listener.is_told.wait()
        except TimeoutError:
            return False
        return True
