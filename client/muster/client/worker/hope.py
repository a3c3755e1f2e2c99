"""Whether a ticket can still be done in time: asked while it is generated. Pure but for a clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from muster.inference.engine import Progress
from muster.protocol.errors import TaskError

LEAST_SHARE = 0.1
"""Part of a ticket's time after which its pace is believed."""
DOUBT = 1.5
"""It is given up when it seems to take so many times what is left."""


class Hopeless(TaskError):
    """A ticket would not be done in time."""

    def __init__(self, message: str, takes_s: float) -> None:
        hint = "nothing was signed; it lapses, and this machine asks less often"
        super().__init__(message, hint=hint)
        self.takes_s = takes_s
        """Seconds that it would have taken, about."""


class Hope:
    """Watches over one ticket, from the moment that its generation begins."""

    def __init__(
        self,
        samples: int,
        due_at: float,
        is_first: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """There are so many `samples` to generate until `due_at`, of the clock; `is_first` tells
        whether the engine begins no other ticket's samples before them.
        """
        self._samples, self._due_at, self._clock = samples, due_at, clock
        self._is_first = is_first
        self._began_at, self._began_with = clock(), 0

    def __call__(self, made: Progress) -> None:
        """Raise Hopeless when the rest of the ticket takes far longer than it may.

        Short completions end first, so that the rest is rather thought too short than too long.
        """
        now = self._clock()
        if not self._is_first():
            # What it gets of the engine meanwhile says nothing of its pace.
            self._began_at, self._began_with = now, made.tokens
        spent_s, left_s = now - self._began_at, self._due_at - now
        per_s = (made.tokens - self._began_with) / max(spent_s, 1e-9)
        rest_s = 0.0
        if made.ended and spent_s >= LEAST_SHARE * (self._due_at - self._began_at):
            expected = made.ended_tokens / made.ended * self._samples
            rest_s = max(0.0, expected - made.tokens) / max(per_s, 1e-9)
        if left_s > 0 and rest_s <= DOUBT * left_s:
            return
        raise Hopeless(
            f"{made.ended} of {self._samples} samples are done after {spent_s:,.0f} s at "
            f"{per_s:,.0f} tokens/s, the rest takes about {rest_s:,.0f} s and has {left_s:,.0f} s",
            takes_s=max(spent_s + rest_s, spent_s * DOUBT),
        )
