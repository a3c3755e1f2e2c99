"""How a process lives through the loss of what it depends on: says so once, and tries again."""

from __future__ import annotations

import logging
import random

logger = logging.getLogger(__name__)

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

    @property
    def is_on(self) -> bool:
        """Whether the last try failed."""
        return self._failures > 0

    def failed(self, error: Exception) -> float:
        """Return the seconds to pause before the next try."""
        if not self._failures:
            logger.warning(
                f"{self._what} is not available, trying again until it is",
                extra={"error": str(error) or type(error).__name__},
            )
        self._failures += 1
        pause: float = min(self._first_s * 2 ** min(self._failures - 1, 16), self._longest_s)
        # Jitter keeps a fleet that lost its orchestrator from coming back in step.
        return pause * self._rng.uniform(0.5, 1.0)

    def recovered(self) -> None:
        """Note that a try succeeded."""
        if self._failures:
            logger.info(f"{self._what} is available again", extra={"failures": self._failures})
        self._failures = 0
