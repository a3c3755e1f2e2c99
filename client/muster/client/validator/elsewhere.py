"""What the orchestrator does not show: from relays, and from where workers say that it is.

Nothing that a source shows is believed. Most are named by strangers, one of whom may want
validators to wait: sources are asked beside the validator's work, a few things at a time, and what
nobody shows is not asked for again for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from muster.api import BatchEntry
from muster.chain import BatchView, ChainView
from muster.client.sources import SourcePatience, Sources
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32, RunId

LONGEST_S = 45.0
"""Longest time in which all sources are asked about one thing."""
WAIT_S = 3.0
"""How long a validator waits for it; when it asks again, an answer that came meanwhile is there."""
REST, LEAST_REST_S, MOST_REST_S = 10, 1.0, 60.0
"""A thing that nobody showed is not asked for again for so many times as long as it took, within
these: a source that has it not yet may have it soon, one that hangs will hang again."""
MOST_ASKED = 8
"""Things that are asked for at the same time: as many files may be in memory."""
PATIENCE = SourcePatience(source_s=20.0)
"""How long each source is waited for: 64 MiB at 3.3 MB/s."""

T = TypeVar("T")


@dataclass(slots=True)
class Elsewhere:
    """The sources of one run but its orchestrator."""

    run_id: RunId
    view: ChainView
    """The chain, kept current by someone else."""
    relays: Sequence[str]
    """Our own sources."""
    allows_private: bool = False
    """Whether strangers' sources may lead into this machine's network: on a devnet."""
    transport: httpx.AsyncBaseTransport | None = None
    """What requests go through; the network unless given."""
    clock: Callable[[], float] = time.monotonic
    """Seconds, for pauses."""
    _asking: dict[object, asyncio.Task[Any]] = field(default_factory=dict)
    _rests_until: dict[object, float] = field(default_factory=dict)

    def close(self) -> None:
        """Stop asking."""
        for task in self._asking.values():
            task.cancel()

    async def file(self, name: Hash32) -> bytes:
        """Return a submission's file; raises ApiError when no source has it."""
        named = [
            url
            for batch in self.view.batches.values()
            if batch.run_id == self.run_id and batch.direct and batch.direct.file_hash == name
            for url in batch.sources
        ]
        return await self._answer(name, lambda: self._file(name, named))

    async def contents(self, batch: BatchView) -> list[BatchEntry]:
        """Return the submissions of a batch; raises ApiError when no source shows them."""
        return await self._answer(batch.name, lambda: self._contents(batch))

    async def _file(self, name: Hash32, named: Sequence[str]) -> bytes:
        async with self._sources(named) as sources, asyncio.timeout(LONGEST_S):
            return await sources.file(name)

    async def _contents(self, batch: BatchView) -> list[BatchEntry]:
        async with self._sources(batch.sources) as sources, asyncio.timeout(LONGEST_S):
            return await sources.batch(batch.batch_id, batch.root, batch.count)

    async def _answer(self, about: object, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the thing asked for if it comes soon; raises ApiError otherwise."""
        task = self._asking.get(about)
        if task is None:
            task = self._begin(about, ask)
        await asyncio.wait([task], timeout=WAIT_S)
        if not task.done():
            raise _not_yet()
        self._asking.pop(about, None)
        try:
            answer: T = task.result()
        except TimeoutError as error:
            raise _not_yet() from error
        return answer

    async def _noting_failure(self, about: object, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        began = self.clock()
        try:
            return await ask()
        except (ApiError, TimeoutError):
            now = self.clock()
            rest_s = min(max(REST * (now - began), LEAST_REST_S), MOST_REST_S)
            self._rests_until[about] = now + rest_s
            raise

    def _begin(self, about: object, ask: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        now = self.clock()
        self._rests_until = {what: at for what, at in self._rests_until.items() if at > now}
        if len(self._asking) >= MOST_ASKED:
            # What came and was not asked for again makes way.
            for what in [what for what, task in self._asking.items() if task.done()]:
                del self._asking[what]
        if about in self._rests_until or len(self._asking) >= MOST_ASKED:
            raise _not_yet()
        task = self._asking[about] = asyncio.create_task(self._noting_failure(about, ask))
        # The result is looked at even when nobody asks again.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    def _sources(self, named: Sequence[str]) -> Sources:
        return Sources(
            self.relays,
            named=named,
            allows_private=self.allows_private,
            patience=PATIENCE,
            transport=self.transport,
        )


def _not_yet() -> ApiError:
    return ApiError(
        "no source has shown it yet",
        status=503,
        code="no_source",
        hint="it is asked for again, of our --relay URLs and of the sources that the chain names: "
        "validators do not ask each other",
    )
