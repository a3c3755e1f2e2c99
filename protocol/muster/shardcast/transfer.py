"""Pulling chunks from several relays at once until all are there or no relay is left to ask.

One Transfer is one attempt at one version. It remembers who lied (never asked again) and who failed
(asked again after a pause that doubles); what it learns about speed and success goes to the
SourceBook, which outlives it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from random import Random

from muster.protocol.errors import EncodingError, PolicyUnavailable, StorageError
from muster.protocol.ids import PolicyVersion, RunId
from muster.shardcast.chunks import VerifyingSink
from muster.shardcast.download import Fault, ShardClient
from muster.shardcast.manifest import Manifest
from muster.shardcast.sources import SourceBook

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
"""Pause of a relay after its first failure; doubles with each further one."""
LONGEST_PAUSE_S = 2.0
"""Bound of that pause."""


class Transfer:
    """Who may still be asked, and when."""

    def __init__(
        self,
        client: ShardClient,
        book: SourceBook,
        *,
        attempts: int,
        what: str,
        rng: Random,
        noted: Callable[[str, Fault | None, int], object] = lambda _url, _fault, _size: None,
    ) -> None:
        """`attempts` is how often in a row a relay may fail; `what` names the version in logs;
        `noted` hears how asking each relay ended, and for how many verified bytes.
        """
        self._noted = noted
        self.client = client
        self.book = book
        self._attempts = attempts
        self._what = what
        self._rng = rng
        self._out: set[str] = set()
        self._failures: dict[str, int] = {}
        self._resting: dict[str, float] = {}
        self._arrived: Callable[[VerifyingSink], object] = lambda _: None

    async def pull_all(
        self,
        sinks: Iterable[Callable[[], VerifyingSink]],
        *,
        parallel: int,
        arrived: Callable[[VerifyingSink], object] = lambda _: None,
    ) -> None:
        """Fill every sink, `parallel` at a time, in order; `arrived` hears of each that is full.

        Raises PolicyUnavailable when no relay is left, StorageError when the disk refuses.
        """
        self._arrived = arrived
        waiting = iter(list(sinks))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(parallel):
                    group.create_task(self._pull_each(waiting))
        except BaseExceptionGroup as failures:
            raise _first_cause(failures) from failures

    async def _pull_each(self, sinks: Iterator[Callable[[], VerifyingSink]]) -> None:
        for open_sink in sinks:
            await self._pull(open_sink)

    async def _pull(self, open_sink: Callable[[], VerifyingSink]) -> None:
        fault: Fault | None = Fault.ABSENT
        while fault is not None:
            url = await self.next_source()
            sink = open_sink()
            started_s = asyncio.get_running_loop().time()
            try:
                fault = await self.client.chunk(url, sink)
            finally:
                sink.close()
            seconds = asyncio.get_running_loop().time() - started_s
            self.note(url, fault, size=sink.size, seconds=seconds)
        self._arrived(sink)

    async def next_source(self) -> str:
        """Return a relay to ask now, after a pause if all are resting; the reserve comes last.

        Raises PolicyUnavailable when every one lied or failed too often.
        """
        loop = asyncio.get_running_loop()
        while True:
            usable = [url for url in self.book.relays if url not in self._out]
            usable = usable or [url for url in self.book.reserve if url not in self._out]
            if not usable:
                raise self.unavailable()
            awake = [url for url in usable if self._resting.get(url, 0.0) <= loop.time()]
            if awake:
                return self.book.choose(awake)
            await asyncio.sleep(min(self._resting[url] for url in usable) - loop.time())

    async def may_ask(self, url: str) -> bool:
        """Tell, after its pause, whether a relay is still worth asking."""
        pause_s = self._resting.get(url, 0) - asyncio.get_running_loop().time()
        if url not in self._out and pause_s > 0:
            await asyncio.sleep(pause_s)
        return url not in self._out

    def note(self, url: str, fault: Fault | None, *, size: int = 0, seconds: float = 0.0) -> None:
        """Record how asking a relay ended; None is success."""
        self._noted(url, fault, size)
        if fault is None:
            self._failures.pop(url, None)
            self._resting.pop(url, None)
            if size:
                self.book.succeeded(url, size, seconds)
        elif fault is Fault.LIED:
            self.book.lied(url)
            self._out.add(url)
            logger.warning("relay sent wrong bytes", extra={"relay": url, "what": self._what})
        else:
            self.book.failed(url)
            self._rest(url)

    def unavailable(self) -> PolicyUnavailable:
        """Return the error that says no relay is left."""
        return PolicyUnavailable(
            f"no relay delivers {self._what} ({len(self.book.urls)} asked)",
            hint="relays keep the newest versions; check that the relays are running and reach the "
            "origin",
        )

    def _rest(self, url: str) -> None:
        failures = self._failures.get(url, 0) + 1
        self._failures[url] = failures
        if failures >= self._attempts:
            self._out.add(url)
            return
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**failures) * self._rng.uniform(0.5, 1)
        self._resting[url] = asyncio.get_running_loop().time() + pause_s


def parse_published(data: bytes, run_id: RunId, version: PolicyVersion) -> Manifest:
    """Return the manifest whose root is on chain; raises PolicyUnavailable when it is unfit.

    No relay is to blame then: the trainer published it.
    """
    try:
        manifest = Manifest.from_bytes(data)
    except EncodingError as error:
        raise PolicyUnavailable(f"the published manifest is malformed: {error}") from error
    if (manifest.run_id, manifest.version) != (run_id, version):
        raise PolicyUnavailable(
            f"the manifest published as run {run_id} version {version} says "
            f"run {manifest.run_id} version {manifest.version}"
        )
    return manifest


def _first_cause(failures: BaseExceptionGroup) -> BaseException:
    """Return the error to show: a full disk is more telling than the transfers it ended."""
    storage, rest = failures.split(StorageError)
    return (storage or rest or failures).exceptions[0]
