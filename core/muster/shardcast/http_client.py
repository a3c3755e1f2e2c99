"""A small HTTP/1.1 client: GET, keep-alive, bodies received straight into the caller's buffers.

It exists for speed: half a gigabyte takes a third of the CPU time of a general client, which would
allocate and copy every piece. It demands what docs/protocol.md section 10 promises: a
Content-Length, no transfer or content encoding, no redirects.
"""

import asyncio
import contextlib
import os
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from muster.lifecycle import in_turn
from muster.protocol.errors import ConfigError

MAX_HEAD_BYTES = 16 << 10
"""Most bytes of the status line and headers; more end the connection."""
CONNECT_S = 3.0
"""Deadline of a connection, in seconds."""
SILENCE_S = 20.0
"""Deadline in seconds for an answer's head and for each block of its body; longer than servers
wait."""
MAX_IDLE_PER_HOST = 16
"""Connections kept open for the next request."""

DEFAULT_PORTS = {"http": 80, "https": 443}
"""Port by scheme of URLs without one."""

ConnectsTo = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the name or the addresses to connect to for a host and port; raises OSError to refuse
it."""

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: .*)?")


class BadAnswer(ConnectionError):
    """The peer does not speak the HTTP that this client demands."""


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """Status and framing of an answer."""

    status: int
    """HTTP status code."""
    length: int
    """Bytes of the body."""
    keeps_alive: bool
    """Whether the connection can be used again."""


class Connection(asyncio.BufferedProtocol):
    """One connection, one request at a time. Reading is paused while nobody waits for bytes."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = bytearray(MAX_HEAD_BYTES)
        self._held = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._leftover = memoryview(b"")
        self._saw: Callable[[int], object] = _unheard
        self._waiter: asyncio.Future[None] | None = None
        self._lost: ConnectionError | None = None
        self.is_fresh = True

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._lost is None and self._transport is not None

    def close(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()
        self._lost = self._lost or ConnectionAbortedError("closed")

    async def get(self, host: str, path: str, headers: Mapping[str, str]) -> AnswerHead:
        """Send a request and return the answer's head; its body is read with `read_into`."""
        if self._transport is None or self._lost is not None:
            raise self._lost or ConnectionAbortedError("not connected")
        fields = {"Host": host, "Accept-Encoding": "identity", **headers}
        lines = [f"GET {path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items()), "", ""]
        self._held = 0
        self._transport.write("\r\n".join(lines).encode("latin-1"))
        async with asyncio.timeout(SILENCE_S):
            while (end := self._head.find(b"\r\n\r\n", 0, self._held)) < 0:
                if self._held == MAX_HEAD_BYTES:
                    raise BadAnswer("the answer's head is too long")
                await self._wait()
        head = parse_head(bytes(self._head[:end]))
        self._leftover = memoryview(self._head)[end + 4 : self._held]
        if len(self._leftover) > head.length:
            raise BadAnswer("the answer has more bytes than it said")
        return head

    def take_over(self) -> tuple[bytes, socket.socket] | None:
        """Return the body's first bytes and a plain socket to receive the rest from, in a thread.

        None when the connection is encrypted: use `read_into` then. Until the caller has received
        the whole body and closed that socket, it may only call `interrupt` on the connection.
        """
        transport = self._transport
        if transport is None or transport.get_extra_info("sslcontext") is not None:
            return None
        early, self._leftover = bytes(self._leftover), memoryview(b"")
        return early, socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))

    def interrupt(self) -> None:
        """End the connection for a thread that receives from it."""
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    async def read_into(
        self, view: memoryview, *, saw: Callable[[int], object] | None = None
    ) -> None:
        """Fill the view with the next bytes of the body; `saw` is called with each number of new
        bytes.
        """
        early = min(len(self._leftover), len(view))
        view[:early] = self._leftover[:early]
        self._leftover = self._leftover[early:]
        self._target, self._filled, self._saw = view, early, saw or _unheard
        self._saw(early)
        try:
            async with asyncio.timeout(SILENCE_S):
                while self._filled < len(view):
                    await self._wait()
        finally:
            self._target, self._saw = None, _unheard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; nothing is read before a reader waits."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.pause_reading()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (the protocol's signature)
        """Return the buffer for the next bytes: the caller's view, or without one the head."""
        if self._target is not None:
            return self._target[self._filled :]
        return memoryview(self._head)[self._held :]

    def buffer_updated(self, nbytes: int) -> None:
        """Count received bytes; wake the reader that waits for a head or for a full view."""
        if self._target is None:
            self._held += nbytes
        else:
            self._filled += nbytes
            self._saw(nbytes)
            if self._filled < len(self._target):
                return
        self._wake()

    def eof_received(self) -> bool:
        """Close our side too."""
        self._fail(ConnectionResetError("the peer closed the connection"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Raise in the waiting reader."""
        self._fail(ConnectionResetError(str(exc or "the connection was closed")))

    async def _wait(self) -> None:
        if self._lost is not None or self._transport is None:
            raise self._lost or ConnectionAbortedError("not connected")
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.resume_reading()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._transport.pause_reading()

    def _wake(self) -> None:
        # Bytes that come before the waiter runs must stay in the kernel: there may be no buffer for
        # them.
        if self._transport is not None:
            self._transport.pause_reading()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: ConnectionError) -> None:
        self._lost = self._lost or error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._lost)


class HttpClient:
    """Connections to any number of hosts, reused between requests."""

    def __init__(self, headers: Mapping[str, str], connects_to: ConnectsTo | None = None) -> None:
        self._headers = headers
        self._connects_to = connects_to
        self._idle: dict[str, list[Connection]] = {}
        self._reached: dict[str, str] = {}
        self._tls: ssl.SSLContext | None = None
        self._is_closed = False

    def close(self) -> None:
        """Drop every idle connection now, and every other after its request."""
        self._is_closed = True
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    @asynccontextmanager
    async def get(
        self, url: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[AnswerHead, Connection]]:
        """Send a GET with these additional headers; the connection is kept if the body was read to
        its end without error.

        Raises ConnectionError, TimeoutError or OSError when the peer is not reached or breaks off.
        """
        parts = urlsplit(url)
        connection, head = await self._ask(parts, {**self._headers, **(headers or {})})
        try:
            yield head, connection
        except BaseException:
            connection.close()
            raise
        self._keep(parts, connection, head)

    async def _ask(
        self, parts: SplitResult, headers: Mapping[str, str]
    ) -> tuple[Connection, AnswerHead]:
        """Return a connection with its answer's head; a stale connection is replaced once."""
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        while True:
            connection = await self._connection(parts)
            try:
                return connection, await connection.get(parts.netloc, path, headers)
            except BaseException as error:
                connection.close()
                if connection.is_fresh or not isinstance(error, ConnectionResetError):
                    raise

    async def _connection(self, parts: SplitResult) -> Connection:
        idle = self._idle.get(_origin(parts), [])
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise ConnectionError(f"no URL of http or https: {parts.geturl()[:80]!r}")
        host, port = parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme]
        ends_at = time.monotonic() + CONNECT_S
        async with asyncio.timeout(CONNECT_S):
            found = await self._connects_to(host, port) if self._connects_to else [host]
        last = self._reached.get(_origin(parts))
        found = sorted(found, key=lambda address: address != last)
        refused: OSError = ConnectionError("its host has no address")
        for address, share_s in in_turn(found, ends_at - time.monotonic()):
            try:
                async with asyncio.timeout(share_s):
                    connection = await self._connect(parts.scheme, host, address, port)
            except OSError as error:  # also TimeoutError
                refused = error
                continue
            self._reached[_origin(parts)] = address
            return connection
        raise refused

    async def _connect(self, scheme: str, host: str, address: str, port: int) -> Connection:
        is_tls = scheme == "https"
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection,
            address,
            port,
            ssl=self._tls_context() if is_tls else None,
            server_hostname=host if is_tls else None,
        )
        return connection

    def _keep(self, parts: SplitResult, connection: Connection, head: AnswerHead) -> None:
        idle = self._idle.setdefault(_origin(parts), [])
        is_wanted = not self._is_closed and len(idle) < MAX_IDLE_PER_HOST
        if is_wanted and head.keeps_alive and connection.is_open:
            connection.is_fresh = False
            idle.append(connection)
        else:
            connection.close()

    def _tls_context(self) -> ssl.SSLContext:
        self._tls = self._tls or ssl.create_default_context()
        return self._tls


def require_url(url: str) -> str:
    """Return a server's base URL without its last slash; raises ConfigError for other texts."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"not a server's URL: {url!r}", hint="write it like http://host:8700")
    return url.rstrip("/")


def _unheard(_count: int) -> None:
    """Ignore the number of bytes."""


def _origin(parts: SplitResult) -> str:
    return f"{parts.scheme}://{parts.netloc}"


def parse_head(head: bytes) -> AnswerHead:
    """Return what an answer's head says; raises BadAnswer."""
    lines = head.split(b"\r\n")
    match = _STATUS.fullmatch(lines[0])
    if match is None:
        raise BadAnswer("the answer is not HTTP/1.1")
    fields = [line.partition(b":") for line in lines[1:]]
    named = [(name.strip().lower(), value.strip().lower()) for name, _, value in fields]
    lengths = {value for name, value in named if name == b"content-length"}
    encodings = (b"transfer-encoding", b"content-encoding")
    if any(name in encodings and value != b"identity" for name, value in named):
        raise BadAnswer("the answer is encoded")
    if len(lengths) != 1 or not re.fullmatch(rb"[0-9]{1,18}", length := lengths.pop()):
        raise BadAnswer("the answer has no single Content-Length")
    closes = (b"connection", b"close") in named or match[1] == b"0"
    return AnswerHead(int(match[2]), int(length), not closes)
