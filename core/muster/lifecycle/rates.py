"""Token buckets per key, in bounded memory."""

import time
from collections import OrderedDict
from collections.abc import Callable


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
        """Take a token and return 0, or return the seconds until the key has one."""
        tokens = self._filled(key)
        passes = tokens >= 1
        self._keep(key, tokens - passes)
        return 0.0 if passes else (1 - tokens) / self._rate

    def charge(self, key: str, cost: float) -> None:
        """Take tokens for a cost that already occurred; the key may go into debt."""
        self._keep(key, self._filled(key) - cost)

    def debt_s(self, key: str) -> float:
        """Return the seconds until a key is out of debt."""
        return max(0.0, -self._filled(key) / self._rate)

    def _filled(self, key: str) -> float:
        now = self._monotonic()
        tokens, filled_at = self._buckets.get(key, (self._burst, now))
        return min(self._burst, tokens + (now - filled_at) * self._rate)

    def _keep(self, key: str, tokens: float) -> None:
        self._buckets[key] = (tokens, self._monotonic())
        self._buckets.move_to_end(key)
        if len(self._buckets) > self._max_keys:
            # The key that was inactive longest has the fullest bucket, so forgetting it loses
            # least.
            self._buckets.popitem(last=False)
