"""How a worker, validator or trainer gets a policy version: from any relays, trusting none.

 1. read the manifest whose root is on chain, from the first relay that has it
 2. where deltas from a held version or an anchor take fewer bytes, fetch the version before it in
    the same way, then the delta, and rebuild the files; otherwise, or when that fails:
 3. keep what an interrupted fetch or a neighbouring version already holds
 4. pull the other chunks in parallel, each verified by its hash; blame and avoid relays that lie
 5. check the state hash of the files on disk, then rename the folder to its final name

The folder that all this ends in is `muster.shardcast.cache`'s.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, DeltaError, PolicyUnavailable
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.cache import (
    copy_from_neighbours,
    delta_path,
    drop_old,
    holds_parent,
    install,
    is_intact,
    only_process,
    part_path,
    require_state,
    version_folder,
)
from muster.shardcast.chunks import VerifyingSink
from muster.shardcast.delta_fetch import (
    delta_as_file,
    is_shorter_by_delta,
    parent_of,
    rebuild,
)
from muster.shardcast.download import Fault, ShardClient, in_thread
from muster.shardcast.manifest import DELTA, ChunkSpan, Manifest
from muster.shardcast.part import PartFolder, PartSink, discard, group_by_digest
from muster.shardcast.sources import SourceBook
from muster.shardcast.transfer import Transfer, parse_published
from muster.shardcast.trust import Trust

logger = logging.getLogger(__name__)

MAX_PARENTS = 16
"""Manifests of versions that deltas start from, remembered by root."""
HEDGE_S = 0.05
"""A relay that has not answered within this gets company from the next one."""

Progress = Callable[[int, int], object]
"""Hears how many bytes are held and verified, and of how many."""


class Fetcher:
    """Fetches policy versions into a cache folder; keeps the newest `keep` of each run."""

    def __init__(
        self,
        relays: Sequence[str],
        cache: Path,
        *,
        keep: int = 5,
        parallel: int = 4,
        attempts: int = 6,
        wait_s: int = 10,
        token: str | None = None,
        reserve: Sequence[str] = (),
        rng: Random | None = None,
    ) -> None:
        """`attempts` is how often in a row a relay may fail before a fetch gives it up; `wait_s` is
        how long relays are asked to wait for a version that they do not have yet. `reserve` are
        asked only when every relay has been given up: origins that allow it.
        """
        if not relays and not reserve:
            raise ConfigError("a fetcher needs at least one relay")
        self._cache = cache
        self._keep = keep
        self._parallel = parallel
        self._attempts = attempts
        self._wait_s = wait_s
        self._rng = rng or SystemRandom()
        self._client = ShardClient(token=token, parallel=parallel)
        self._book = SourceBook(relays, reserve=reserve, rng=self._rng)
        self._locks: dict[Path, asyncio.Lock] = {}
        self._verified: dict[Path, Hash32] = {}
        self._parents: dict[Hash32, Manifest] = {}

    async def close(self) -> None:
        """Close connections; the cache stays."""
        self._client.close()

    async def __aenter__(self) -> Fetcher:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def newest(
        self, run_id: RunId, *, after: int = -1, wait_s: int = 0
    ) -> PolicyVersion | None:
        """Return the newest version that any relay offers, None when none is above `after`.

        Answers as soon as one relay has something newer, at most `wait_s` seconds later. A relay
        may say anything: only `root_of` tells whether the version exists.
        """
        asked = [
            asyncio.create_task(self._client.versions(url, run_id, after=after, wait_s=wait_s))
            for url in self._book.urls
        ]
        try:
            for answer in asyncio.as_completed(asked):
                listed = await answer
                if not isinstance(listed, Fault) and listed and listed[0] > after:
                    return listed[0]
            return None
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def root_of(self, run_id: RunId, version: PolicyVersion, trust: Trust) -> Hash32:
        """Return the root of a version that `trust` believes, from whichever relay shows it.

        Raises PolicyUnavailable when there is no such version or no relay shows it.
        """
        trusted = await trust(run_id, version)
        if trusted is None:
            raise PolicyUnavailable(f"run {run_id} has no version {version}")
        if trusted.manifest_root is not None:
            return trusted.manifest_root
        transfer = self._transfer(run_id, version)
        while True:
            url = await transfer.next_source()
            answer = await self._client.signed_manifest(url, run_id, version, trusted)
            transfer.note(url, answer if isinstance(answer, Fault) else None)
            if not isinstance(answer, Fault):
                return keccak(answer[0])

    async def fetch(
        self,
        run_id: RunId,
        version: PolicyVersion,
        root: Hash32,
        *,
        progress: Progress | None = None,
    ) -> Path:
        """Return the folder with the version's verified files; `root` is the one on chain.

        `progress` hears after every chunk how many bytes are held, and of how many. Resumes what
        an earlier fetch left behind, and answers at once for a version this object has fetched
        before. Raises PolicyUnavailable when no relay delivers, StorageError when the disk refuses.
        """
        folder = version_folder(self._cache, run_id, version)
        async with self._locks.setdefault(folder, asyncio.Lock()):
            if self._verified.get(folder) != root or not folder.is_dir():
                await self._fetch(folder, run_id, version, root, progress or _silent)
                self._verified[folder] = root
        return folder

    async def _fetch(
        self,
        folder: Path,
        run_id: RunId,
        version: PolicyVersion,
        root: Hash32,
        progress: Progress,
    ) -> None:
        started_s = time.monotonic()
        async with only_process(folder):
            if await is_intact(folder, root):
                return
            transfer = self._transfer(run_id, version)
            manifest = await self._fetch_manifest(
                transfer, run_id, version, root, wait_s=self._wait_s
            )
            part = PartFolder(part_path(folder), manifest)
            if not await self._rebuild(part, folder, progress):
                await self._fill(part, folder, transfer, progress)
                await require_state(part)
            await in_thread(install, part, folder)
            await in_thread(drop_old, folder, self._keep)
        logger.info(
            "policy fetched",
            extra={
                "run_id": run_id,
                "policy_version": version,
                "bytes": manifest.total_bytes,
                "wall_s": round(time.monotonic() - started_s, 3),
            },
        )

    async def _rebuild(self, part: PartFolder, folder: Path, progress: Progress) -> bool:
        """Make the files from the version before, where that takes fewer bytes.

        False when the files have to be fetched: they take fewer, or the other way failed.
        """
        manifest = part.manifest
        held = functools.partial(holds_parent, folder)
        if not await is_shorter_by_delta(manifest, self._parent_manifest, held):
            return False
        delta = PartFolder(delta_path(folder), delta_as_file(manifest))
        parent_folder = folder
        try:
            parent = await self._parent_manifest(manifest)
            parent_folder = await self.fetch(manifest.run_id, parent.version, parent.root())
            # One of its own: who cannot give the delta may still give the files.
            transfer = self._transfer(manifest.run_id, manifest.version)
            await self._fill(delta, folder, transfer, progress)
            await in_thread(part.prepare)
            part.require_room(manifest.total_bytes)
            await in_thread(rebuild, manifest, part.path, delta.path, parent, parent_folder)
        except (PolicyUnavailable, DeltaError) as error:
            # The next fetch of the parent looks at its files again.
            self._verified.pop(parent_folder, None)
            logger.warning(
                "delta was of no use",
                extra={"policy_version": manifest.version, "cause": str(error)},
            )
            return False
        finally:
            await in_thread(discard, delta.path)
        return True

    async def _parent_manifest(self, manifest: Manifest) -> Manifest:
        """Return the manifest of the version that a manifest's delta starts from."""
        version, root = parent_of(manifest)
        if root not in self._parents:
            # A full version can do without its parent: that is not waited for.
            wait_s = self._wait_s if manifest.kind == DELTA else 0
            transfer = self._transfer(manifest.run_id, version)
            found = await self._fetch_manifest(
                transfer, manifest.run_id, version, root, wait_s=wait_s
            )
            while len(self._parents) >= MAX_PARENTS:
                del self._parents[next(iter(self._parents))]
            self._parents[root] = found
        return self._parents[root]

    def _transfer(self, run_id: RunId, version: PolicyVersion) -> Transfer:
        return Transfer(
            self._client,
            self._book,
            attempts=self._attempts,
            what=f"run {run_id} version {version}",
            rng=self._rng,
        )

    async def _fetch_manifest(
        self,
        transfer: Transfer,
        run_id: RunId,
        version: PolicyVersion,
        root: Hash32,
        *,
        wait_s: int,
    ) -> Manifest:
        ask = functools.partial(
            self._ask_manifest, transfer, run_id=run_id, version=version, root=root, wait_s=wait_s
        )
        for urls in (self._book.relays, self._book.reserve):
            data = await self._first_manifest(urls, ask)
            if data is not None:
                return parse_published(data, run_id, version)
        raise transfer.unavailable()

    async def _first_manifest(
        self, urls: Sequence[str], ask: Callable[[str], Coroutine[Any, Any, bytes | None]]
    ) -> bytes | None:
        """Ask one after the other, without waiting for the one before; the first match wins."""
        ranked = self._book.ranked(urls)
        running: set[asyncio.Task[bytes | None]] = set()
        try:
            while ranked or running:
                if ranked:
                    running.add(asyncio.create_task(ask(ranked.pop(0))))
                done, running = await asyncio.wait(
                    running,
                    timeout=HEDGE_S if ranked else None,
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

    async def _ask_manifest(
        self,
        transfer: Transfer,
        url: str,
        *,
        run_id: RunId,
        version: PolicyVersion,
        root: Hash32,
        wait_s: int,
    ) -> bytes | None:
        """Ask one relay until it answers, lies, or has failed too often."""
        while await transfer.may_ask(url):
            answer = await self._client.manifest(url, run_id, version, root=root, wait_s=wait_s)
            if not isinstance(answer, Fault):
                transfer.note(url, None)
                return answer
            transfer.note(url, answer)
            if answer is Fault.ABSENT:
                return None
        return None

    async def _fill(
        self, part: PartFolder, folder: Path, transfer: Transfer, progress: Progress
    ) -> None:
        """Bring every chunk into the part folder, from there, from neighbours, from relays."""
        held: set[ChunkSpan] = set()
        if await in_thread(part.prepare):
            # File by file, so that a stop need not wait for the hashing of them all.
            for file, spans in part.manifest.spans_by_file():
                held.update(await in_thread(part.held, file, spans))
        lacking = group_by_digest(span for span in part.manifest.spans() if span not in held)
        lacking = await in_thread(copy_from_neighbours, part, lacking, folder)
        left = sum(len(places) * places[0].size for places in lacking)
        part.require_room(left)
        total = part.manifest.total_bytes
        progress(total - left, total)

        def arrived(sink: VerifyingSink) -> None:
            nonlocal left
            left -= sink.size * (sink.places if isinstance(sink, PartSink) else 1)
            progress(total - left, total)

        await transfer.pull_all(
            [functools.partial(part.sink, places) for places in lacking],
            parallel=self._parallel,
            arrived=arrived,
        )


def _silent(_held_bytes: int, _total_bytes: int) -> None:
    """Show no progress."""
