"""How a process lives through the loss of what it depends on: says so once, and tries again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Set

from muster.protocol.errors import (
    ApiError,
    ChainError,
    ChainUnreachable,
    ConfigError,
    ContractRevert,
    EngineError,
    MusterError,
    PolicyUnavailable,
    StorageError,
)

logger = logging.getLogger(__name__)

SURVIVED = (ApiError, PolicyUnavailable, ChainError, EngineError, StorageError)
"""What a loop lives through: the next try may succeed without anybody's doing."""
FIRST_PAUSE_S = 0.5
"""Pause after the first failure; doubles from there."""
LONGEST_PAUSE_S = 30.0
"""Longest pause between two tries."""


class Outage:
    """Paces the retries of one dependency, and reports its loss and its return once each."""

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
        self._level = logging.INFO

    @property
    def is_on(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0

    def failed(self, error: Exception) -> float:
        """Return the seconds to pause before the next try."""
        if not self._failures:
            fields = {"error": str(error) or type(error).__name__}
            if isinstance(error, MusterError) and error.hint:
                fields["hint"] = error.hint
            # The follower of the chain reports its loss once, for the whole process.
            level = logging.DEBUG if isinstance(error, ChainUnreachable) else logging.WARNING
            logger.log(
                level, f"{self._what} is not available, trying again until it is", extra=fields
            )
            self._level = min(level, logging.INFO)
        self._failures += 1
        pause: float = min(self._first_s * 2 ** min(self._failures - 1, 16), self._longest_s)
        # Jitter keeps a fleet that lost its orchestrator from coming back in step.
        return pause * self._rng.uniform(0.5, 1.0)

    def recovered(self) -> None:
        """Note that a try succeeded."""
        if self._failures:
            fields = {"failures": self._failures}
            logger.log(self._level, f"{self._what} is available again", extra=fields)
        self._failures = 0


class Outages:
    """An Outage for each dependency of a client process."""

    def __init__(
        self,
        *,
        first_s: float = FIRST_PAUSE_S,
        longest_s: float = LONGEST_PAUSE_S,
        rng: random.Random | None = None,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng
        self._outages: dict[str, Outage] = {}

    @property
    def lasting(self) -> list[str]:
        """What is not available now."""
        return [what for what, outage in self._outages.items() if outage.is_on]

    def failed(self, error: MusterError) -> float:
        """Return the seconds to pause after one of the errors in SURVIVED."""
        what = _dependency(error)
        if what not in self._outages:
            self._outages[what] = Outage(
                what, first_s=self._first_s, longest_s=self._longest_s, rng=self._rng
            )
        return self._outages[what].failed(error)

    def recovered(self) -> None:
        """Note that everything worked."""
        for outage in self._outages.values():
            outage.recovered()


def _dependency(error: MusterError) -> str:
    if isinstance(error, ApiError):
        is_away = error.status >= 500 or error.status in (408, 429)
        return "the orchestrator" if is_away else "the orchestrator's consent"
    if isinstance(error, PolicyUnavailable):
        return "the policy"
    if isinstance(error, StorageError):
        return "the disk"
    return "the chain" if isinstance(error, ChainError) else "the engine"


class Steps:
    """Takes steps on chain. One that fails is tried again later, and reported once.

    A refusal without a reason is only reported when the next try is refused as well. Of several who
    send at the same moment one succeeds, and a busy endpoint may not say why the others failed.
    """

    def __init__(self, clock: Callable[[], float], *, retry_s: float, overtaken: Set[str]) -> None:
        """`retry_s` is the shortest time between two tries of a step; `overtaken` are the refusals
        which say that somebody else was first, or that the chain's clock is not where ours is.
        """
        self._clock = clock
        self._retry_s = retry_s
        self._overtaken = overtaken
        self._not_before: dict[tuple[object, str], float] = {}
        self._reported = set[tuple[object, str]]()
        self._unexplained = set[tuple[object, str]]()

    def is_due(self, about: object, what: str) -> bool:
        """Return whether a step was not tried just before."""
        return self._clock() >= self._not_before.get((about, what), 0.0)

    async def take(
        self, about: object, what: str, act: Callable[[], Awaitable[object]], **fields: object
    ) -> None:
        """Take a step about something, unless it was tried just before."""
        if not self.is_due(about, what):
            return
        # Also after success: until the event is read back, the step still looks undone.
        self._not_before[about, what] = self._clock() + self._retry_s
        try:
            await act()
        except (*SURVIVED, ConfigError) as error:
            fields |= {"error": str(error)} | ({"hint": error.hint} if error.hint else {})
            if isinstance(error, ContractRevert) and error.name in self._overtaken:
                logger.debug(f"{what} was overtaken", extra=fields)
            elif self._is_first_unexplained(about, what, error):
                logger.debug(f"{what} was refused without a reason", extra=fields)
            else:
                is_refused = isinstance(error, ContractRevert)
                said = f"{what} {'was refused' if is_refused else 'has to wait'}"
                self.report(about, said, **fields)

    def _is_first_unexplained(self, about: object, what: str, error: MusterError) -> bool:
        is_unexplained = isinstance(error, ContractRevert) and error.name == error.NO_REASON
        is_first = (about, what) not in self._unexplained
        if is_unexplained:
            self._unexplained.add((about, what))
        return is_unexplained and is_first

    def report(self, about: object, what: str, **fields: object) -> None:
        """Warn about something once."""
        level = logging.DEBUG if (about, what) in self._reported else logging.WARNING
        self._reported.add((about, what))
        logger.log(level, what, extra=fields)


async def serve_forever(serve: Callable[[], Awaitable[None]], pause_s: float) -> None:
    """Serve again and again until cancelled, through the loss of what that needs."""
    while True:
        try:
            await serve()
        except SURVIVED as error:
            # Whoever follows the chain, and whoever leases, says what is away.
            logger.debug("nothing can be done now", extra={"error": str(error)})
        await asyncio.sleep(pause_s)
