"""Group commit: rows of many requests share one transaction.

A signed request must not be answered before its nonce is on disk. One transaction per request would
limit the process to a few hundred requests per second; one transaction for all that wait at the
same moment does not.

When the database refuses rows, a binary search finds them, and only they are refused. Their caller
is then refused for a while, because the search delayed the others.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from muster.orchestrator.db import Database
from muster.orchestrator.db.query import RowError, Statement
from muster.protocol.errors import StorageError, StorageFailed

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause in seconds after a database failed twice in a row, and may work again."""
MOST_TOGETHER = 1000
"""Most requests in one transaction, which may all wait during a binary search."""
LOCK_MS = 250
"""Milliseconds that a transaction waits for a row locked by another replica; a commit takes far
less."""
REST_S = 5.0
"""Seconds for which a caller is refused after the database refused its rows."""


@dataclass(frozen=True, slots=True)
class _Request:
    caller: str
    """The owner of the rows."""
    writes: tuple[Statement, ...]
    """The rows."""
    done: asyncio.Future[bool]
    """Result: whether the first row was new."""


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
        """Return the seconds for which a caller is still refused because of refused rows; usually
        0."""
        return max(0.0, self._rests_until.get(caller, 0.0) - self._clock())

    async def add(self, *writes: Statement, caller: str) -> bool:
        """Write rows if the first of them is new; return whether it was, once it is on disk.

        The first statement returns a row if its key is new, and does nothing if it exists. Raises
        StorageError when the rows may not be on disk, RowError when the database refuses them.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(caller, writes, done))
        self._wake.set()
        return await done

    async def run(self) -> None:
        """Commit waiting requests until cancelled.

        Raises StorageError when the database fails and is not shared, unless its disk is full.
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
        """Commit the waiting requests; those whose rows are refused get an error."""
        group: list[_Request] = []
        try:
            await in_halves(group, self._commit, self._refuse)
            self._is_away = False
        # Even when cancelled, it must not leave a request waiting forever.
        except BaseException as error:
            if not group:
                group, self._waiting = self._waiting, []
            reason = StorageError("the database did not store the request")
            _fail(group, error if isinstance(error, StorageError) else reason)
            survived = StorageError if self._database.is_shared else StorageFailed
            if not isinstance(error, survived):
                raise
            logger.warning("the database stores no requests", extra={"error": str(error)})
            if self._is_away:
                await asyncio.sleep(RETRY_S)
            self._is_away = True

    async def _commit(self, group: list[_Request]) -> None:
        """Commit requests together, and answer them; an empty list is first filled with waiting
        requests."""
        is_next = not group
        async with self._database.transaction(
            is_exclusive=False, is_quick=True, lock_ms=LOCK_MS
        ) as asked:
            if is_next:
                # Filled only now, when its turn has come, to include requests that arrived
                # meanwhile.
                group += self._take()
            going = [each for each in group if not self._is_resting(each)]
            found = await asked.ask(*(each.writes[0] for each in going))
            kept = [each for each, rows in zip(going, found, strict=True) if rows]
            await asked.ask(*(statement for each in kept for statement in each.writes[1:]))
        for each, rows in zip(going, found, strict=True):
            if not each.done.done():
                each.done.set_result(bool(rows))

    def _take(self) -> list[_Request]:
        """Take the waiting requests, in an order that keeps two replicas from deadlocking."""
        taken, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
        if not self._database.is_shared:
            return taken
        return sorted(taken, key=lambda each: repr(each.writes[0].values))

    def _is_resting(self, request: _Request) -> bool:
        """Refuse a request if its caller's rows were refused a moment ago; return whether it
        was."""
        rest_s = self.rest_s(request.caller)
        if rest_s:
            _fail(
                [request],
                RowError("the database refused this caller's rows a moment ago", is_busy=True),
            )
        return rest_s > 0

    def _refuse(self, request: _Request, error: RowError) -> None:
        now = self._clock()
        self._rests_until = {who: at for who, at in self._rests_until.items() if at > now}
        self._rests_until[request.caller] = now + REST_S
        logger.warning(
            "the database refused a request",
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
    """Serve a group; if the database refuses it, serve its halves, then their halves.

    An item that fails alone is refused. The first failing item is found before the search for the
    next, which may be of the same caller. If a failure means waiting for a timeout, larger parts
    are tried first, so that most of a group waits for only one timeout.
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

    It is for work that costs as much for one as for many. If the database refuses a caller's rows,
    the whole group fails; it is then served in halves until that caller is alone.
    """

    def __init__(self, serve: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]]) -> None:
        """`serve` returns an answer or an exception for each item of a group, in order."""
        self._serve = serve
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._turn = asyncio.Lock()

    async def join(self, item: T) -> R:
        """Return the answer for one item."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        # Let other tasks woken by the same event join the group.
        await asyncio.sleep(0)
        async with self._turn:
            if not done.done():
                group, self._waiting = self._waiting, []
                await self._answer(group)
        return await done

    async def _answer(self, group: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            await in_halves(group, self._serve_part, _refuse)
        except Exception as error:  # raised by every unanswered item of the group
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
