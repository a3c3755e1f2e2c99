"""The chain's clock between two blocks, the health of reading it, and how tasks wake each other."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field


def loop_time() -> float:
    """Return the event loop's clock in seconds: monotonic, and virtual if the loop's is."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


class BlockClock:
    """Unix seconds as the chain counts them: the latest block's time plus what passed since."""

    def __init__(self, monotonic: Callable[[], float] = loop_time) -> None:
        self._monotonic = monotonic
        self._block_time = 0
        self._seen_at = monotonic()

    def update(self, block_time: int) -> None:
        """Set the time of the latest block."""
        if block_time != self._block_time:
            self._block_time = block_time
            self._seen_at = self._monotonic()

    def now(self) -> int:
        """Return the chain's time, at least the latest block's."""
        return self._block_time + int(self._monotonic() - self._seen_at)


AWAY_S = 30.0
"""Seconds without an answer after which the chain counts as away."""


@dataclass(slots=True)
class ChainHealth:
    """Health of reading the chain."""

    head: int | None = None
    """The block up to which all events were read."""
    read_at: float | None = None
    """Wall clock of the latest answer."""
    error: str | None = None
    """Error of the chain's endpoint since then; None when its last answer succeeded."""

    def succeeded(self, head: int, now: float) -> None:
        """Note a successful read."""
        self.head, self.read_at, self.error = head, now, None

    def failed(self, error: str) -> None:
        """Note a failed read."""
        self.error = error

    def is_away(self, now: float) -> bool:
        """Return whether the endpoint has failed for AWAY_S."""
        return self.error is not None and now - (self.read_at or 0) >= AWAY_S


@dataclass(frozen=True, slots=True)
class Wakes:
    """One event per background task, set by the code that has work for it."""

    poll: asyncio.Event = field(default_factory=asyncio.Event)
    """Read the chain now: one of our transactions was mined."""
    commit: asyncio.Event = field(default_factory=asyncio.Event)
    """A submission was received."""
    record: asyncio.Event = field(default_factory=asyncio.Event)
    """A validator handed in outcomes, or a batch was committed."""
    settle: asyncio.Event = field(default_factory=asyncio.Event)
    """Outcomes were posted."""
    status: asyncio.Event = field(default_factory=asyncio.Event)
    """Something the dashboard shows has changed."""

    def submission_received(self) -> None:
        """Wake the tasks that wait for submissions."""
        self.commit.set()
        self.status.set()

    def chain_changed(self) -> None:
        """Wake every task that depends on the chain."""
        for event in (self.commit, self.record, self.settle, self.status):
            event.set()


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set or the timeout is over; clears the event."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
    event.clear()


class Backoff:
    """Exponential backoff per key: the pause doubles with each failure."""

    def __init__(
        self,
        *,
        first_s: float,
        most_s: float = 300.0,
        max_keys: int = 10_000,
        monotonic: Callable[[], float] = loop_time,
    ) -> None:
        self._max_keys = max_keys
        self._first_s = first_s
        self._most_s = most_s
        self._monotonic = monotonic
        self._failures: dict[object, tuple[int, float]] = {}

    def is_due(self, key: object) -> bool:
        """Return whether the work may be tried now."""
        _, due = self._failures.get(key, (0, 0.0))
        return self._monotonic() >= due

    def failed(self, key: object) -> float:
        """Note a failure; returns the pause in seconds."""
        if len(self._failures) >= self._max_keys:
            now = self._monotonic()
            self._failures = {k: f for k, f in self._failures.items() if f[1] > now}
        failures = self._failures.get(key, (0, 0.0))[0] + 1
        pause = min(self._first_s * 2.0 ** min(failures - 1, 20), self._most_s)
        self._failures[key] = (failures, self._monotonic() + pause)
        return pause

    def succeeded(self, key: object) -> None:
        """Forget the key's failures."""
        self._failures.pop(key, None)
