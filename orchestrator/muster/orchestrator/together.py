"""Work that costs as much for one as for many, done for all who wait for it at the same moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from muster.protocol.errors import StorageError

T = TypeVar("T")
R = TypeVar("R")


class Together(Generic[T, R]):
    """Serves whoever waits in groups, one group after the other."""

    def __init__(self, serve: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]]) -> None:
        """`serve` returns an answer, or what to raise, for each of a group in order."""
        self._serve = serve
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._turn = asyncio.Lock()

    async def join(self, item: T) -> R:
        """Return the answer for one."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        # Who was woken by the same event comes along.
        await asyncio.sleep(0)
        async with self._turn:
            if not done.done():
                group, self._waiting = self._waiting, []
                await self._answer(group)
        return await done

    async def _answer(self, group: Sequence[tuple[T, asyncio.Future[R]]]) -> None:
        answers: Sequence[R | Exception]
        try:
            answers = await self._serve([item for item, _ in group])
        except Exception as error:  # each of the group raises it
            answers = [error] * len(group)
        except BaseException:
            _settle(group, [StorageError("the orchestrator is stopping")] * len(group))
            raise
        _settle(group, answers)


def _settle(group: Sequence[tuple[T, asyncio.Future[R]]], answers: Sequence[R | Exception]) -> None:
    for (_, done), answer in zip(group, answers, strict=True):
        if done.done():
            continue
        if isinstance(answer, Exception):
            done.set_exception(answer)
        else:
            done.set_result(answer)
