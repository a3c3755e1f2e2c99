"""Outages: a process reports why a dependency is lost, once, and retries until it is back."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from muster.protocol.errors import ApiError, ChainUnreachable, MusterError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S = 0.5
"""Seconds of pause after the first failure; it doubles each time."""
LONGEST_PAUSE_S = 30.0
"""Longest pause in seconds between two tries."""
MOST_CAUSES = 16
"""Most causes that are reported in one outage: a stranger's server can word each answer anew."""


class Outage:
    """Paces the retries of one dependency, and reports each cause and its return once."""

    def __init__(
        self,
        what: str,
        *,
        first_s: float = FIRST_PAUSE_S,
        longest_s: float = LONGEST_PAUSE_S,
        rng: random.Random | None = None,
    ) -> None:
        self._what = what
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng or random.Random()
        self._failures = 0
        self._said = set[str]()
        self._level = logging.DEBUG

    @property
    def is_on(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0

    def failed(self, error: Exception) -> float:
        """Return the seconds to pause before the next try."""
        text = str(error) or type(error).__name__
        if text not in self._said and len(self._said) < MOST_CAUSES:
            self._said.add(text)
            fields = {"error": text}
            if isinstance(error, MusterError) and error.hint:
                fields["hint"] = error.hint
            # The chain's follower already reports this outage for the whole process.
            level = logging.DEBUG if isinstance(error, ChainUnreachable) else logging.WARNING
            logger.log(
                level, f"{self._what} is not available, trying again until it is", extra=fields
            )
            self._level = max(self._level, min(level, logging.INFO))
        self._failures += 1
        pause: float = min(self._first_s * 2 ** min(self._failures - 1, 16), self._longest_s)
        # Jitter keeps many clients from retrying at the same moment.
        return pause * self._rng.uniform(0.5, 1.0)

    def recovered(self) -> None:
        """Note that a try succeeded."""
        if self._failures:
            fields = {"failures": self._failures}
            logger.log(self._level, f"{self._what} is available again", extra=fields)
        self._failures = 0
        self._said.clear()
        self._level = logging.DEBUG


async def await_orchestrator(ask: Callable[[], Awaitable[T]]) -> T:
    """Return the answer; retries while the orchestrator is unreachable or busy.

    Raises ApiError for a refusal, and for an answer that no orchestrator gives.
    """
    outage = Outage("the orchestrator")
    while True:
        try:
            answer = await ask()
        except ApiError as error:
            if not error.is_passing or error.code == "bad_answer":
                raise
            await asyncio.sleep(outage.failed(error))
            continue
        outage.recovered()
        return answer
