"""Chooses the relay for each chunk, and when to ask a second one: nobody waits for a slow relay.

    a relay brings nothing for PATIENCE_S       its slot goes to another chunk; once every chunk was
                                                asked for, another relay is asked for this one too
    it is quiet for LEFT_AFTER_S                it is left; for LEFT_LAST_AFTER_S or STALL_S once
                                                every chunk was asked for
    it brings almost nothing for SILENCE_S      the request fails (`muster.shardcast.download`)

An attempt holds one of `parallel` slots while it brings bytes. An attempt that brings almost
nothing, or far less than others, is *quiet*: it may go on, but its slot is free for another.

 * while there are chunks that no relay was asked for, each relay that was never tried gets one, at
   short intervals, however fast the others are
 * once every chunk was asked for, a chunk without any arriving bytes is requested from another
   relay too; the first attempt that brings bytes goes on, the first verified copy counts
 * an attempt that becomes far slower than others, or than it was, is abandoned (*left*), and
   another relay goes on with its bytes; while the total rate stays high, none is left

Relays are compared at the same time only: if all are slow, slowness is no fault. So relays that
failed too often are tried again at intervals, like ones that were never tried.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

from muster.shardcast.chunks import VerifyingSink
from muster.shardcast.download import EXTRA, RelayFault, in_thread
from muster.shardcast.transfer import Transfer

TICK_S = 0.05
"""Seconds between two looks at the running attempts."""
WINDOW_S = 0.5
"""Seconds over which an attempt's rate is measured; younger attempts are not compared."""
PATIENCE_S = 0.15
"""An attempt younger than this, in seconds, is never quiet, and no second relay is asked."""
NOTHING_BYTES_PER_S = 16 << 10
"""An attempt below this rate brings almost nothing, however slow others are."""
QUIET_SHARE = 0.25
"""An attempt below this part of the best rate is quiet."""
FLOOR_SHARE = 0.125
"""An attempt below this part of another's rate, or of its own best, may be left."""
LEFT_AFTER_S = 1.0
"""An attempt is left after it was quiet for so many seconds, while chunks wait."""
LEFT_LAST_AFTER_S = 0.2
"""The same once every chunk was asked for."""
STALL_S = 0.3
"""Once every chunk was asked for, an attempt is left after it brought almost nothing for so many
seconds: another relay goes on with its bytes, and no other chunk needs the bandwidth.
"""
FULL_SHARE = 0.5
"""Our own bandwidth counts as used up while all attempts together bring this part of their highest
rate: asking other relays would gain nothing.
"""
EXPLORE_S = 0.2
"""While chunks wait, relays that were never tried are tried at this interval, in seconds."""


@dataclass(slots=True, eq=False)
class _Chunk:
    open_sink: Callable[[], VerifyingSink]
    attempts: list[_Attempt] = field(default_factory=list)
    begun: VerifyingSink | None = None
    """The bytes of an attempt that was left."""
    givers: set[str] = field(default_factory=set)
    """The relays that brought these bytes."""
    was_shared: bool = False
    """Whether two attempts at it ran at the same time."""
    is_alone: bool = False
    """Whether only one attempt at a time is allowed, from the first byte: shared bytes were wrong
    before."""

    def is_brought(self) -> bool:
        return any(attempt.brings() for attempt in self.attempts)


@dataclass(slots=True, eq=False)
class _Attempt:
    chunk: _Chunk
    url: str
    sink: VerifyingSink
    started_s: float
    givers: set[str]
    """The relays that brought the bytes that the sink held at the start."""
    held_bytes: int
    """Number of those bytes."""
    task: asyncio.Task[RelayFault | None] | None = None
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    begun_s: float = 0.0
    """Time of its first bytes."""
    quiet_since_s: float | None = None
    rate: float = 0.0
    """Recent bytes per second."""
    peak: float = 0.0
    """Its largest rate so far."""
    has_stalled: bool = False
    """Whether it brought bytes, and then almost none for STALL_S."""

    def look(self, now_s: float) -> None:
        """Measure the rate; the time before the first bytes does not count."""
        if not self.has_begun():
            self.samples.clear()
            self.begun_s = now_s
        self.samples.append((now_s, self.sink.seen))
        while len(self.samples) > 2 and self.samples[1][0] <= now_s - WINDOW_S:
            self.samples.popleft()
        then_s, seen = self.samples[0]
        self.rate = max(0, self.sink.seen - seen) / max(now_s - then_s, TICK_S)
        self.peak = max(self.peak, self.rate)
        before = [seen for at_s, seen in self.samples if at_s <= now_s - STALL_S]
        least = NOTHING_BYTES_PER_S * STALL_S
        self.has_stalled = bool(before) and self.sink.seen - before[-1] < least

    def has_begun(self) -> bool:
        return self.sink.seen > self.held_bytes

    def is_quiet(self) -> bool:
        return self.quiet_since_s is not None

    def brings(self) -> bool:
        return self.rate >= NOTHING_BYTES_PER_S

    def was_quiet_for(self, seconds: float, now_s: float) -> bool:
        return self.quiet_since_s is not None and now_s - self.quiet_since_s >= seconds

    def eta_s(self) -> float:
        return (self.sink.size - self.sink.seen) / max(self.rate, 1e-3)


class Pull:
    """Fills sinks from relays until all are full, or no relay is left to ask."""

    def __init__(
        self,
        transfer: Transfer,
        sinks: Iterable[Callable[[], VerifyingSink]],
        *,
        parallel: int,
        arrived: Callable[[VerifyingSink], Awaitable[None]] | None = None,
    ) -> None:
        """Sinks are filled in order, `parallel` at a time; `arrived` is awaited with full ones."""
        self._transfer = transfer
        self._waiting = deque(_Chunk(open_sink) for open_sink in sinks)
        self._parallel = parallel
        self._arrived = arrived
        self._running: list[_Attempt] = []
        self._tried: set[str] = set()
        self._left: set[str] = set()
        """Relays that were left and have brought no whole chunk since: others are asked first."""
        self._brought: set[str] = set()
        """Relays that brought a whole chunk."""
        self._back: set[str] = set()
        """Relays that were taken back and have brought no whole chunk since: nobody is left for
        them."""
        self._explored_s = 0.0
        self._most = 0.0
        """Highest rate of all attempts together so far."""
        self._is_full = False

    async def run(self) -> None:
        """Fill all sinks; raises PolicyUnavailable or StorageError."""
        loop = asyncio.get_running_loop()
        try:
            while self._waiting or self._running:
                await self._leave(self._look(loop.time()))
                self._start(loop.time())
                tasks = [a.task for a in self._running if a.task]
                if not tasks:
                    await self._transfer.rest()
                    continue
                await asyncio.wait(tasks, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
                for attempt in [a for a in self._running if a.task and a.task.done()]:
                    await self._ended(attempt, loop.time())
        finally:
            await self._end(self._running)
            for chunk in {*self._waiting, *(a.chunk for a in self._running)}:
                _close(chunk.begun)
            for attempt in self._running:
                attempt.sink.close()

    # Measuring running attempts

    def _look(self, now_s: float) -> list[_Attempt]:
        """Measure every attempt; return those to leave."""
        for attempt in self._running:
            attempt.look(now_s)
        if any(attempt.rate for attempt in self._running):
            # Without bytes the transfer has to end. With them it could take hours: a relay that
            # drips is compared with nobody once all others are given up.
            back = self._transfer.take_back()
            self._back |= back
            self._tried -= back
            self._left -= back
        known = self._transfer.scores.best(self._transfer.awake())
        together = sum(attempt.rate for attempt in self._running)
        self._most = max(self._most, together)
        self._is_full = together >= FULL_SHARE * max(self._most, known, 2 * NOTHING_BYTES_PER_S)
        best = max([known, *(attempt.rate for attempt in self._running)], default=0.0)
        for attempt in self._running:
            if now_s - attempt.started_s < PATIENCE_S or not self._is_slow(attempt, best, now_s):
                attempt.quiet_since_s = None
            elif attempt.quiet_since_s is None:
                attempt.quiet_since_s = now_s
        return [a for a in self._running if self._is_hopeless(a, now_s)] or self._crowding()

    def _is_slow(self, attempt: _Attempt, best: float, now_s: float) -> bool:
        if not attempt.brings():
            return True
        # Attempts at one relay share its bandwidth: their rates add up.
        shared = attempt.rate * sum(a.url == attempt.url for a in self._running)
        return shared < QUIET_SHARE * best and now_s - attempt.begun_s >= WINDOW_S

    def _is_hopeless(self, attempt: _Attempt, now_s: float) -> bool:
        if any(_is_overtaken(attempt, rival, now_s) for rival in attempt.chunk.attempts):
            return True
        is_last = not self._waiting and attempt.has_begun()
        after_s = LEFT_LAST_AFTER_S if is_last else LEFT_AFTER_S
        is_idle = attempt.was_quiet_for(after_s, now_s) and not self._holds_slot(attempt)
        if not is_idle and not (is_last and attempt.has_stalled):
            return False
        # Others go on with its bytes, so little is lost if the whole network paused. Without others
        # only a connection without any bytes is left: a second one may work.
        others = [a.rate for a in self._running if a.url != attempt.url]
        idle = [url for url in self._transfer.awake() if url not in {attempt.url, *self._back}]
        if attempt.rate and not idle and not any(others):
            return False
        known = self._transfer.scores.best(idle)
        rate = 0.0 if attempt.has_stalled else attempt.rate
        return rate < FLOOR_SHARE * max([attempt.peak, known, *others])

    def _holds_slot(self, attempt: _Attempt) -> bool:
        return not attempt.is_quiet() or (self._is_full and attempt.brings())

    def _crowding(self) -> list[_Attempt]:
        """Return the attempt that must make room for a relay that was never tried, if any."""
        quiet = [attempt for attempt in self._running if attempt.is_quiet()]
        is_full = len(self._running) >= self._parallel + EXTRA
        if not is_full or not quiet or not set(self._transfer.awake()) - self._tried:
            return []
        return [min(quiet, key=lambda attempt: (attempt.rate, attempt.started_s))]

    # Starting

    def _start(self, now_s: float) -> None:
        """Start attempts while there are slots, chunks and relays for them."""
        while len(self._running) < self._parallel + EXTRA:
            holding = sum(map(self._holds_slot, self._running))
            explores = holding >= self._parallel
            if explores and now_s - self._explored_s < EXPLORE_S:
                return
            chunk = self._waiting[0] if self._waiting else self._lagging(now_s)
            explores = explores or (chunk is not None and chunk.is_brought())
            url = self._relay_for(chunk, now_s, explores=explores) if chunk else None
            if chunk is None or url is None:
                return
            self._explored_s = now_s
            self._begin(chunk, url, now_s)

    def _lagging(self, now_s: float) -> _Chunk | None:
        """Return the chunk to request from a further relay, although another was asked already."""
        found: dict[_Chunk, float] = {}
        for chunk in {attempt.chunk for attempt in self._running}:
            is_young = any(now_s - a.started_s < PATIENCE_S for a in chunk.attempts)
            # A chunk that a relay has brought in part passes to another relay when that one is
            # left.
            is_begun = any(a.sink.seen > a.sink.size * FLOOR_SHARE for a in chunk.attempts)
            is_open = not chunk.is_brought() and not is_begun
            if not chunk.is_alone and not is_young and (is_open or self._is_doubtful(chunk)):
                found[chunk] = min(a.eta_s() for a in chunk.attempts)
        return max(found, key=lambda chunk: found[chunk], default=None)

    def _is_doubtful(self, chunk: _Chunk) -> bool:
        """Tell whether a chunk's only relay may be slow: no other relay's rate is known."""
        others = [url for url in self._transfer.awake() if url != chunk.attempts[0].url]
        known = [url for url in others if self._transfer.scores.is_known(url)]
        is_long = min(attempt.eta_s() for attempt in chunk.attempts) > 2 * WINDOW_S
        return is_long and len(chunk.attempts) == 1 and not known

    def _relay_for(self, chunk: _Chunk, now_s: float, *, explores: bool) -> str | None:
        """Return the relay to ask for a chunk; with `explores`, only one that was never tried."""
        scores = self._transfer.scores
        busy = {attempt.url for attempt in self._running}
        refused = {a.url for a in self._running if a.is_quiet() or a.chunk is chunk}
        awake = [url for url in self._transfer.awake() if url not in refused]
        fresh = [url for url in awake if not scores.is_known(url) and url not in busy]
        if explores:
            fresh = [url for url in fresh if url not in self._tried]
            return scores.choose(fresh) if fresh else None
        known = [url for url in awake if scores.is_known(url)]
        tries = sum(not scores.is_known(a.url) for a in self._running)
        if known and tries >= self._parallel // 2:
            fresh = []
        # A relay that finished a chunk is, on average, as fast as others.
        found = [*known, *fresh] or awake
        pool = (
            [url for url in found if url not in self._left]
            or [url for url in found if url in self._brought]
            or found
        )
        if not pool and all(a.was_quiet_for(LEFT_AFTER_S, now_s) for a in self._running):
            pool = [url for url in self._transfer.reserve() if url not in refused]
        return scores.choose(pool) if pool else None

    def _begin(self, chunk: _Chunk, url: str, now_s: float) -> None:
        if self._waiting and chunk is self._waiting[0]:
            self._waiting.popleft()
        sink, chunk.begun = chunk.begun or chunk.open_sink(), None
        sink.seen = sink.received
        givers, chunk.givers = chunk.givers, set()
        attempt = _Attempt(chunk, url, sink, now_s, givers, sink.received)
        self._running.append(attempt)
        chunk.attempts.append(attempt)
        chunk.was_shared = chunk.was_shared or len(chunk.attempts) > 1
        self._tried.add(url)
        attempt.task = asyncio.create_task(self._transfer.client.chunk(url, sink))

    # Ending

    async def _leave(self, attempts: Sequence[_Attempt]) -> None:
        """Leave attempts; other relays go on with their bytes."""
        now_s = asyncio.get_running_loop().time()
        await self._end(attempts)
        for attempt in attempts:
            if attempt.task is None or not attempt.task.cancelled():
                continue  # it has ended by itself
            self._remove(attempt)
            if attempt.is_quiet() or attempt.has_stalled:
                self._left.add(attempt.url)
                seconds = now_s - attempt.started_s
                size = attempt.sink.seen - attempt.held_bytes
                self._transfer.note(attempt.url, RelayFault.SLOW, size=size, seconds=seconds)
            self._keep(attempt)
            if not attempt.chunk.attempts:
                self._waiting.appendleft(attempt.chunk)

    def _keep(self, attempt: _Attempt) -> None:
        """Keep an attempt's bytes for the next one, unless there are more already."""
        chunk, sink = attempt.chunk, attempt.sink
        is_more = chunk.begun is None or sink.received > chunk.begun.received
        if chunk.is_alone or not 0 < sink.received < sink.size or not is_more:
            sink.close()
            return
        _close(chunk.begun)
        chunk.begun, chunk.givers = sink, set(attempt.givers)
        if sink.received > attempt.held_bytes:
            chunk.givers.add(attempt.url)

    async def _ended(self, attempt: _Attempt, now_s: float) -> None:
        """Record how an attempt ended; its chunk is full, or waits again."""
        if attempt not in self._running:
            return  # it was ended as the rival of another
        assert attempt.task is not None
        fault = attempt.task.result()
        self._remove(attempt)
        chunk, sink = attempt.chunk, attempt.sink
        if fault is None and await self._is_kept(attempt, now_s):
            sink.close()
            if self._arrived is not None:
                await self._arrived(sink)
            return
        if fault is RelayFault.LIED and attempt.givers:
            # It is unknown which of them lied.
            self._start_over(chunk, {*attempt.givers, attempt.url})
        elif fault is not None:
            self._transfer.note(attempt.url, fault)
        if fault in (RelayFault.ABSENT, RelayFault.FAILED):
            self._keep(attempt)
        else:
            sink.close()
        if not chunk.attempts:
            self._waiting.appendleft(chunk)

    async def _is_kept(self, attempt: _Attempt, now_s: float) -> bool:
        """End the rivals of the first attempt; return False if one overwrote the verified bytes."""
        chunk, sink, rivals = attempt.chunk, attempt.sink, list(attempt.chunk.attempts)
        await self._end(rivals)
        for rival in rivals:
            self._remove(rival)
            rival.sink.close()
        self._transfer.note(attempt.url, None, size=sink.size, seconds=now_s - attempt.started_s)
        self._left.discard(attempt.url)
        self._back.discard(attempt.url)
        self._brought.add(attempt.url)
        if chunk.was_shared and not await in_thread(sink.still_holds):
            self._start_over(chunk, {rival.url for rival in rivals})
            return False
        _close(chunk.begun)
        chunk.begun = None
        return True

    def _start_over(self, chunk: _Chunk, suspects: Iterable[str]) -> None:
        for url in suspects:
            self._transfer.note(url, RelayFault.FAILED)
        _close(chunk.begun)
        chunk.begun, chunk.is_alone = None, True

    def _remove(self, attempt: _Attempt) -> None:
        self._running.remove(attempt)
        attempt.chunk.attempts.remove(attempt)

    async def _end(self, attempts: Sequence[_Attempt]) -> None:
        """Cancel attempts, and wait until all have stopped writing."""
        tasks = [attempt.task for attempt in attempts if attempt.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _is_overtaken(attempt: _Attempt, rival: _Attempt, now_s: float) -> bool:
    """Tell whether a rival at the same chunk will probably end sooner."""
    if rival is attempt or not rival.brings():
        return False
    is_old = now_s - attempt.started_s >= WINDOW_S or rival.eta_s() < WINDOW_S
    ahead = (rival.eta_s(), rival.started_s) < (attempt.eta_s(), attempt.started_s)
    return is_old and ahead


def _close(sink: VerifyingSink | None) -> None:
    if sink is not None:
        sink.close()
