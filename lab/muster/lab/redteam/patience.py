"""What lets a session of many processes take as long as it takes: progress decides, not the clock.

On a busy machine a session may be given a tenth of a processor; then everything in it is ten times
as slow, and no number of seconds is right. So what is counted is the processor time that the
session itself was given since something last got ahead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from muster.protocol.errors import MusterError

STALLED_CPU_S = 30.0
"""Processor time without progress after which there will be none; a whole session takes 10."""
STALLED_S = 900.0
"""The same in seconds, for members that wait without computing."""
RESTART_S = 1.0
"""Until what ended is started again."""


class Patience:
    """Says when waiting is over."""

    def __init__(
        self,
        *,
        cpu: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cpu = cpu
        self._clock = clock
        self._seen: object = None
        self._since = cpu(), clock()

    def is_over(self, progress: object) -> bool:
        """Return whether what grows with progress has been the same for too long."""
        now = self._cpu(), self._clock()
        if progress != self._seen:
            self._seen, self._since = progress, now
        cpu_s, wall_s = (b - a for a, b in zip(self._since, now, strict=True))
        return cpu_s > STALLED_CPU_S or wall_s > STALLED_S


class Starts:
    """Starts again what ended, as an operating system's services are."""

    def __init__(self, *, pause_s: float = RESTART_S) -> None:
        self._pause_s = pause_s
        self.ended: dict[str, str] = {}
        """Why who ended the last time."""

    async def keep(
        self,
        name: str,
        start: Callable[[], Coroutine[Any, Any, None]],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Run something until it is over; what ends with another error than MusterError raises."""
        while True:
            try:
                await start()
            except MusterError as error:
                if is_over():
                    return
                self.ended[name] = str(error)
            await asyncio.sleep(self._pause_s)
