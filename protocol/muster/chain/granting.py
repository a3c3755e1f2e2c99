"""What an endpoint grants: how much at once, and how often. Each says so in its own words."""

from __future__ import annotations

import asyncio
import random
import re

from muster.protocol.errors import ChainUnreachable, RpcError

_PATIENCE = 8, 256
"""Answers in a row after which more is asked for again that was refused: at first, and at most."""
_PAUSE_S = 0.1, 2.0
"""Pause before a request is repeated, at first and at most, unless the endpoint names one."""
_RATE_CODES = frozenset({429, -32007, -32016, -32029})
_RATE_WORDS = re.compile(
    r"rate.{0,2}limit|too many requests|requests? limit|request count|per second|compute units"
    r"|throttl|capacity",
    re.IGNORECASE,
)
_BATCH_STATUSES = frozenset({400, 403, 405, 413, 415, 422, 500, 501})
_PASSING_STATUSES = frozenset({408, 429, 502, 503, 504})


class AnswerLost(ChainUnreachable):
    """A connection ended before its answer did."""

    may_pass, retry_after_s, is_for_size = True, 0.0, False


class HttpRefusal(ChainUnreachable):
    """An endpoint answered an HTTP status that says no, and no JSON."""

    def __init__(self, message: str, *, status: int, retry_after: str | None, hint: str) -> None:
        """`retry_after` is the header of that name, if there was one."""
        super().__init__(message, hint=hint)
        self.status = status
        try:
            self.retry_after_s = float(retry_after or 0)
        except ValueError:
            # It may be a date.
            self.retry_after_s = 0.0

    @property
    def may_pass(self) -> bool:
        """Whether the same may be granted a little later."""
        return self.status in _PASSING_STATUSES

    @property
    def is_for_size(self) -> bool:
        """Whether less may be granted: endpoints refuse batches with many statuses."""
        return self.status in _BATCH_STATUSES


def is_for_rate(error: RpcError) -> bool:
    """Return whether the same request may be granted a little later."""
    if error.data:
        # A contract's own words.
        return False
    return error.code in _RATE_CODES or _RATE_WORDS.search(str(error)) is not None


class Portion:
    """How much to ask for at once: less when it is refused, and now and then more again."""

    def __init__(self, first: int, most: int) -> None:
        """Ask for `first` at first, and never for more than `most`."""
        self.size = first
        self._most = self._granted = most
        self._patience = _PATIENCE[0]
        self._answers = 0

    def answered(self, *, is_much: bool = False, is_little: bool = True) -> None:
        """Note an answer: after a big one ask for less, after a small one for more."""
        self._answers += 1
        if self._answers >= self._patience:
            self._granted = min(2 * self._granted, self._most)
            self._answers = 0
        if is_much:
            self.size = max(1, self.size // 2)
        elif is_little:
            self.size = min(2 * self.size, self._granted)

    def refused(self, size: int) -> None:
        """Ask for half of what was refused, and for longer each time."""
        self._granted = self.size = max(1, size // 2)
        self._patience = min(2 * self._patience, _PATIENCE[1])
        self._answers = 0

    def unanswered(self) -> None:
        """Ask for less: it may have been too much to answer in time."""
        self.size = max(1, self.size // 2)


class Patience:
    """Waits before what was refused for its rate is asked again, for so long and no longer."""

    def __init__(self, total_s: float) -> None:
        self._until = asyncio.get_running_loop().time() + total_s
        self._pause_s = _PAUSE_S[0]

    async def waits(self, at_least_s: float = 0.0) -> bool:
        """Wait and return True; return False at once when there is no time left to."""
        pause_s = max(at_least_s, self._pause_s * random.uniform(0.5, 1.0))
        if asyncio.get_running_loop().time() + pause_s > self._until:
            return False
        await asyncio.sleep(pause_s)
        self._pause_s = min(2 * self._pause_s, _PAUSE_S[1])
        return True
