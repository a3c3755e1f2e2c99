"""Rate limits of hosts and signers, and shared space for arriving bodies."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from muster.lifecycle.rates import RateLimit
from muster.orchestrator.http.errors import refuse
from muster.orchestrator.settings import OrchestratorSettings

BURST_S = 8.0
"""Burst of bytes, in seconds at the sustained rate: at the default rate it fits the largest
file."""

NODE_BODY_BYTES = 16 << 20
"""Memory for arriving messages of nodes."""
SEAT_BODY_BYTES = 48 << 20
"""Memory for arriving messages of validators and the trainer: six of the largest."""
UPLOAD_BYTES = 4 << 30
"""Disk space for arriving files: 64 of the largest."""

BATCH_READS = 2
"""Batches that are read at once for strangers: the other threads are for writes and files."""
BATCH_READS_PER_HOST = 8
"""Most batches that one address may wait for, so that others come soon, too."""

PAGES_AT_ONCE = 2
"""Pages that are built at once: one may wait for a file or a relay, and does not delay another."""
PAGES_PER_NETWORK = 8
"""Most pages that one network may wait for."""
PAGE_SHARE = 0.25
"""Most of the event loop's time that pages take, sustained; the rest is for nodes and the chain."""
PAGE_BURST_S = 2.0
"""Seconds whose share pages may take at once."""


class Readings:
    """Turns for requests that read much: a few at once, the others wait, and hosts take turns."""

    def __init__(self, at_once: int, *, most_per_host: int, what: str = "batches") -> None:
        """`what` names for refusals what the requests read."""
        self._turns = asyncio.Semaphore(at_once)
        self._most, self._what = most_per_host, what
        self._of_host = Counter[str]()
        # Of each host one request queues for a turn, and the host's others queue here.
        self._queues = defaultdict[str, asyncio.Lock](asyncio.Lock)

    @asynccontextmanager
    async def turn(self, host: str) -> AsyncIterator[None]:
        """Wait for a turn, which lasts until the block ends; refuses a host with too many."""
        if self._of_host[host] >= self._most:
            raise refuse("overloaded", f"this address waits for too many {self._what}")
        self._of_host[host] += 1
        try:
            async with self._queues[host]:
                await self._turns.acquire()
            try:
                yield
            finally:
                self._turns.release()
        finally:
            self._of_host[host] -= 1
            if not self._of_host[host]:
                del self._of_host[host], self._queues[host]


@dataclass(eq=False, slots=True)
class Arrival:
    """An arriving body."""

    signer: str
    size: int = 0
    """Bytes received so far."""
    is_dropped: bool = False
    """Whether it lost its space, so that the rest is not awaited."""
    waiting: asyncio.Timeout | None = None
    """Deadline of the current read; set while the reader waits for a chunk."""

    def drop(self) -> None:
        """Stop waiting for the body."""
        self.is_dropped = True
        if self.waiting is not None:
            self.waiting.reschedule(0.0)


class BodyRoom:
    """Space that arriving bodies share.

    When it is full, the signer whose bodies take most of it loses its oldest body. A slow or
    endless body thus takes space from its own signer only.
    """

    def __init__(self, most: int, *, most_bodies: int = 16) -> None:
        """At most `most_bodies` bodies of one signer may arrive at once."""
        self._most = most
        self._most_bodies = most_bodies
        self._by_signer: dict[str, list[Arrival]] = {}
        self._taken = 0

    @contextmanager
    def arrival(self, signer: str) -> Iterator[Arrival]:
        """Reserve a place for a body of this signer until the block ends."""
        bodies = self._by_signer.setdefault(signer, [])
        arrival = Arrival(signer)
        bodies.append(arrival)
        if len(bodies) > self._most_bodies:
            self._drop(bodies[0])
        try:
            yield arrival
        finally:
            self._leave(arrival)

    def take(self, arrival: Arrival, size: int) -> None:
        """Give a body `size` more bytes of space, or drop it."""
        if arrival.is_dropped:
            return
        arrival.size += size
        self._taken += size
        while self._taken > self._most:
            greediest = max(self._by_signer.values(), key=lambda own: sum(b.size for b in own))
            self._drop(greediest[0])

    def _drop(self, arrival: Arrival) -> None:
        self._leave(arrival)
        arrival.drop()

    def _leave(self, arrival: Arrival) -> None:
        bodies = self._by_signer.get(arrival.signer, [])
        if arrival in bodies:
            self._taken -= arrival.size
            bodies.remove(arrival)
            if not bodies:
                del self._by_signer[arrival.signer]


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits per network address and per signer."""

    host_requests: RateLimit
    """Requests per address."""
    host_bytes: RateLimit
    """Bytes of bodies and answers per address; charged afterwards, so there may be debt."""
    signer_requests: RateLimit
    """Signed requests per signer."""
    signer_bytes: RateLimit
    """Bytes per signer; charged afterwards, so there may be debt."""
    node_bodies: BodyRoom
    """Space for arriving messages of nodes."""
    seat_bodies: BodyRoom
    """Space for arriving messages of validators and the trainer; workers cannot fill it."""
    uploads: BodyRoom
    """Disk space for arriving files."""
    batch_reads: Readings
    """Turns for reading a batch's submissions or proofs of checking."""
    pages: Readings
    """Turns for building a page, per network."""
    page_seconds: RateLimit
    """Seconds that building pages takes; charged afterwards, so there may be debt."""

    @classmethod
    def of(cls, rates: OrchestratorSettings) -> Quotas:
        """Return fresh quotas; requests burst to two seconds' worth."""
        return cls(
            RateLimit(rate=rates.rate_per_host, burst=2 * rates.rate_per_host),
            RateLimit(rate=rates.bytes_per_host, burst=BURST_S * rates.bytes_per_host),
            RateLimit(rate=rates.rate_per_signer, burst=2 * rates.rate_per_signer),
            RateLimit(rate=rates.bytes_per_signer, burst=BURST_S * rates.bytes_per_signer),
            BodyRoom(NODE_BODY_BYTES),
            BodyRoom(SEAT_BODY_BYTES),
            BodyRoom(UPLOAD_BYTES),
            Readings(BATCH_READS, most_per_host=BATCH_READS_PER_HOST),
            Readings(PAGES_AT_ONCE, most_per_host=PAGES_PER_NETWORK, what="pages"),
            RateLimit(rate=PAGE_SHARE, burst=PAGE_SHARE * PAGE_BURST_S),
        )
