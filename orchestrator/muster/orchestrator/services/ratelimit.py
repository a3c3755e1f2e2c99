"""Token buckets per key, in bounded memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

BURST_S = 8.0
"""So many seconds' worth of bytes may be sent at once: the largest file, at the default rate."""

MOST_BODY_BYTES = 64 << 20
"""Bytes of unverified JSON bodies in memory at a time; more are answered 503."""


class Rates(Protocol):
    """The rates that quotas are made of; the orchestrator's settings fit."""

    @property
    def rate_per_host(self) -> float:
        """Requests per second."""

    @property
    def rate_per_signer(self) -> float:
        """Requests per second."""

    @property
    def bytes_per_host(self) -> float:
        """Bytes per second."""

    @property
    def bytes_per_signer(self) -> float:
        """Bytes per second."""


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


@dataclass(slots=True)
class Room:
    """Memory that all requests share, in bytes."""

    most: int
    """What there is."""
    taken: int = 0
    """What is in use."""

    def take(self, size: int) -> bool:
        """Take some of it; returns whether there was so much."""
        if self.taken + size > self.most:
            return False
        self.taken += size
        return True

    def give_back(self, size: int) -> None:
        """Give some of it back."""
        self.taken -= size


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
    bodies: Room
    """Bodies that are arriving and not verified yet."""

    @classmethod
    def of(cls, rates: Rates) -> Quotas:
        """Return fresh quotas; requests burst to two seconds' worth."""
        return cls(
            RateLimit(rate=rates.rate_per_host, burst=2 * rates.rate_per_host),
            RateLimit(rate=rates.bytes_per_host, burst=BURST_S * rates.bytes_per_host),
            RateLimit(rate=rates.rate_per_signer, burst=2 * rates.rate_per_signer),
            RateLimit(rate=rates.bytes_per_signer, burst=BURST_S * rates.bytes_per_signer),
            Room(MOST_BODY_BYTES),
        )
