"""Which relays may be asked for a version, and how one that fails or lies is treated.

`Transfer` asks for manifests itself. `Pull` (`muster.shardcast.pull`) asks for chunks: it decides
when a second relay is asked for one.

A request ends in verified bytes or in a RelayFault (`muster.shardcast.download`), which is reported
to `Transfer.note`. A relay that lied is not asked again in this attempt at a version. Until the
process ends, RelayScores remembers the lie: the relay keeps a tenth of its success rate, which
recovers with every success or failure of any relay, so it is asked again, rarely at first. A relay
that failed is asked again in this attempt too, after a pause that doubles. One that failed too
often is given up, for GIVEN_UP_S while others bring bytes, else for good. If several relays sent
parts of one chunk, the liar is unknown: all of them count as failed (`muster.shardcast.pull`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from muster.protocol.errors import PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.download import RelayFault, ShardClient
from muster.shardcast.http_client import require_url
from muster.shardcast.manifest import Manifest
from muster.shardcast.trust import TrustedRoot, parse_published

logger = logging.getLogger(__name__)

SMOOTHING = 0.3
"""Weight of the newest sample in moving averages."""
HEALING = 0.01
"""Gain of every relay's success rate per update, so that a liar is asked again some day."""
MIN_SUCCESS = 0.01
"""Lowest success rate: a relay that failed stays worth a rare try."""
MIN_SPEED = 0.01
"""Lowest speed, as part of the average: a relay that was slow stays worth a rare try."""
LIE_FACTOR = 0.1
"""Factor on the success rate of a relay that sent wrong bytes."""

FIRST_PAUSE_S = 0.05
"""Half of a relay's longest pause after its first failure, in seconds; doubles with each further
one."""
LONGEST_PAUSE_S = 2.0
"""Longest pause of a relay after failures, in seconds."""
MOST_DOUBLINGS = 16
"""Bound of an exponent: a relay may be slow thousands of times in one attempt at a version."""
LEAST_REST_S = 0.001
"""Shortest wait for a relay that pauses, in seconds."""
GIVEN_UP_S = 30.0
"""Seconds after which a relay that failed too often is taken back, while others bring bytes."""
MANIFEST_HEDGE_S = 0.05
"""Seconds without an answer after which further relays are asked for a manifest, too."""

T = TypeVar("T")


class Transfer:
    """One attempt at one version: which relays may still be asked, and when."""

    def __init__(
        self,
        client: ShardClient,
        scores: RelayScores,
        run_id: RunId,
        version: PolicyVersion,
        *,
        attempts: int,
        noted: Callable[[str, RelayFault | None, int], object] = lambda _url, _fault, _size: None,
    ) -> None:
        """`attempts` is how often in a row a relay may fail. `noted` is called with the outcome of
        each request to a relay and the number of verified bytes.
        """
        self.client = client
        self.scores = scores
        self._run_id = run_id
        self._version = version
        self._attempts = attempts
        self._noted = noted
        self._out: dict[str, float] = {}
        """Relays that are given up, and when each may be taken back: liars never."""
        self._failures: dict[str, int] = {}
        self._resting: dict[str, float] = {}

    # Manifests

    async def manifest(self, root: Hash32, *, wait_s: int) -> Manifest:
        """Return the manifest with that root; relays may wait `wait_s` for the version.

        Raises PolicyUnavailable when no relay has it.
        """
        data = await self._from_anybody(
            lambda url: self.client.manifest(
                url, self._run_id, self._version, root=root, wait_s=wait_s
            ),
            is_absence_final=True,
        )
        return parse_published(data, self._run_id, self._version)

    async def signed_manifest(self, trusted: TrustedRoot) -> tuple[bytes, bytes]:
        """Return the manifest and its signature as `trusted` demands.

        Raises PolicyUnavailable when no relay has them.
        """
        return await self._from_anybody(
            lambda url: self.client.signed_manifest(url, self._run_id, self._version, trusted)
        )

    async def _from_anybody(
        self, ask: Callable[[str], Awaitable[T | RelayFault]], *, is_absence_final: bool = False
    ) -> T:
        """Return the first answer of the relays, else of the reserve; each is asked until it
        answers, lies, or has failed too often.
        """

        async def persist(url: str) -> T | None:
            while await self._may_ask(url):
                answer = await ask(url)
                self.note(url, answer if isinstance(answer, RelayFault) else None)
                if not isinstance(answer, RelayFault):
                    return answer
                if answer is RelayFault.ABSENT and is_absence_final:
                    break
            return None

        for urls in (self.scores.relays, self.scores.reserve):
            if (found := await self._first(urls, persist)) is not None:
                return found
        raise self._unavailable()

    async def _first(
        self, urls: Sequence[str], ask: Callable[[str], Awaitable[T | None]]
    ) -> T | None:
        """Return the first good answer; None when no relay has one.

        When no answer comes soon, more relays are asked, each time twice as many.
        """
        ranked = self.scores.ranked(urls)
        running: set[asyncio.Task[T | None]] = set()
        more = 1
        try:
            while ranked or running:
                for url in ranked[:more]:
                    running.add(asyncio.ensure_future(ask(url)))
                ranked, more = ranked[more:], 2 * more
                done, running = await asyncio.wait(
                    running,
                    timeout=MANIFEST_HEDGE_S if ranked else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    if (data := task.result()) is not None:
                        return data
            return None
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    # Which relays to ask

    def awake(self) -> list[str]:
        """Return the relays that may be asked now; the reserve only if all others are given up."""
        now_s = asyncio.get_running_loop().time()
        return [url for url in self._usable() if self._resting.get(url, 0.0) <= now_s]

    def reserve(self) -> list[str]:
        """Return the reserve relays to ask when no relay delivers anything."""
        return [url for url in self.scores.reserve if url not in self._out]

    def take_back(self) -> set[str]:
        """Return the relays that were given up GIVEN_UP_S ago; each may be asked again.

        One more failure gives a relay up again.
        """
        now_s = asyncio.get_running_loop().time()
        back = {url for url, at_s in self._out.items() if at_s <= now_s}
        for url in back:
            del self._out[url]
            self._failures[url] = self._attempts - 1
            self.scores.forget_speed(url)
        return back

    async def rest(self) -> None:
        """Wait until a relay may be asked again; raises PolicyUnavailable when none is left."""
        usable = self._usable()
        if not usable:
            raise self._unavailable()
        now_s = asyncio.get_running_loop().time()
        until_s = min(self._resting.get(url, 0.0) for url in usable)
        # A timer may fire a little early, so a shorter pause could end before a relay is awake.
        await asyncio.sleep(max(LEAST_REST_S, until_s - now_s))

    def _usable(self) -> list[str]:
        relays = [url for url in self.scores.relays if url not in self._out]
        return relays or self.reserve()

    async def _may_ask(self, url: str) -> bool:
        """Tell, after its pause, whether a relay is still worth asking."""
        pause_s = self._resting.get(url, 0) - asyncio.get_running_loop().time()
        if url not in self._out and pause_s > 0:
            await asyncio.sleep(pause_s)
        return url not in self._out

    # How a relay's requests ended

    def note(
        self, url: str, fault: RelayFault | None, *, size: int = 0, seconds: float = 0.0
    ) -> None:
        """Record how a request to a relay ended; None is success."""
        self._noted(url, fault, size)
        if fault is None:
            self._failures.pop(url, None)
            self._resting.pop(url, None)
            if size:
                self.scores.succeeded(url, size, seconds)
        elif fault is RelayFault.SLOW:
            self.scores.slowed(url, size, seconds)
            self._rest(url, gives_up=False)
        elif fault is RelayFault.LIED:
            self.scores.lied(url)
            self._out[url] = math.inf
            logger.warning("relay sent wrong bytes", extra={"relay": url, "what": self._what()})
        else:
            self.scores.failed(url)
            self._rest(url)

    def _rest(self, url: str, *, gives_up: bool = True) -> None:
        failures = self._failures.get(url, 0) + 1
        self._failures[url] = failures
        now_s = asyncio.get_running_loop().time()
        if failures >= self._attempts and gives_up:
            self._out.setdefault(url, now_s + GIVEN_UP_S)
            return
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures, MOST_DOUBLINGS))
        self._resting[url] = now_s + pause_s * self.scores.rng.uniform(0.5, 1)

    def _unavailable(self) -> PolicyUnavailable:
        return PolicyUnavailable(
            f"no relay delivers {self._what()} ({len(self.scores.urls)} asked)",
            hint="relays keep the newest versions; check that the relays are running and reach the "
            "origin",
        )

    def _what(self) -> str:
        return f"run {self._run_id} version {self._version}"


@dataclass(slots=True)
class _Record:
    success: float = 1.0
    bytes_per_s: float | None = None


class RelayScores:
    """Each relay's success rate and bandwidth, learnt from all transfers. No I/O."""

    def __init__(self, urls: Sequence[str], *, rng: Random, reserve: Sequence[str] = ()) -> None:
        """`reserve` relays, such as the origin, are asked only when none of `urls` is left."""
        self.reserve = [require_url(url) for url in reserve]
        """Relays that are asked last."""
        self.relays: list[str] = []
        """The relays that are asked first."""
        self.rng = rng
        # A transfer may end at a relay that is none of the run's any more.
        self._records = defaultdict[str, _Record](_Record)
        self.use(urls)

    @property
    def urls(self) -> list[str]:
        """Every relay in the order given, then the reserve."""
        return [*self.relays, *self.reserve]

    def use(self, urls: Sequence[str]) -> None:
        """Replace the relays that are asked first; those that stay keep their scores.

        Raises ConfigError for what is no server's URL.
        """
        relays = dict.fromkeys(map(require_url, urls))
        self.relays = [url for url in relays if url not in self.reserve]
        for url in self._records.keys() - self.urls:
            del self._records[url]

    def weight(self, url: str) -> float:
        """Return success rate x bandwidth; an unmeasured relay counts as fast as the average."""
        known = [r.bytes_per_s for r in self._records.values() if r.bytes_per_s is not None]
        average = sum(known) / len(known) if known else 1.0
        record = self._records[url]
        speed = average if record.bytes_per_s is None else record.bytes_per_s
        return record.success * max(speed, MIN_SPEED * average)

    def is_known(self, url: str) -> bool:
        """Tell whether a relay's bandwidth was measured."""
        return self._records[url].bytes_per_s is not None

    def best(self, urls: Sequence[str]) -> float:
        """Return the largest measured bandwidth among these, in bytes per second."""
        return max((self._records[url].bytes_per_s or 0.0 for url in urls), default=0.0)

    def choose(self, urls: Sequence[str]) -> str:
        """Return one of these at random, with probability proportional to its weight."""
        return self.rng.choices(urls, [self.weight(url) for url in urls])[0]

    def ranked(self, urls: Sequence[str]) -> list[str]:
        """Return these in a random order in which larger weights tend to come first."""
        left, order = list(urls), list[str]()
        while left:
            order.append(self.choose(left))
            left.remove(order[-1])
        return order

    def succeeded(self, url: str, size: int, seconds: float) -> None:
        """Record a transfer of verified bytes."""
        record = self._records[url]
        sample = size / max(seconds, 1e-6)
        before = sample if record.bytes_per_s is None else record.bytes_per_s
        record.bytes_per_s = before + SMOOTHING * (sample - before)
        record.success += SMOOTHING * (1 - record.success)
        self._heal()

    def failed(self, url: str) -> None:
        """Record a transfer that broke off, timed out or was refused."""
        self._reduce(url, 1 - SMOOTHING)

    def slowed(self, url: str, size: int, seconds: float) -> None:
        """Record that a relay sent so few bytes in that time, far fewer than others."""
        record, sample = self._records[url], size / max(seconds, 1e-6)
        if size:  # without bytes it may wait for the chunk itself: its bandwidth is unknown
            record.bytes_per_s = min(sample, record.bytes_per_s or sample)
        self.failed(url)

    def forget_speed(self, url: str) -> None:
        """Forget a relay's bandwidth: after a long failure nobody is compared with it."""
        self._records[url].bytes_per_s = None

    def lied(self, url: str) -> None:
        """Record wrong bytes: worse than a failure, as they cost a whole transfer."""
        self._reduce(url, LIE_FACTOR)

    def _reduce(self, url: str, factor: float) -> None:
        record = self._records[url]
        record.success = max(MIN_SUCCESS, record.success * factor)
        self._heal()

    def _heal(self) -> None:
        for record in self._records.values():
            record.success = min(1.0, record.success + HEALING)
