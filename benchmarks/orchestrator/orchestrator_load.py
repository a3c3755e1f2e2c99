"""A load generator with little CPU cost: requests are signed and encoded beforehand.

Requests come due at a fixed rate, whether or not earlier ones are answered, and each one's time
counts from when it was due: a server that stalls is charged for everybody who had to wait.
Connections come from addresses of their own in 127.0.0.0/8, as nodes do from theirs.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

CONNECTIONS = 64
TICK_S = 0.001
ANSWER_S = 60.0
"""Longest wait for the last answer."""
BROKEN = 0
"""Status of a request whose connection broke off."""


def wire(method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    """Return a request as it is sent."""
    lines = [f"{method} {path} HTTP/1.1", "host: orchestrator"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class Outcome:
    """Results of a set of requests."""

    wall_s: float = 0.0
    """From the first that was due to the last answer."""
    seconds: list[float] = field(default_factory=list)
    """Time of each answer since its request was due."""
    statuses: Counter[int] = field(default_factory=Counter)
    """Answers by status."""
    answers: list[bytes] = field(default_factory=list)
    """The answers' bodies, in the order of the requests."""

    @property
    def per_s(self) -> float:
        """Answers per second."""
        return len(self.seconds) / self.wall_s

    def percentile_ms(self, share: float) -> float:
        """Return the time within which this share of the answers came."""
        ordered = sorted(self.seconds)
        return 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class _Connection(asyncio.Protocol):
    """One request at a time over one connection."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._received = b""
        self._sent: tuple[int, float] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, number: int, due: float, request: bytes) -> None:
        """Send a request."""
        assert self._transport is not None
        self._sent = number, due
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Take in a part of an answer."""
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._received[:end].lower()
        at = head.find(b"content-length: ")
        size = 0 if at < 0 else int(head[at + 16 :].split(b"\r", 1)[0])
        if len(self._received) >= end + 4 + size:
            body, self._received = self._received[end + 4 :], b""
            self._finish(int(head[9:12]), body)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Note a request that gets no answer."""
        if self._sent is not None:
            self._finish(BROKEN, b"")

    def close(self) -> None:
        """Close the connection."""
        assert self._transport is not None
        self._transport.close()

    def _finish(self, status: int, body: bytes) -> None:
        assert self._sent is not None
        (number, due), self._sent = self._sent, None
        outcome = self._load.outcome
        outcome.seconds.append(time.perf_counter() - due)
        outcome.statuses[status] += 1
        outcome.answers[number] = body
        self._load.go_on(self if status != BROKEN else None)


class _Load:
    """Hands requests that are due to connections that are free."""

    def __init__(self, requests: Sequence[bytes], rate: float | None) -> None:
        self.outcome = Outcome(answers=[b""] * len(requests))
        self._requests = requests
        self._rate = rate
        self._began = 0.0
        self._sent = 0
        self._free: deque[_Connection] = deque()
        self._done = asyncio.Event()

    async def run(self, host: str, port: int, connections: int) -> Outcome:
        """Send all, and wait for the answers."""
        loop = asyncio.get_running_loop()
        opened = []
        for number in range(connections):
            address = f"127.0.{1 + number // 250}.{1 + number % 250}"
            _, connection = await loop.create_connection(
                lambda: _Connection(self), host, port, local_addr=(address, 0)
            )
            opened.append(connection)
        self._free.extend(opened)
        self._began = time.perf_counter()
        async with asyncio.timeout(ANSWER_S + len(self._requests) / (self._rate or 100)):
            while not self._done.is_set():
                self._send_due()
                await asyncio.sleep(TICK_S)
        self.outcome.wall_s = time.perf_counter() - self._began
        for connection in opened:
            connection.close()
        return self.outcome

    def go_on(self, free: _Connection | None) -> None:
        """Give a free connection the next waiting request."""
        if free is not None:
            self._free.append(free)
        if len(self.outcome.seconds) == len(self._requests):
            self._done.set()
        else:
            self._send_due()

    def _send_due(self) -> None:
        now, total = time.perf_counter(), len(self._requests)
        while self._free and self._sent < total:
            due = now if self._rate is None else self._began + self._sent / self._rate
            if due > now:
                return
            self._free.popleft().send(self._sent, due, self._requests[self._sent])
            self._sent += 1


async def drive(
    url: str,
    requests: Sequence[bytes],
    *,
    rate: float | None = None,
    connections: int = CONNECTIONS,
) -> Outcome:
    """Send requests at a rate per second, or each as soon as a connection is free."""
    place = urlsplit(url)
    assert place.hostname is not None
    assert place.port is not None
    return await _Load(requests, rate).run(place.hostname, place.port, connections)
