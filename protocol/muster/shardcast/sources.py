"""Which relay to ask next: success rate x bandwidth, learnt from every transfer.

Pure bookkeeping, no I/O; randomness is injected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from muster.shardcast.http_client import require_url

SMOOTHING = 0.3
"""Weight of the newest sample in the moving averages."""
HEALING = 0.01
"""What every relay's success rate regains with every update, so that none is shut out for good."""
MIN_SUCCESS = 0.01
"""Lowest success rate: a relay that failed stays worth a rare try."""
LIE_FACTOR = 0.1
"""What remains of the success rate of a relay that sent wrong bytes."""


@dataclass(slots=True)
class _Record:
    success: float = 1.0
    bytes_per_s: float | None = None


class SourceBook:
    """What is known about each relay."""

    def __init__(self, urls: Sequence[str], *, rng: Random, reserve: Sequence[str] = ()) -> None:
        """`reserve` are asked only when none of `urls` is left: the origin, if it allows that."""
        self._reserve = [require_url(url) for url in reserve]
        self._records = {url: _Record() for url in [*map(require_url, urls), *self._reserve]}
        self._rng = rng

    @property
    def urls(self) -> list[str]:
        """Every relay in the order given, then the reserve."""
        return list(self._records)

    @property
    def reserve(self) -> list[str]:
        """Those that are asked last."""
        return list(self._reserve)

    @property
    def relays(self) -> list[str]:
        """Those that are asked first."""
        return [url for url in self._records if url not in self._reserve]

    def weight(self, url: str) -> float:
        """Return success rate x bandwidth; an unmeasured relay counts as fast as the average."""
        known = [r.bytes_per_s for r in self._records.values() if r.bytes_per_s is not None]
        average = sum(known) / len(known) if known else 1.0
        record = self._records[url]
        return record.success * (record.bytes_per_s if record.bytes_per_s is not None else average)

    def choose(self, urls: Sequence[str]) -> str:
        """Return one of these at random, in proportion to the weights."""
        return self._rng.choices(urls, [self.weight(url) for url in urls])[0]

    def ranked(self, urls: Sequence[str]) -> list[str]:
        """Return these in a random order in which heavier ones tend to come first."""
        left, order = list(urls), list[str]()
        while left:
            order.append(self.choose(left))
            left.remove(order[-1])
        return order

    def succeeded(self, url: str, size: int, seconds: float) -> None:
        """Record a transfer of verified bytes."""
        record = self._records[url]
        sample = size / max(seconds, 1e-6)
        before = sample if record.bytes_per_s is None else record.bytes_per_s
        record.bytes_per_s = before + SMOOTHING * (sample - before)
        record.success += SMOOTHING * (1 - record.success)
        self._heal()

    def failed(self, url: str) -> None:
        """Record a transfer that broke off, timed out or was refused."""
        record = self._records[url]
        record.success = max(MIN_SUCCESS, record.success * (1 - SMOOTHING))
        self._heal()

    def lied(self, url: str) -> None:
        """Record wrong bytes: worse than a failure, as they cost a whole transfer."""
        record = self._records[url]
        record.success = max(MIN_SUCCESS, record.success * LIE_FACTOR)
        self._heal()

    def _heal(self) -> None:
        for record in self._records.values():
            record.success = min(1.0, record.success + HEALING)
