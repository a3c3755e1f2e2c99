"""The chain's clock between two blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.chain import Chain


class ChainClock:
    """The time that the next block will have at least: between blocks it goes on as ours does."""

    def __init__(self, chain: Chain, clock: Callable[[], float] = time.monotonic) -> None:
        self._chain = chain
        self._clock = clock
        self._head: tuple[int, int, float] | None = None

    async def now(self) -> float:
        """Return Unix seconds; raises ChainError."""
        block, now = await self._chain.latest_block(), self._clock()
        if self._head is None or self._head[:2] != (block.number, block.timestamp):
            self._head = (block.number, block.timestamp, now)
        return block.timestamp + now - self._head[2]
