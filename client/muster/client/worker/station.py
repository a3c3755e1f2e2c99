"""What the loops of a node share: the engine that some of them work on, and all tickets at hand.

Pure but for locks and a clock. Knows no network, chain or key.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.messages import Ticket

Policy = tuple[PolicyVersion, Hash32]
"""A version, and the root of its manifest."""

REACH = 0.8
"""Part of a lease in which a ticket must be done, with all that wait for the same engine, to be
asked for: the rest is for grading, uploads and longer completions."""
_MEASURED = 4
"""Tickets by the slowest of which an engine's speed is known."""


class Station:
    """An engine, the policy that it holds, and the speed at which it does tickets."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.loaded: Policy | None = None
        """The policy that the engine holds."""
        self.waiting = 0
        """Tickets that are leased and not generated yet."""
        self.tokens_per_s = 0.0
        """Speed at the last ticket."""
        self._took_s: deque[float] = deque(maxlen=_MEASURED)
        self._entering = asyncio.Lock()
        self._holders = 0
        self._at_work: list[Ticket] = []
        self._ended_at = float("-inf")
        self._left = asyncio.Event()

    @asynccontextmanager
    async def holding(
        self, policy: Policy, load: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Keep a policy loaded. Another one is loaded when nobody holds the present one any more,
        and until then nobody takes up the present one.
        """
        async with self._entering:
            if self.loaded != policy:
                while self._holders:
                    self._left.clear()
                    await self._left.wait()
                # A load that fails leaves the engine without any policy.
                self.loaded = None
                await load()
                self.loaded = policy
            self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._left.set()

    @contextmanager
    def at_work(self, ticket: Ticket) -> Iterator[Callable[[], float]]:
        """Let a ticket be generated and checked, beside others; yields what tells the seconds that
        the engine has spent on it: those since another one ended.
        """
        began = self._clock()
        self._at_work.append(ticket)
        try:
            yield lambda: self._clock() - max(began, self._ended_at)
        finally:
            self._at_work.remove(ticket)
            self._ended_at = self._clock()

    def is_first(self, ticket: Ticket) -> bool:
        """Return whether no other ticket at work is due before this one."""
        return min(self._at_work, key=lambda each: each.deadline) is ticket

    @property
    def is_held(self) -> bool:
        """Whether somebody works with the policy."""
        return self._holders > 0

    @property
    def takes_s(self) -> float | None:
        """Seconds that the slowest of the last tickets took; None while nothing is known."""
        return max(self._took_s, default=None)

    def took(self, seconds: float) -> None:
        """Note how long a ticket took, or would have taken."""
        self._took_s.append(seconds)

    def forget_speed(self) -> None:
        """Let the next ticket tell the speed."""
        self._took_s.clear()

    def reaches(self, lease_s: float | None) -> bool:
        """Return whether another ticket would be done in time; the first one is tried."""
        if self.takes_s is None or lease_s is None:
            return not self.waiting
        return (self.waiting + 1) * self.takes_s <= REACH * lease_s


class Held:
    """What a node has at hand, for all its loops."""

    def __init__(self) -> None:
        self.fetched: Policy | None = None
        """The newest policy that is on its disk."""
        self.tickets: list[Ticket] = []
        """The tickets that they work on."""
        self.asking = asyncio.Lock()
        """Held while a ticket is asked for: two who ask at a time would get the same."""
        self.lease_s: float | None = None
        """Seconds from the last lease to its deadline; None before the first."""
