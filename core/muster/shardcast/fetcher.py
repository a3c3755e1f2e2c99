"""How a worker, validator or trainer gets a policy version: from any relays, trusting none.

 1. read the manifest whose root is on chain, from the first relay that has it
 2. if deltas from a held version or an anchor take fewer bytes, fetch the previous version in the
    same way, then the delta, and rebuild the files; otherwise, or when that fails:
 3. keep chunks that an interrupted fetch or a neighbouring version already holds
 4. pull the other chunks in parallel, each verified by its hash; blame and avoid relays that lie
 5. check the state hash of the files on disk, then rename the folder to its final name

`muster.shardcast.cache` owns that folder.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random, SystemRandom

from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, DeltaError, PolicyUnavailable, StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.cache import (
    PartFolder,
    copy_from_neighbours,
    delta_path,
    discard,
    drop_old,
    group_by_digest,
    holds_parent,
    install,
    is_intact,
    only_process,
    part_path,
    require_consistent,
    require_state,
    version_folder,
)
from muster.shardcast.chunks import LacksRoom, VerifyingSink, storage_error
from muster.shardcast.digests import state_hash
from muster.shardcast.download import RelayFault, ShardClient, in_thread
from muster.shardcast.http_client import ConnectsTo
from muster.shardcast.manifest import DELTA, FULL, ChunkSpan, Manifest, ManifestFile
from muster.shardcast.pull import Pull
from muster.shardcast.transfer import RelayScores, Transfer
from muster.shardcast.trust import Trust

logger = logging.getLogger(__name__)

MAX_PARENTS = 16
"""Most manifests of deltas' parents that are cached."""

GRACE_S = 1.0
"""Seconds in which other relays may still offer a newer version than the newest found."""
BASE_S = 600.0
"""Seconds for a manifest, and for a version without the time that its bytes take."""
LEAST_BYTES_PER_S = 256 << 10
"""Least mean rate of a version's bytes: one that comes more slowly is tried again later."""
MAX_CHAIN = 64
"""Most deltas in a row; a longer chain is not followed, and the files are fetched."""
DELTA_FILE = "delta"
"""Name of a delta's file while it is being fetched."""

ParentManifest = Callable[[Manifest], Awaitable[Manifest]]
"""Returns the manifest of a delta's parent; raises PolicyUnavailable."""

NamedVersions = Callable[[RunId], Collection[PolicyVersion]]
"""Returns the versions of a run that open work names."""

NamedRelays = Callable[[], Awaitable[Sequence[str]]]
"""Returns the URLs of the relays to ask from now on; raises nothing."""

Progress = Callable[[int, int], object]
"""Called with the number of bytes that are held and verified, and with the total."""


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
        named: NamedVersions = lambda _: (),
        connects_to: ConnectsTo | None = None,
        renewed: NamedRelays | None = None,
        rng: Random | None = None,
    ) -> None:
        """The versions that `named` returns stay in the cache, too, while the disk has room for
        the version that is being fetched. `attempts` is how often in a row a relay may fail before
        a fetch gives it up. `wait_s` is how long relays may wait for a version that they do not
        have yet. `reserve` are origins that allow requests; they are asked only when every relay
        has been given up. `connects_to` decides which address a relay has, and whether it is
        asked at all. `renewed` names other relays when none of these delivers; `relays` may be
        empty then.
        """
        if not relays and not reserve and renewed is None:
            raise ConfigError("a fetcher needs at least one relay")
        self._cache = cache
        self._keep = keep
        self.named = named
        """Returns the versions that stay in the cache, besides the newest."""
        self._parallel = parallel
        self._attempts = attempts
        self._wait_s = wait_s
        self._client = ShardClient(token=token, parallel=parallel, connects_to=connects_to)
        self._renewed = renewed
        self._scores = RelayScores(relays, reserve=reserve, rng=rng or SystemRandom())
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

    async def renew(self) -> bool:
        """Learn which relays to ask from now on, in running fetches too; return whether they
        changed.
        """
        before = self._scores.relays
        if self._renewed is not None:
            self._scores.use(await self._renewed())
        return self._scores.relays != before

    async def newest(
        self, run_id: RunId, trust: Trust, *, after: int = -1, wait_s: int = 0
    ) -> tuple[PolicyVersion, Hash32] | None:
        """Return the newest version above `after` that a relay offers and `trust` believes, and its
        root; None when there is none.

        Every relay is asked, for at most `wait_s` seconds, and has to show the manifest of the
        version that it offers: an invented version does not count. Once a version is believed, or
        most relays have answered, the others have GRACE_S to offer a newer one. So a silent relay
        delays nobody, and a relay that hides versions succeeds only if no other relay answers in
        that time.
        """
        asked = {
            asyncio.create_task(self._offer(url, run_id, trust, after, wait_s))
            for url in self._scores.urls
        }
        left, loop = len(asked), asyncio.get_running_loop()
        said = 0
        ends_s: float | None = None
        best: tuple[PolicyVersion, Hash32] | None = None
        try:
            while asked and (ends_s is None or loop.time() < ends_s):
                timeout = None if ends_s is None else ends_s - loop.time()
                done, asked = await asyncio.wait(
                    asked, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                for offer in (task.result() for task in done):
                    if isinstance(offer, RelayFault):
                        left -= 1
                        continue
                    said += 1
                    best = max(filter(None, (best, offer)), default=None)
                if ends_s is None and (best is not None or 2 * said > left):
                    ends_s = loop.time() + GRACE_S
            return best
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _offer(
        self, url: str, run_id: RunId, trust: Trust, after: int, wait_s: int
    ) -> tuple[PolicyVersion, Hash32] | RelayFault | None:
        """Return the newest version of a relay that `trust` believes; None when it offers none."""
        listed = await self._client.versions(url, run_id, after=after, wait_s=wait_s)
        if isinstance(listed, RelayFault):
            return listed
        if not listed or listed[0] <= after:
            return None
        trusted = await trust(run_id, listed[0])
        if trusted is None:  # invented, or newer than what this client knows of the chain
            return RelayFault.ABSENT
        shown = await self._client.signed_manifest(url, run_id, listed[0], trusted)
        if shown is RelayFault.LIED:
            self._transfer(run_id, listed[0]).note(url, shown)
        return shown if isinstance(shown, RelayFault) else (listed[0], keccak(shown[0]))

    async def root_of(self, run_id: RunId, version: PolicyVersion, trust: Trust) -> Hash32:
        """Return the root of a version that `trust` believes, from any relay that has it.

        Raises PolicyUnavailable when there is no such version or no relay shows it.
        """
        trusted = await trust(run_id, version)
        if trusted is None:
            raise PolicyUnavailable(f"run {run_id} has no version {version}")
        if trusted.manifest_root is not None:
            return trusted.manifest_root
        data, _ = await self._transfer(run_id, version).signed_manifest(trusted)
        return keccak(data)

    async def fetch(
        self,
        run_id: RunId,
        version: PolicyVersion,
        root: Hash32,
        *,
        progress: Progress | None = None,
    ) -> Path:
        """Return the folder with the version's verified files; `root` is the one on chain.

        `progress` is called after every chunk with the bytes held and the total. Resumes an earlier
        fetch, and returns at once for a version that this object has fetched before. Raises
        PolicyUnavailable when no relay delivers in `limit_s`, StorageError when the disk refuses.
        """
        folder = version_folder(self._cache, run_id, version)
        async with self._locks.setdefault(folder, asyncio.Lock()):
            if self._verified.get(folder) != root or not folder.is_dir():
                try:
                    await self._fetch(folder, run_id, version, root, progress or _silent)
                except PolicyUnavailable:
                    if not await self.renew():
                        raise
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
            async with _in_time(run_id, version):
                manifest = await transfer.manifest(root, wait_s=self._wait_s)
            require_consistent(manifest)
            part = PartFolder(part_path(folder), manifest)
            async with _in_time(run_id, version, manifest.total_bytes):
                try:
                    await self._complete(part, folder, transfer, progress)
                except LacksRoom:
                    # Versions that only open work names give way.
                    if not await in_thread(drop_old, folder, self._keep):
                        raise
                    await self._complete(part, folder, transfer, progress)
            await in_thread(install, part, folder)
            await in_thread(drop_old, folder, self._keep, frozenset(self.named(run_id)))
        logger.info(
            "policy fetched",
            extra={
                "run_id": run_id,
                "policy_version": version,
                "bytes": manifest.total_bytes,
                "wall_s": round(time.monotonic() - started_s, 3),
            },
        )

    async def _complete(
        self, part: PartFolder, folder: Path, transfer: Transfer, progress: Progress
    ) -> None:
        """Put all verified files into the part folder."""
        if not await self._rebuild(part, folder, progress):
            await self._fill(part, folder, transfer, progress)
            await require_state(part)

    async def _rebuild(self, part: PartFolder, folder: Path, progress: Progress) -> bool:
        """Rebuild the files from the previous version, if that takes fewer bytes.

        Returns False when the files have to be fetched: they take fewer bytes, or rebuilding
        failed.
        """
        manifest = part.manifest
        held = functools.partial(holds_parent, folder)
        if not await is_shorter_by_delta(manifest, self._parent_manifest, held):
            return False
        delta = PartFolder(delta_path(folder), delta_as_file(manifest))
        parent_folder = folder
        try:
            parent = await self._parent_manifest(manifest)
        except PolicyUnavailable:
            return False
        require_proportion(manifest, parent)
        try:
            parent_folder = await self.fetch(manifest.run_id, parent.version, parent.root())
            # A separate transfer: a relay that cannot send the delta may still send the files.
            transfer = self._transfer(manifest.run_id, manifest.version)
            await self._fill(delta, folder, transfer, progress)
            await in_thread(part.prepare)
            part.require_room(manifest.total_bytes)
            await self._write(part, delta, parent, parent_folder)
        except (PolicyUnavailable, DeltaError) as error:
            # The next fetch of the parent checks its files again.
            self._verified.pop(parent_folder, None)
            logger.warning(
                "delta was of no use",
                extra={"policy_version": manifest.version, "cause": str(error)},
            )
            # A version that carries no files needs the rest of its delta later.
            if manifest.kind == FULL or isinstance(error, DeltaError):
                await in_thread(discard, delta.path)
            return False
        await in_thread(discard, delta.path)
        return True

    async def _write(
        self, part: PartFolder, delta: PartFolder, parent: Manifest, parent_folder: Path
    ) -> None:
        """Rebuild the files; leave none when that fails."""
        try:
            await in_thread(
                write_from_delta, part.manifest, part.path, delta.path, parent, parent_folder
            )
        except (DeltaError, StorageError):
            await in_thread(discard, part.path)
            raise

    async def _parent_manifest(self, manifest: Manifest) -> Manifest:
        """Return the manifest of the version that a manifest's delta starts from."""
        version, root = parent_of(manifest)
        if root not in self._parents:
            # A full version does not need its parent, so do not wait for it.
            wait_s = self._wait_s if manifest.kind == DELTA else 0
            transfer = self._transfer(manifest.run_id, version)
            found = await transfer.manifest(root, wait_s=wait_s)
            while len(self._parents) >= MAX_PARENTS:
                del self._parents[next(iter(self._parents))]
            self._parents[root] = found
        return self._parents[root]

    def _transfer(self, run_id: RunId, version: PolicyVersion) -> Transfer:
        return Transfer(self._client, self._scores, run_id, version, attempts=self._attempts)

    async def _fill(
        self, part: PartFolder, folder: Path, transfer: Transfer, progress: Progress
    ) -> None:
        """Complete the part folder, from its own chunks, neighbouring versions and relays."""
        held: set[ChunkSpan] = set()
        if await in_thread(part.prepare):
            # File by file, so that a stop need not wait until all of them are hashed.
            for file, spans in part.manifest.spans_by_file():
                held.update(await in_thread(part.held, file, spans))
        lacking = group_by_digest(span for span in part.manifest.spans() if span not in held)
        lacking = await in_thread(copy_from_neighbours, part, lacking, folder)
        left = sum(len(places) * places[0].size for places in lacking)
        part.require_room(left)
        total = part.manifest.total_bytes
        progress(total - left, total)

        places_of = {places[0].digest: places for places in lacking}

        async def arrived(sink: VerifyingSink) -> None:
            nonlocal left
            first, *others = places_of[sink.digest]
            left -= first.size
            for place in others:  # one by one, so that a stop need not wait for all of them
                await in_thread(part.copy, first, place)
                left -= place.size
            progress(total - left, total)

        try:
            sinks = [functools.partial(part.sink, places) for places in lacking]
            await Pull(transfer, sinks, parallel=self._parallel, arrived=arrived).run()
        except PolicyUnavailable:
            if left == total:
                await in_thread(discard, part.path)  # empty files of full size
            raise


def limit_s(size_bytes: int) -> float:
    """Return the seconds in which so many bytes must come."""
    return BASE_S + size_bytes / LEAST_BYTES_PER_S


@asynccontextmanager
async def _in_time(
    run_id: RunId, version: PolicyVersion, size_bytes: int = 0
) -> AsyncIterator[None]:
    """Raise PolicyUnavailable where the body takes longer than its bytes may: relays that drip
    would hold it for days."""
    within_s = limit_s(size_bytes)
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError as error:
        raise PolicyUnavailable(
            f"version {version} of run {run_id} did not come in {within_s:,.1f} s",
            hint="the next try goes on where this one ended; faster relays help: --relay URL",
        ) from error


def _silent(_held_bytes: int, _total_bytes: int) -> None:
    """Show no progress."""


# The cheapest way to a version: its files, or deltas from a version that is held. A manifest names
# the root of its delta's parent, so every manifest in the chain is as trustworthy as the first.


async def is_shorter_by_delta(
    manifest: Manifest, parent_manifest: ParentManifest, is_held: Callable[[Manifest], bool]
) -> bool:
    """Tell whether the deltas since a held version, or since an anchor, take fewer bytes.

    `is_held` tells whether the files of a delta's parent are held.
    """
    full_bytes = manifest.total_bytes if manifest.kind == FULL else None
    spent_bytes = 0
    for _ in range(MAX_CHAIN):
        if manifest.delta is None:
            return False
        spent_bytes += manifest.delta.size
        if full_bytes is not None and spent_bytes >= full_bytes:
            return False
        if is_held(manifest):
            return True
        try:
            manifest = await parent_manifest(manifest)
        except PolicyUnavailable:
            return False
        if manifest.kind == FULL and full_bytes is None:
            return True
    return False


def parent_of(manifest: Manifest) -> tuple[PolicyVersion, Hash32]:
    """Return version and root of a delta's parent; raises PolicyUnavailable without a delta."""
    if manifest.parent is None or manifest.delta is None:
        raise PolicyUnavailable(f"version {manifest.version} has no delta")
    return manifest.parent, manifest.delta.parent_root


def require_proportion(manifest: Manifest, parent: Manifest) -> None:
    """Raise PolicyUnavailable when a version is larger than its parent and its delta together.

    A delta may copy the same bytes again and again, so a few kB of it could fill a disk.
    """
    delta_bytes = manifest.delta.size if manifest.delta else 0
    if manifest.total_bytes > parent.total_bytes + delta_bytes:
        raise PolicyUnavailable(
            f"version {manifest.version} has {manifest.total_bytes} bytes, its parent and its "
            f"delta only {parent.total_bytes + delta_bytes}",
            hint="the trainer published a delta that would fill disks",
        )


def delta_as_file(manifest: Manifest) -> Manifest:
    """Return a manifest whose only file is the delta, to fetch it like a version."""
    if manifest.delta is None:
        raise PolicyUnavailable(f"version {manifest.version} has no delta")
    entry = ManifestFile(DELTA_FILE, manifest.delta.size, manifest.delta.chunks)
    return replace(manifest.without_delta(), files=(entry,))


def write_from_delta(
    manifest: Manifest, folder: Path, delta_folder: Path, parent: Manifest, parent_folder: Path
) -> None:
    """Write a version's files to `folder`, from its delta and the parent's; blocking.

    Raises DeltaError when the delta does not make the files the manifest promises, StorageError
    when the disk refuses.
    """
    # Imported only here: a client that applies no delta does not load numpy, a fifth of its memory.
    from muster.shardcast.delta import States, apply_delta

    files = {file.name: file.size for file in manifest.files}
    try:
        with (delta_folder / DELTA_FILE).open("rb") as source:
            apply_delta(
                source,
                {file.name: parent_folder / file.name for file in parent.files},
                folder,
                files,
                states=States(parent.state_hash, manifest.state_hash),
            )
        made = state_hash({name: folder / name for name in files})
    except OSError as error:
        raise storage_error(error, f"rebuild version {manifest.version}") from error
    if made != manifest.state_hash:
        raise DeltaError(
            f"the delta of version {manifest.version} makes other files than promised",
            reason="target",
            hint="the base on disk was damaged, or the trainer published a wrong delta",
        )
