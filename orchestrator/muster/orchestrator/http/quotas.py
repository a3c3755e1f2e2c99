"""Token buckets per key, in bounded memory, and the room that bodies share."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from muster.orchestrator.settings import OrchestratorSettings

BURST_S = 8.0
"""So many seconds' worth of bytes may be sent at once: the largest file, at the default rate."""

NODE_BODY_BYTES = 16 << 20
"""Memory for the bodies of nodes' messages on their way in."""
SEAT_BODY_BYTES = 48 << 20
"""Memory for those of validators and the trainer: six of the largest."""
UPLOAD_BYTES = 4 << 30
"""Disk for files on their way in: 64 of the largest."""


class RateLimit:
    """Lets each key spend `rate` tokens per second, in bursts of at most `burst`."""

    def __init__(
        self,
        *,
        rate: float,
        burst: float,
        max_keys: int = 10_000,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._max_keys = max_keys
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, key: str) -> float:
        """Take a token and return 0, or return how long until the key has one."""
        tokens = self._filled(key)
        passes = tokens >= 1
        self._keep(key, tokens - passes)
        return 0.0 if passes else (1 - tokens) / self._rate

    def charge(self, key: str, cost: float) -> None:
        """Take tokens for what has happened already; a key may owe."""
        self._keep(key, self._filled(key) - cost)

    def debt_s(self, key: str) -> float:
        """Return how long a key has to wait until it owes nothing."""
        return max(0.0, -self._filled(key) / self._rate)

    def _filled(self, key: str) -> float:
        now = self._monotonic()
        tokens, filled_at = self._buckets.get(key, (self._burst, now))
        return min(self._burst, tokens + (now - filled_at) * self._rate)

    def _keep(self, key: str, tokens: float) -> None:
        self._buckets[key] = (tokens, self._monotonic())
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._max_keys:
            # The key that was quiet for longest has the fullest bucket, so least is forgotten.
            self._buckets.popitem(last=False)


@dataclass(eq=False, slots=True)
class Arrival:
    """A body on its way in."""

    signer: str
    size: int = 0
    """Bytes that have come."""
    is_dropped: bool = False
    """It lost its place: nobody waits for the rest."""
    waiting: asyncio.Timeout | None = None
    """Set while its reader waits for a part."""

    def drop(self) -> None:
        """Wait for it no longer."""
        self.is_dropped = True
        if self.waiting is not None:
            self.waiting.reschedule(0.0)


class BodyRoom:
    """Bytes that the bodies on their way in share.

    When there is no room left, the signer whose bodies take most of it loses the oldest of them. A
    body that is slow or never ends thus takes room from its own signer alone.
    """

    def __init__(self, most: int, *, most_bodies: int = 16) -> None:
        """`most_bodies` of one signer may be on their way at once."""
        self._most = most
        self._most_bodies = most_bodies
        self._by_signer: dict[str, list[Arrival]] = {}
        self._taken = 0

    @contextmanager
    def arrival(self, signer: str) -> Iterator[Arrival]:
        """Give a body of this signer a place until it is done with."""
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
        """Give a body so many bytes more, or drop it."""
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
    """What one network address and one signer may ask for."""

    host_requests: RateLimit
    """Requests of one address."""
    host_bytes: RateLimit
    """Bytes of bodies and answers of one address; charged afterwards, and owed."""
    signer_requests: RateLimit
    """Signed requests of one signer."""
    signer_bytes: RateLimit
    """Bytes of one signer; charged afterwards, and owed."""
    node_bodies: BodyRoom
    """Messages of nodes that are arriving."""
    seat_bodies: BodyRoom
    """Messages of validators and the trainer that are arriving: no worker can fill it."""
    uploads: BodyRoom
    """Files that are arriving, on disk."""

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
        )
