"""What the orchestrator does not show: from relays, and from where workers say that it is.

Nothing that a source shows is believed, and asking all of them takes a bounded time: most are named
by strangers, one of whom may want validators to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from muster.api import BatchEntry
from muster.chain import BatchView, ChainView
from muster.client.sources import Patience, Sources
from muster.protocol.errors import ApiError
from muster.protocol.ids import Hash32, RunId

LONGEST_S = 45.0
"""Longest time in which all sources are asked about one thing."""
PATIENCE = Patience(source_s=20.0)
"""How long each is waited for: 64 MiB at 3.3 MB/s."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The sources of one run but its orchestrator."""

    run_id: RunId
    """The run."""
    view: ChainView
    """The chain, kept current by someone else."""
    relays: Sequence[str]
    """Our own sources."""
    allows_private: bool = False
    """Whether strangers' sources may lead into this machine's network: on a devnet."""
    transport: httpx.AsyncBaseTransport | None = None
    """What requests go through; the network unless given."""

    async def file(self, name: Hash32) -> bytes:
        """Return a submission's file; raises ApiError when no source has it."""
        named = [
            url
            for batch in self.view.batches.values()
            if batch.run_id == self.run_id and batch.direct and batch.direct.file_hash == name
            for url in batch.sources
        ]
        try:
            async with self._sources(named) as sources, asyncio.timeout(LONGEST_S):
                return await sources.file(name)
        except TimeoutError as error:
            raise _too_slow() from error

    async def contents(self, batch: BatchView) -> list[BatchEntry]:
        """Return the submissions of a batch; raises ApiError when no source shows them."""
        try:
            async with self._sources(batch.sources) as sources, asyncio.timeout(LONGEST_S):
                return await sources.batch(batch.batch_id, batch.root, batch.count)
        except TimeoutError as error:
            raise _too_slow() from error

    def _sources(self, named: Sequence[str]) -> Sources:
        return Sources(
            self.relays,
            named=named,
            allows_private=self.allows_private,
            patience=PATIENCE,
            transport=self.transport,
        )


def _too_slow() -> ApiError:
    return ApiError(
        f"no source answered in {LONGEST_S:.0f} s",
        status=503,
        code="no_source",
        hint="it is asked for again",
    )
