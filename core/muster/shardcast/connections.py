"""A server's connections: the share that one machine may take, and the sending of bytes.

A machine is an IPv4 address, or the /64 of an IPv6 address. Knows nothing of chunks or versions;
the answers are `muster.shardcast.server`'s.
"""

import asyncio
import contextlib
import logging
import os
import select
import socket
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Generic, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from muster.lifecycle import Proxies, machine_of
from muster.shardcast.metrics import ShardMetrics

# Malformed requests are the sender's fault; aiohttp would log a traceback for each.
_quiet = logging.getLogger(f"{__name__}.http")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False

MAX_TRACKED_MACHINES = 4096
"""Most machines whose request rate is kept; beyond that, the longest idle one is dropped."""

FILES_EACH = 2
"""Most open files of a connection: its socket, and the chunk that is sent or received."""
FREE_CONNECTIONS = 8
"""Connections that do not count for a machine once it has received a whole chunk."""

SENDERS = 4
"""Threads for fast readers; the event loop serves all others."""
THREAD_S = 0.25
"""Longest time that a thread spends on one reader, in seconds."""
CONGESTION_CONTROL = b"bbr"
"""Congestion control of senders, if the kernel has it: it does not mistake random loss for a full
queue."""

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds that keep a server alive under misuse."""

    connections: int = 1024
    """Most open connections, fewer where the system has no files for them; beyond that, a newcomer
    replaces one of the machine that has most.
    """
    connections_per_address: int = 128
    """Most open connections from one machine."""
    requests_per_s: float = 500.0
    """Sustained requests per second from one machine."""
    burst: int = 1000
    """Requests a machine may make at once after a quiet time."""
    idle_s: float = 30.0
    """A connection without a complete request for this long is closed."""
    send_s: float = 120.0
    """A response that takes longer than this to send is cut off."""
    wait_s: float = 10.0
    """Longest wait for a version or chunk that is still to come."""
    waiting: int = 512
    """Most requests that wait at the same time; further ones are answered at once."""
    metrics_s: float = 5.0
    """Seconds for which the figures of /metrics about the disk are kept."""
    proxies: Proxies = field(default_factory=Proxies)
    """Reverse proxies: their connections are not limited, and X-Forwarded-For names the machine."""


class ConnectionTable(Generic[C]):
    """The machines that hold a server's connections; one event loop owns it.

    When a server is full, a newcomer replaces a connection of the machine that has most. Of these
    the one is cut whose last start or end of a request is oldest: idle ones and slow readers go
    first.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._held: dict[C, tuple[str, float]] = {}
        self._per_machine: Counter[str] = Counter()
        self._known: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def take(self, connection: C, machine: str, now_s: float) -> C | None:
        """Add a newcomer; returns the connection to cut, which may be the newcomer."""
        self._held[connection] = (machine, now_s)
        self._per_machine[machine] += 1
        if self._per_machine[machine] > self._limits.connections_per_address:
            return connection
        if len(self._held) <= self._limits.connections:
            return None
        most = max(map(self._counted, self._per_machine))
        crowd = {a for a in self._per_machine if self._counted(a) == most}
        return min(
            (c for c, (holder, _) in self._held.items() if holder in crowd),
            key=lambda c: (c is connection, self._held[c][1]),
        )

    def touch(self, connection: C, now_s: float) -> None:
        """Record that a request began or ended."""
        if connection in self._held:
            self._held[connection] = (self._held[connection][0], now_s)

    def know(self, machine: str) -> None:
        """Record that a machine received a whole chunk."""
        self._known.pop(machine, None)
        self._known[machine] = None
        if len(self._known) > MAX_TRACKED_MACHINES:
            self._known.popitem(last=False)

    def leave(self, connection: C) -> None:
        """Forget a connection; nothing happens when it is not in the table."""
        if (held := self._held.pop(connection, None)) is None:
            return
        self._per_machine[held[0]] -= 1
        if not self._per_machine[held[0]]:
            del self._per_machine[held[0]]

    def _counted(self, machine: str) -> int:
        return self._per_machine[machine] - FREE_CONNECTIONS * (machine in self._known)


class LimitedServer(web.Server):
    """aiohttp's connection factory, bounded in connections, header sizes and idle time."""

    def __init__(
        self,
        handler: Any,
        limits: ServerLimits,
        connections: ConnectionTable[RequestHandler],
        metrics: ShardMetrics,
    ) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            keepalive_timeout=limits.idle_s,
            lingering_time=0,
            access_log=None,
            logger=_quiet,
            max_line_size=1024,
            max_field_size=4096,
            max_headers=64,
        )
        self._proxies = limits.proxies
        self._table = connections
        self._metrics = metrics
        self._transports: dict[RequestHandler, asyncio.Transport] = {}

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Add a connection; cut one when there are too many."""
        super().connection_made(handler, transport)
        prefer_congestion_control(transport.get_extra_info("socket"))
        peer = transport.get_extra_info("peername")
        host = str(peer[0]) if peer else ""
        if host in self._proxies:
            return
        self._transports[handler] = transport
        cut = self._table.take(handler, machine_of(host), asyncio.get_running_loop().time())
        if cut is not None:
            self._metrics.cut_off.labels("too_many" if cut is handler else "displaced").inc()
            self._table.leave(cut)
            self._transports[cut].abort()
        self._metrics.connections.set(len(self._table))

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        super().connection_lost(handler, exc)
        self._transports.pop(handler, None)
        self._table.leave(handler)
        self._metrics.connections.set(len(self._table))


def prefer_congestion_control(sock: socket.socket, name: bytes = CONGESTION_CONTROL) -> None:
    """Use this congestion control, or the machine's default if the kernel lacks it."""
    option = getattr(socket, "TCP_CONGESTION", None)  # Linux and FreeBSD
    if option is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, name)


# Sending: from the page cache to the socket within the kernel. A thread, which wakes up cheaply,
# serves a fast reader. A reader that has not read everything after a moment is handed to the event
# loop, so slow readers occupy no thread.


class Sender:
    """Sends parts of files over an event loop's transports."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(SENDERS, thread_name_prefix="send")
        self._busy = 0

    async def close(self) -> None:
        """Wait for the threads, `THREAD_S` at most."""
        await asyncio.to_thread(self._threads.shutdown)

    async def send(self, transport: asyncio.Transport, file: BinaryIO, window: range) -> None:
        """Send a window of the file; raises ConnectionError when the reader has gone.

        The caller has written the head, and must not write during the call.
        """
        start = window.start
        if self._busy < SENDERS and _is_plain_and_idle(transport):
            sending = self._in_thread(transport, file, window)
            # Unlike an await of the future, this cancels no job when the caller is cancelled.
            await asyncio.wait([sending])
            start = sending.result()
        if start < window.stop:
            if transport.is_closing():
                raise ConnectionResetError("the reader has gone")
            loop = asyncio.get_running_loop()
            await loop.sendfile(transport, file, start, window.stop - start)

    def _in_thread(
        self, transport: asyncio.Transport, file: BinaryIO, window: range
    ) -> asyncio.Future[int]:
        """Let a thread send, with descriptors of its own; a job waits for no other one."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as copies:
            sock = os.dup(transport.get_extra_info("socket").fileno())
            copies.callback(os.close, sock)
            copy = os.dup(file.fileno())
            copies.callback(os.close, copy)
            sending = loop.run_in_executor(self._threads, _send, sock, copy, window)
            copies.pop_all()  # `_send` closes them
        self._busy += 1
        sending.add_done_callback(self._ended)
        return sending

    def _ended(self, sending: asyncio.Future[int]) -> None:
        self._busy -= 1
        if not sending.cancelled():
            sending.exception()  # seen: asyncio logs no failure of a job whose caller has gone


def _is_plain_and_idle(transport: asyncio.Transport) -> bool:
    encrypted = transport.get_extra_info("sslcontext") is not None
    return not encrypted and not transport.is_closing() and not transport.get_write_buffer_size()


def _send(sock: int, file: int, window: range) -> int:
    """Send for a while; return the place of the first unsent byte. Closes both descriptors."""
    deadline_s = time.monotonic() + THREAD_S
    at = window.start
    try:
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        while at < window.stop:
            try:
                count = os.sendfile(sock, file, at, window.stop - at)
            except BlockingIOError:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not poller.poll(left_s * 1000):
                    break
                continue
            if not count:
                raise ConnectionAbortedError("the file became shorter")
            at += count
        return at
    finally:
        os.close(sock)
        os.close(file)
