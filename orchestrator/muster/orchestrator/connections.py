"""What a connection may cost: how many, how long its headers and how slow, who never reads.

Everything here happens before a request exists, or below it: uvicorn itself waits for headers and
for a reader without a limit, and counts no connections of one address, so that one machine with a
few thousand silent sockets would keep everybody else out.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from muster.orchestrator.api.errors import error_body
from muster.orchestrator.api.guard import MAX_HEADER_BYTES
from muster.orchestrator.services.addresses import Proxies, subnet_of
from muster.orchestrator.settings import OrchestratorSettings

RETRY_S = 5
"""What a peer is told to wait whose connection is one too many."""


@dataclass(frozen=True, slots=True)
class Door:
    """Who is connected; one per server."""

    most: int
    """Most open connections."""
    most_per_host: int
    """Most of one network address that is no trusted proxy."""
    proxies: Proxies
    """Whose connections are many people's."""
    open: Counter[str] = field(default_factory=Counter)
    """Open connections by address."""

    def enter(self, host: str) -> tuple[int, str] | None:
        """Count a connection; return status and message when it is one too many."""
        self.open[host] += 1
        if self.open.total() > self.most:
            return 503, "too many connections are open"
        if self.open[host] > self.most_per_host and host not in self.proxies:
            return 429, "too many connections of your address are open"
        return None

    def leave(self, host: str) -> None:
        """Count a connection no more."""
        self.open[host] -= 1
        if not self.open[host]:
            del self.open[host]


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, closing connections that cost more than they may."""

    door: Door
    header_timeout_s = 15.0
    read_timeout_s = 60.0
    _host = ""
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _is_in_body = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request, if there is room for another connection."""
        super().connection_made(transport)
        self._host = subnet_of(self.client[0] if self.client else "local")
        problem = self.door.enter(self._host)
        if problem is None:
            self._await_headers()
        else:
            self._refuse(*problem, code="too_many_connections", retry=True)

    def data_received(self, data: bytes) -> None:
        """Take in bytes; while they are no complete headers yet, the deadline stands."""
        if self.transport.is_closing():
            return
        # What follows a body in one piece is not counted: it is short, or more comes.
        self._head_bytes += 0 if self._is_in_body else len(data)
        super().data_received(data)
        if self._is_in_body or self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "the request's headers are too large", code="headers_too_large")
        elif self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()

    def on_headers_complete(self) -> None:
        """Wait no longer: the rest has its own limits."""
        self._stop_waiting()
        self._is_in_body, self._head_bytes = True, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect headers again."""
        self._is_in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the form of every error."""
        self._refuse(400, msg, code="malformed_request")

    def pause_writing(self) -> None:
        """Give a peer that does not read its answer some time to."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on: it reads."""
        self._stop_unread()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines and the connection."""
        self._stop_waiting()
        self._stop_unread()
        self.door.leave(self._host)
        super().connection_lost(exc)

    def _refuse(self, status: int, message: str, *, code: str, retry: bool = False) -> None:
        body = error_body(code, message)
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n"
        head += f"retry-after: {RETRY_S}\r\n" if retry else ""
        self.transport.write(head.encode() + b"\r\n" + body)
        self.transport.close()

    def _await_headers(self) -> None:
        self._deadline = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def protocol_of(settings: OrchestratorSettings) -> type[GuardedProtocol]:
    """Return the protocol of one server, with its limits and its count."""
    door = Door(
        settings.max_connections,
        settings.max_connections_per_host,
        Proxies(settings.trusted_proxies),
    )
    limits = {
        "door": door,
        "header_timeout_s": settings.header_timeout_s,
        "read_timeout_s": settings.read_timeout_s,
    }
    return type("Protocol", (GuardedProtocol,), limits)
