"""How much of a server one address may take."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_TRACKED_ADDRESSES = 4096
"""Addresses whose request rate is remembered; beyond, the longest idle is forgotten."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Bounds that keep a server alive under misuse."""

    connections: int = 1024
    """Open connections."""
    connections_per_address: int = 128
    """Open connections from one address."""
    requests_per_s: float = 500.0
    """Sustained requests per second from one address."""
    burst: int = 1000
    """Requests an address may make at once after a quiet time."""
    idle_s: float = 30.0
    """A connection without a complete request for this long is closed."""
    send_s: float = 120.0
    """A response that takes longer than this to send is cut off."""
    wait_s: float = 10.0
    """Longest wait for a version or chunk that is still to come."""
    waiting: int = 512
    """Requests that may wait at the same time; beyond, they are answered at once."""


class RequestRates:
    """A token bucket per address. Not thread-safe: one event loop owns it."""

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self._rate = rate_per_s
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admit(self, address: str, now_s: float) -> bool:
        """Take one token; False when the address has none left."""
        tokens, then_s = self._buckets.pop(address, (float(self._burst), now_s))
        tokens = min(float(self._burst), tokens + (now_s - then_s) * self._rate)
        admitted = tokens >= 1
        self._buckets[address] = (tokens - 1 if admitted else tokens, now_s)
        while len(self._buckets) > MAX_TRACKED_ADDRESSES:
            self._buckets.popitem(last=False)
        return admitted
