"""Limits of connections: their number, size and deadline of headers, and peers that never read.

These limits apply below the level of requests. uvicorn itself waits without a limit for headers and
for slow readers, and does not limit the connections of one address, so one machine with a few
thousand silent sockets would keep everybody else out.

A full server does not refuse a new connection: it closes one that is waiting for its peer.
Connections of strangers, counted by address, are closed before those of members, which have carried
a signed request of someone with a role in the run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from muster.lifecycle import Proxies, most_connections
from muster.orchestrator.http.app import MAX_HEADER_BYTES
from muster.orchestrator.http.crowd import Crowd, place_of
from muster.orchestrator.http.errors import error_body
from muster.orchestrator.http.requests import NOTE_SIGNER_KEY
from muster.orchestrator.settings import OrchestratorSettings

RETRY_S = 5
"""`Retry-After` in seconds for a refused connection."""
LINGER_S = 2.0
"""Seconds for which the rest of a body is discarded after its request was answered."""
MEMBERS_SHARE = 0.75
"""Share of all connections that members may hold."""
MOST_PER_SIGNER = 16
"""Most connections of one signer that count as a member's."""
MOST_PIPELINED = 8
"""Most pipelined requests of one connection."""


class Counted(NamedTuple):
    """The crowd and the path in which a connection is counted."""

    crowd: Crowd[GuardedProtocol]
    path: tuple[str, ...]


@dataclass(slots=True)
class ConnectionCounts:
    """The open connections of one server."""

    most: int
    """Most open connections."""
    most_per_host: int
    """Most connections of one network address without a known signer."""
    proxies: Proxies
    """Addresses of reverse proxies, whose connections serve many clients and are not closed for
    others."""
    proxied: Crowd[GuardedProtocol] = field(default_factory=Crowd)
    """Connections of proxies, by address."""
    strangers: Crowd[GuardedProtocol] = field(default_factory=Crowd)
    """Connections without a signed request, by network and address."""
    members: Crowd[GuardedProtocol] = field(default_factory=Crowd)
    """Connections with a signed request, by signer."""

    def __len__(self) -> int:
        return len(self.proxied) + len(self.strangers) + len(self.members)

    def enter(self, guest: GuardedProtocol, host: str) -> tuple[int, str] | None:
        """Count a connection; return status and message when there is no room for it."""
        path = place_of(host)
        is_proxied = host in self.proxies
        neighbours = self.strangers.part(*path)
        is_crowded = not is_proxied and len(neighbours) >= self.most_per_host
        if is_crowded and not _dismiss_from(neighbours):
            return 429, "your address has too many connections open"
        if len(self) >= self.most and not self._make_room():
            return 503, "too many connections are open"
        self._count(guest, self.proxied if is_proxied else self.strangers, *path)
        return None

    def leave(self, guest: GuardedProtocol) -> None:
        """Stop counting a connection."""
        if guest.counted is not None:
            guest.counted.crowd.remove(guest, *guest.counted.path)
            guest.counted = None

    def touch(self, guest: GuardedProtocol) -> None:
        """Note activity on a connection."""
        if guest.counted is not None:
            guest.counted.crowd.touch(guest, *guest.counted.path)

    def know(self, guest: GuardedProtocol, signer: str) -> None:
        """Note who has signed a request on a connection."""
        if (
            guest.counted is None
            or guest.counted.crowd is self.proxied
            or guest.counted.path == (signer,)
        ):
            return
        own = self.members.part(signer)
        if len(own) < MOST_PER_SIGNER or _dismiss_from(own):
            self.leave(guest)
            self._count(guest, self.members, signer)

    def _make_room(self) -> bool:
        crowds = [self.strangers, self.members]
        if len(self.members) > MEMBERS_SHARE * self.most:
            crowds.reverse()
        return any(map(_dismiss_from, crowds))

    def _count(self, guest: GuardedProtocol, crowd: Crowd[GuardedProtocol], *path: str) -> None:
        crowd.add(guest, *path)
        guest.counted = Counted(crowd, path)


def _dismiss_from(crowd: Crowd[GuardedProtocol]) -> bool:
    """Close the first connection that is waiting for its peer; return whether there was one."""
    guest = next((guest for guest in crowd if guest.is_waited_for), None)
    if guest is not None:
        guest.dismiss()
    return guest is not None


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits: it closes connections that exceed them."""

    counts: ConnectionCounts
    header_timeout_s = 15.0
    read_timeout_s = 60.0
    counted: Counted | None = None
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _is_in_body = False
    _head_bytes = 0

    @property
    def is_waited_for(self) -> bool:
        """Whether it is the peer's turn: to send a request or the rest of a body, or to read an
        answer."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered or self._is_in_body or self._unread is not None

    def dismiss(self) -> None:
        """Close the connection to make room for another."""
        self.counts.leave(self)
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline for a request, if there is room for the connection."""
        super().connection_made(transport)
        problem = self.counts.enter(self, self.client[0] if self.client else "local")
        if problem is None:
            self._await_headers()
        else:
            self._refuse(*problem, code="too_many_connections", retry=True)

    def data_received(self, data: bytes) -> None:
        """Receive bytes; the deadline runs until the headers are complete."""
        if self.transport.is_closing():
            return
        # Bytes after a body in the same chunk are not counted: they are few, or more chunks follow.
        self._head_bytes += 0 if self._is_in_body else len(data)
        super().data_received(data)
        if self._is_in_body or self.transport.is_closing():
            return
        if self._head_bytes > MAX_HEADER_BYTES:
            self._refuse(431, "the request's headers are too large", code="headers_too_large")
        elif self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()

    def on_message_begin(self) -> None:
        """Let the request say who signed it."""
        super().on_message_begin()
        self.scope[NOTE_SIGNER_KEY] = self._note_signer  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        """Stop the deadline: the body has its own limits."""
        if self.transport.is_closing():
            return
        if len(self.pipeline) >= MOST_PIPELINED:
            self.transport.abort()
            return
        self._stop_waiting()
        self._is_in_body, self._head_bytes = True, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the headers of the next request."""
        self._is_in_body = False
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request; if this one's body is incomplete, only for a moment.

        If the connection were closed at once, the peer might not read why its body was refused.
        """
        super().on_response_complete()
        self.counts.touch(self)
        if self._is_in_body and self._deadline is None:
            self._deadline = self.loop.call_later(LINGER_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed HTTP with the usual error body."""
        self._refuse(400, msg, code="malformed_request")

    def pause_writing(self) -> None:
        """Start the deadline for a peer that does not read its answer."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the deadline: the peer reads."""
        self._stop_unread()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines and the connection."""
        self._stop_waiting()
        self._stop_unread()
        self.counts.leave(self)
        super().connection_lost(exc)

    def _note_signer(self, signer: str) -> None:
        self.counts.know(self, signer)

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
    counts = ConnectionCounts(
        most_connections(settings.max_connections),
        settings.max_connections_per_host,
        Proxies(settings.trusted_proxies),
    )
    limits = {
        "counts": counts,
        "header_timeout_s": settings.header_timeout_s,
        "read_timeout_s": settings.read_timeout_s,
    }
    return type("Protocol", (GuardedProtocol,), limits)
