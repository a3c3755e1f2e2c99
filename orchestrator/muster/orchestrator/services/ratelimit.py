"""Token buckets per key, in bounded memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable


class RateLimit:
    """Lets each key pass `rate` times per second, in bursts of at most `burst`."""

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
        now = self._monotonic()
        tokens, filled_at = self._buckets.pop(key, (self._burst, now))
        tokens = min(self._burst, tokens + (now - filled_at) * self._rate)
        passes = tokens >= 1
        self._buckets[key] = (tokens - passes, now)
        if len(self._buckets) > self._max_keys:
            # The key that was quiet for longest has the fullest bucket, so least is forgotten.
            self._buckets.popitem(last=False)
        return 0.0 if passes else (1 - tokens) / self._rate
