"""The outages of a node: which errors its loops survive, and how they pace what is tried again."""

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Set

from muster.lifecycle.outage import FIRST_PAUSE_S, LONGEST_PAUSE_S, Outage
from muster.protocol.errors import (
    ApiError,
    ChainError,
    ConfigError,
    ContractRevert,
    EngineError,
    PolicyUnavailable,
    ProtocolError,
    StorageError,
    TaskError,
)

logger = logging.getLogger(__name__)

SURVIVED = (ApiError, PolicyUnavailable, ChainError, EngineError, StorageError, MemoryError)
"""Errors that a loop survives: a later try may succeed by itself."""
UNUSABLE = (ConfigError, ProtocolError, TaskError)
"""Errors about what others published or sent; they end a step, but not the loop that takes steps
for others, too."""


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
        """Names of the dependencies that are not available now."""
        return [what for what, outage in self._outages.items() if outage.is_on]

    def failed(self, error: Exception) -> float:
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


def _dependency(error: Exception) -> str:
    if isinstance(error, ApiError):
        return "the orchestrator" if error.is_passing else "the orchestrator's consent"
    if isinstance(error, PolicyUnavailable):
        return "the policy"
    if isinstance(error, StorageError):
        return "the disk"
    if isinstance(error, MemoryError):
        return "this machine's memory"
    return "the chain" if isinstance(error, ChainError) else "the engine"


class Steps:
    """Takes steps on chain. A failed step is retried later, and reported once.

    A refusal without a reason is reported only when the next try is refused too. When several
    accounts send the same step at once, one succeeds, and a busy endpoint may give no reason for
    the others' failure.
    """

    def __init__(self, clock: Callable[[], float], *, retry_s: float, overtaken: Set[str]) -> None:
        """`retry_s` is the minimum time from the end of one try of a step to the next; `overtaken`
        are the contract errors that mean somebody else was first, or the chain's clock differs from
        ours.
        """
        self._clock = clock
        self._retry_s = retry_s
        self._overtaken = overtaken
        self._not_before: dict[tuple[object, str], float] = {}
        self._reported = set[tuple[object, str]]()
        self._unexplained = set[tuple[object, str]]()

    def is_due(self, about: object, what: str) -> bool:
        """Return whether a step may be tried now."""
        return self._clock() >= self._not_before.get((about, what), 0.0)

    async def take(
        self, about: object, what: str, act: Callable[[], Awaitable[object]], **fields: object
    ) -> None:
        """Take a step, unless it is under way or its last try ended less than `retry_s` ago."""
        if not self.is_due(about, what):
            return
        self._not_before[about, what] = math.inf
        try:
            await act()
        except (*SURVIVED, *UNUSABLE) as error:
            hint = getattr(error, "hint", None)
            fields |= {"error": str(error)} | ({"hint": hint} if hint else {})
            if isinstance(error, ContractRevert) and error.name in self._overtaken:
                logger.debug(f"{what} was overtaken", extra=fields)
            elif self._is_first_unexplained(about, what, error):
                logger.debug(f"{what} was refused without a reason", extra=fields)
            else:
                is_refused = isinstance(error, ContractRevert)
                said = f"{what} {'was refused' if is_refused else 'has to wait'}"
                self.report(about, said, **fields)
        finally:
            # Also after success: until the event is read, the step still looks undone.
            self._not_before[about, what] = self._clock() + self._retry_s

    def _is_first_unexplained(self, about: object, what: str, error: Exception) -> bool:
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
    """Call `serve` repeatedly until cancelled, and survive outages."""
    while True:
        try:
            await serve()
        except SURVIVED as error:
            # The chain's follower and the leasing loop report outages.
            logger.debug("nothing can be done now", extra={"error": str(error)})
        await asyncio.sleep(pause_s)
