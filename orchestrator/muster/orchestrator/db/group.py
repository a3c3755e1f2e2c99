"""Group commit: rows of many requests share one transaction.

A signed request must not be answered before its nonce is on disk. One transaction per request would
bound the process to a few hundred per second; one for all that wait at the same moment does not.

Rows that the database does not take are looked for in halves, and only they are refused. Their
caller is refused for a while: looking for its rows made the others wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from muster.orchestrator.db import Database
from muster.orchestrator.db.query import RowError, Statement
from muster.protocol.errors import StorageError

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after a shared database was away twice in a row."""
MOST_TOGETHER = 1000
"""Requests in one transaction: so many wait, at most, while a row is looked for."""
LOCK_MS = 250
"""How long a transaction waits for a row that another replica holds: one commit takes far less."""
REST_S = 5.0
"""For how long a caller is refused after its rows were not taken."""


@dataclass(frozen=True, slots=True)
class _Request:
    caller: str
    """The owner of the rows."""
    writes: tuple[Statement, ...]
    """The rows."""
    done: asyncio.Future[bool]
    """Whether the first of them was new."""


class GroupCommit:
    """A queue of requests' rows and the task that writes them."""

    def __init__(
        self,
        database: Database,
        *,
        max_waiting: int = 20_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._max_waiting = max_waiting
        self._clock = clock
        self._waiting: list[_Request] = []
        self._wake = asyncio.Event()
        self._rests_until: dict[str, float] = {}
        self._is_away = False

    @property
    def is_full(self) -> bool:
        """Whether no more requests should wait."""
        return len(self._waiting) >= self._max_waiting

    def rest_s(self, caller: str) -> float:
        """Return for how long a caller is refused, because its rows were not taken; mostly 0."""
        return max(0.0, self._rests_until.get(caller, 0.0) - self._clock())

    async def add(self, *writes: Statement, caller: str) -> bool:
        """Write rows if the first of them is new; return whether it was, once it is on disk.

        Its statement does nothing where its key exists, and returns something where it does not.
        Raises StorageError when it may not be, RowError when the database does not take the rows.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(caller, writes, done))
        self._wake.set()
        return await done

    async def run(self) -> None:
        """Commit what waits, again and again, until cancelled.

        Raises StorageError when the database fails that is this process's own.
        """
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._waiting:
                    await self._serve()
        finally:
            _fail(self._waiting, StorageError("the orchestrator is stopping"))

    async def _serve(self) -> None:
        """Commit those who wait, those whose rows are taken; the others are told."""
        group: list[_Request] = []
        try:
            await in_halves(group, self._commit, self._refuse)
            self._is_away = False
        # Cancelled, too, it leaves nobody waiting for an answer that will never come.
        except BaseException as error:
            if not group:
                group, self._waiting = self._waiting, []
            reason = StorageError("the database did not take the request")
            _fail(group, error if isinstance(error, StorageError) else reason)
            if not (self._database.is_shared and isinstance(error, StorageError)):
                raise
            logger.warning("the database is away", extra={"error": str(error)})
            if self._is_away:
                await asyncio.sleep(RETRY_S)
            self._is_away = True

    async def _commit(self, group: list[_Request]) -> None:
        """Commit requests together, and answer them; an empty list is filled with who waits."""
        is_next = not group
        async with self._database.transaction(
            is_exclusive=False, is_quick=True, lock_ms=LOCK_MS
        ) as asked:
            if is_next:
                # Only now, in its turn: requests that came meanwhile come along.
                group += self._take()
            going = [each for each in group if not self._is_resting(each)]
            found = await asked.ask(*(each.writes[0] for each in going))
            kept = [each for each, rows in zip(going, found, strict=True) if rows]
            await asked.ask(*(statement for each in kept for statement in each.writes[1:]))
        for each, rows in zip(going, found, strict=True):
            if not each.done.done():
                each.done.set_result(bool(rows))

    def _take(self) -> list[_Request]:
        """Take who waits; two replicas write in the same order and never wait for each other."""
        taken, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
        if not self._database.is_shared:
            return taken
        return sorted(taken, key=lambda each: repr(each.writes[0].values))

    def _is_resting(self, request: _Request) -> bool:
        """Tell, and refuse, a request of a caller whose rows were not taken a moment ago."""
        rest_s = self.rest_s(request.caller)
        if rest_s:
            _fail([request], RowError("other rows of this caller were refused", is_busy=True))
        return rest_s > 0

    def _refuse(self, request: _Request, error: RowError) -> None:
        now = self._clock()
        self._rests_until = {who: at for who, at in self._rests_until.items() if at > now}
        self._rests_until[request.caller] = now + REST_S
        logger.warning(
            "the database did not take a request",
            extra={"caller": request.caller, "error": str(error)},
        )
        _fail([request], error)


def _fail(requests: Sequence[_Request], error: StorageError) -> None:
    for request in requests:
        if not request.done.done():
            request.done.set_exception(error)


T = TypeVar("T")
R = TypeVar("R")


async def in_halves(
    group: list[T],
    serve: Callable[[list[T]], Awaitable[None]],
    refuse: Callable[[T, RowError], None],
) -> None:
    """Serve a group; where the database does not take it, halves of it, then halves of those.

    An item that fails alone is refused. The first culprit is found before the next is looked for,
    which may be of the same caller. A failure that takes a time limit is looked for in the wider
    parts first, so that most of a group waits for one limit.
    """
    parts = deque([group])
    while parts:
        part = parts.popleft()
        try:
            await serve(part)
        except RowError as error:
            if len(part) == 1:
                refuse(part[0], error)
            else:
                middle = len(part) // 2
                halves = part[:middle], part[middle:]
                parts.extend(halves) if error.is_busy else parts.extendleft(reversed(halves))


class GroupedCalls(Generic[T, R]):
    """Serves all callers that wait at the same moment as one group, one group after the other.

    It is for work that costs as much for one as for many. A caller whose rows the database does not
    take fails the group's work; it is done again in halves, until that caller is alone.
    """

    def __init__(self, serve: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]]) -> None:
        """`serve` returns an answer, or what to raise, for each of a group in order."""
        self._serve = serve
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._turn = asyncio.Lock()

    async def join(self, item: T) -> R:
        """Return the answer for one."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        # Tasks that the same event woke come along.
        await asyncio.sleep(0)
        async with self._turn:
            if not done.done():
                group, self._waiting = self._waiting, []
                await self._answer(group)
        return await done

    async def _answer(self, group: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            await in_halves(group, self._serve_part, _refuse)
        except Exception as error:  # each that is left of the group raises it
            _settle(group, [error] * len(group))
        except BaseException:
            _settle(group, [StorageError("the orchestrator is stopping")] * len(group))
            raise

    async def _serve_part(self, group: list[tuple[T, asyncio.Future[R]]]) -> None:
        _settle(group, await self._serve([item for item, _ in group]))


def _refuse(one: tuple[T, asyncio.Future[R]], error: RowError) -> None:
    _settle([one], [error])


def _settle(group: Sequence[tuple[T, asyncio.Future[R]]], answers: Sequence[R | Exception]) -> None:
    for (_, done), answer in zip(group, answers, strict=True):
        if done.done():
            continue
        if isinstance(answer, Exception):
            done.set_exception(answer)
        else:
            done.set_result(answer)
