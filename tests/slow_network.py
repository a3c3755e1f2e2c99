"""Lets answers of chains and orchestrators take their time, `pytest --latency-s SECONDS`.

On one machine everybody has read the chain equally far. Where they have not, a validator is ahead
of the orchestrator, a client asks for what is not known yet, and so on: what holds only because
loopback is quick fails under this option.
"""

import asyncio
import functools
import os
import random
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import httpx

from muster.chain.rpc import Rpc

P = ParamSpec("P")
T = TypeVar("T")

SPIKE = 20
"""One message in this many takes up to this many times as long as usual."""


class SlowNetwork:
    """Delays this process's requests and their answers at random."""

    def __init__(self, usual_s: float) -> None:
        self._usual_s = usual_s
        self._random = random.Random(os.getpid())

    def install(self) -> None:
        """Slow down every JSON-RPC exchange and every request of an HTTP client, for good."""
        Rpc._exchange = self._slowed(Rpc._exchange)  # type: ignore[method-assign]
        httpx.AsyncClient.send = self._slowed(httpx.AsyncClient.send)  # type: ignore[method-assign]

    def _slowed(self, call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
        @functools.wraps(call)
        async def slow(*args: P.args, **kwargs: P.kwargs) -> T:
            await asyncio.sleep(self._delay_s())
            answer = await call(*args, **kwargs)
            await asyncio.sleep(self._delay_s())
            return answer

        return slow

    def _delay_s(self) -> float:
        if self._random.randrange(SPIKE) == 0:
            return self._random.uniform(0, SPIKE * self._usual_s)
        return self._random.expovariate(2 / self._usual_s)
