"""Whether a slot was paid: asked of the escrow, which alone knows, and remembered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from muster.orchestrator.ports import ChainPort
from muster.protocol.errors import ChainError
from muster.protocol.ids import Address, RunId, Step

logger = logging.getLogger(__name__)

MAX_KNOWN = 10_000
"""Answers remembered."""
FRESH_S = 5.0
"""A slot that is not paid is asked about again after this time."""
TIMEOUT_S = 1.0
"""How long a page waits for the answer."""


class Payments:
    """Answers about single slots, one question at a time: pages are public, the endpoint is not."""

    def __init__(
        self, chain: ChainPort, run_id: RunId, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._chain = chain
        self._run_id = run_id
        self._monotonic = monotonic
        self._asking = asyncio.Lock()
        self._known: dict[tuple[Address, int, int], tuple[bool, float]] = {}

    async def is_paid(self, worker: Address, step: int, index: int) -> bool | None:
        """Return whether a slot was paid; None when the chain does not answer in time."""
        slot = (worker, step, index)
        try:
            async with asyncio.timeout(TIMEOUT_S), self._asking:
                paid, asked_at = self._known.get(slot, (False, float("-inf")))
                if self._monotonic() - asked_at < FRESH_S:
                    return paid
                paid = await self._chain.escrow.is_paid(self._run_id, worker, Step(step), index)
        except (TimeoutError, ChainError) as error:
            logger.warning("the chain does not say what was paid", extra={"error": str(error)})
            return None
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[slot] = (paid, self._monotonic())
        return paid
