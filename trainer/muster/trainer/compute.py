"""The thread in which tensors live: one job at a time, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ComputeThread:
    """Runs blocking functions one after the other in one thread."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._running = 0

    @property
    def is_busy(self) -> bool:
        """Whether a function runs: it cannot be interrupted, so a stop may have to leave it."""
        return self._running > 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._executor, partial(self._counted, partial(function, *args, **kwargs))
        )

    def close(self) -> None:
        """Start no more functions; one that runs is not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _counted(self, function: Callable[[], T]) -> T:
        self._running += 1
        try:
            return function()
        finally:
            self._running -= 1
