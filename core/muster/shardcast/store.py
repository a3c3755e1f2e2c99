"""The store of an origin or relay: immutable chunks, and the manifests of the versions they form.

Owns a folder; knows nothing of the network. Layout:

    chunks/<blake3 hex>                       one file per chunk that came from an upstream
    runs/<run>/<version>/manifest.json        the canonical manifest; its folder appears atomically
    runs/<run>/<version>/signature            the trainer's 65-byte Checkpoint signature
    runs/<run>/<version>/files/<name>         the files of a version published here
    runs/<run>/aside-<version>-<root>         the folder of a published version that was replaced

Safe to use from several threads and processes: readers see whole versions only, and publishing and
dropping exclude each other by a lock file.
"""

import fcntl
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from muster.lifecycle import sync_path
from muster.protocol.errors import EncodingError, StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.chunks import (
    TEMPORARY_PREFIX,
    ChunkFolder,
    ChunkSink,
    LacksRoom,
    Region,
    storage_error,
    temporary_name,
)
from muster.shardcast.manifest import DEFAULT_CHUNK_BYTES, DELTA, ChunkSpan, Manifest
from muster.shardcast.originals import Originals, Stamp, place_files, sync_files

if TYPE_CHECKING:
    from muster.shardcast.delta import Parent

logger = logging.getLogger(__name__)

SIGNATURE_BYTES = 65
"""Length of a signature, as in docs/protocol.md section 1."""

VersionKey = tuple[RunId, PolicyVersion]


HELD_LEAVES = 4
"""Versions older than the newest `keep` stay only while a disk has one part in so many free."""


class PublishedOtherwise(StorageError):
    """The store has the version with other content."""


class ChunkStore:
    """Versions and their chunks in one folder; keeps the newest `keep` versions of each run."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 5,
        hold_s: float = 0.0,
        max_bytes: int | None = None,
    ) -> None:
        """A version stays for `hold_s` seconds after so many newer ones are there. Meanwhile
        outcomes of its work can be disputed. Held versions give way, the oldest first, where the
        disk is three quarters full.
        """
        self.folder = folder
        self.keep = keep
        self.hold_s = hold_s
        self.max_bytes = max_bytes
        self.chunks = ChunkFolder(folder / "chunks")
        self._originals = Originals()
        self._runs = folder / "runs"
        self._writer = threading.Lock()
        self._state = threading.Lock()
        self._complete: set[VersionKey] = set()
        self._lacking: dict[VersionKey, tuple[int, ChunkSpan]] = {}
        self._receiving: dict[VersionKey, set[Hash32]] = {}
        self._listeners: list[Callable[[], object]] = []

    def publish(
        self,
        files: Mapping[str, Path],
        *,
        run_id: RunId,
        version: PolicyVersion,
        stream_from: int,
        stream_to: int,
        sign: Callable[[Hash32], bytes],
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        link: bool = False,
        anchor_every: int = 0,
        parent: "Parent | None" = None,
    ) -> Manifest:
        """Store a version and return its manifest; readers see all of it or nothing.

        The files are copied, so they may change afterwards. With `link` they share their disk space
        with the store if the file system can; then they may be replaced, but never rewritten in
        place. Readers see the version as soon as it is signed; the call returns when it would also
        survive a power cut. Publishing the same content again returns the same manifest; other
        content under a published version raises PublishedOtherwise. Also raises EncodingError for
        names that the format refuses. With `anchor_every`, versions are broadcast as deltas if that
        saves enough; see `muster.shardcast.delta`. They start from a version of this store, or from
        `parent` where it is not here. Blocks: call it in a thread.
        """
        with self._exclusive(), self._sweeping_after_failure():
            fresh = self._fresh_folder(run_id)
            (fresh / "files").mkdir()
            entries, state, stamps = place_files(files, fresh / "files", chunk_bytes, link=link)
            manifest = Manifest(
                run_id=run_id,
                version=version,
                files=entries,
                state_hash=state,
                stream_from=stream_from,
                stream_to=stream_to,
                chunk_bytes=chunk_bytes,
            )
            stored = self.manifest(run_id, version)
            if stored is not None and self.is_complete(run_id, version):
                manifest = stored if stored.without_delta() == manifest else manifest
            elif anchor_every:
                manifest, added = self._with_delta(manifest, fresh / "files", parent, anchor_every)
                stamps.update(added)
            if stored is not None and stored != manifest:
                raise PublishedOtherwise(
                    f"run {run_id} version {version} was published with other content",
                    hint="publish under the next version",
                )
            if stored != manifest or not self.is_complete(run_id, version):
                self._install(fresh, manifest, sign(manifest.root()))
                for digest, stamp in stamps.items():
                    self._originals.trust(digest, stamp)
            self._mark_complete((run_id, version))
            self._changed()
            self._drop_old(run_id)
            self._sync_version(run_id, version)
        self._changed()
        return manifest

    def _with_delta(
        self, manifest: Manifest, folder: Path, parent: "Parent | None", anchor_every: int
    ) -> tuple[Manifest, dict[Hash32, Stamp]]:
        """Return the manifest with a delta from a stored version, else from `parent`, if that saves
        bytes, and the stamps of the delta's chunks.
        """
        # Imported only here: relays and most clients do not load numpy, a fifth of their memory.
        from muster.shardcast.delta import Parent, add_delta, parent_to_publish

        before = parent_to_publish(manifest.version, [file.name for file in manifest.files])
        stored = None if before is None else self.manifest(manifest.run_id, before)
        if stored is not None:
            files = self._version_folder(stored.run_id, stored.version) / "files"
            paths = {file.name: files / file.name for file in stored.files}
            parent = Parent(stored.version, stored.root(), stored.state_hash, paths)
        if parent is None or parent.version != before:
            return manifest, {}
        return add_delta(manifest, folder, parent, anchor_every=anchor_every)

    def begin(self, manifest: Manifest, signature: bytes) -> list[ChunkSpan]:
        """Register a version whose chunks are still to come; return the missing ones.

        The caller has checked root and signature. Evicts old versions when `max_bytes` demands it;
        raises LacksRoom, and evicts nothing, when it has no room beside newer versions and what
        they and its delta start from. Raises StorageError when the disk refuses.
        """
        key = (manifest.run_id, manifest.version)
        with self._exclusive():
            self._make_room(manifest)
            if self.manifest(*key) != manifest:
                self._install(self._fresh_folder(manifest.run_id), manifest, signature)
            with self._state:
                self._complete.discard(key)
                self._receiving[key] = {span.digest for span in manifest.broadcast_spans()}
            self._drop_old(manifest.run_id)
            missing = self.missing(manifest)
            with self._state:
                self._receiving[key] = {span.digest for span in missing}
                self._settle()
        self._changed()
        return missing

    def sink(self, span: ChunkSpan) -> ChunkSink:
        """Return a receiver for a missing chunk; close it in a `finally`."""
        return self.chunks.sink(span.digest, span.size, kept=self._arrived)

    def _arrived(self, digest: Hash32) -> None:
        with self._state:
            for expected in self._receiving.values():
                expected.discard(digest)
            self._settle()
        self._changed()

    def expects(self, digest: Hash32) -> bool:
        """Tell whether the chunk belongs to a version that is being received."""
        with self._state:
            return any(digest in expected for expected in self._receiving.values())

    def abandon(self, run_id: RunId, version: PolicyVersion) -> None:
        """Stop expecting a version's chunks; those that arrived stay for the next attempt."""
        with self._state:
            self._receiving.pop((run_id, version), None)
        self._changed()

    def missing(self, manifest: Manifest) -> list[ChunkSpan]:
        """Return the chunks that are not stored, each digest once, in order."""
        self._learn_originals()
        spans = {span.digest: span for span in manifest.broadcast_spans()}
        return [span for span in spans.values() if not self._has(span)]

    def _has(self, span: ChunkSpan) -> bool:
        return self._originals.has(span.digest) or self.chunks.has(span.digest, span.size)

    def is_checked(self, digest: Hash32) -> bool:
        """Tell whether this process has verified the chunk, so that `find` is instant."""
        return self._originals.is_checked(digest) or self.chunks.is_checked(digest)

    def find(self, digest: Hash32) -> Region | None:
        """Return where a verified chunk lies, or None. May hash it: see `is_checked`. Raises
        OSError when it cannot be read now.
        """
        was_stored = self._originals.is_indexed(digest) or self.chunks.path_of(digest).exists()
        region = self._originals.find(digest) or self.chunks.find(digest)
        if region is None and not was_stored and self._learn_originals():
            return self.find(digest)
        if region is None and was_stored:
            lacking = {key for key in self.stored() if digest in self._digests(key)}
            with self._state:
                self._complete -= lacking
            self._changed()
        return region

    def unpack(self, manifest: Manifest, folder: Path) -> None:
        """Write a version's files into a folder; raises StorageError when a chunk is missing,
        OSError when one cannot be read.
        """
        for file in manifest.files:
            with (folder / file.name).open("wb") as target:
                for digest in file.chunks:
                    region = self.find(digest)
                    if region is None:
                        raise StorageError(f"chunk {digest.hex()} is missing in {self.folder}")
                    target.write(region.read())

    def versions(self, run_id: RunId) -> list[PolicyVersion]:
        """Return the versions that are complete or being received, newest first."""
        return [v for v in self.stored_versions(run_id) if self.is_offered(run_id, v)]

    def stored_versions(self, run_id: RunId) -> list[PolicyVersion]:
        """Return every version with a manifest, even if chunks are missing."""
        try:
            names = os.listdir(self._run(run_id))
        except FileNotFoundError:
            return []
        return sorted((PolicyVersion(int(n)) for n in names if n.isdecimal()), reverse=True)

    def is_offered(self, run_id: RunId, version: PolicyVersion) -> bool:
        """Tell whether a version is complete or being received."""
        with self._state:
            if (run_id, version) in self._receiving:
                return True
        return self.is_complete(run_id, version)

    def is_complete(self, run_id: RunId, version: PolicyVersion) -> bool:
        """Tell whether every chunk of a version is stored."""
        with self._state:
            if (run_id, version) in self._complete:
                return True
            if (run_id, version) in self._receiving:
                return False
        return not self._still_lacks((run_id, version)) and self._has_all(run_id, version)

    def _still_lacks(self, key: VersionKey) -> bool:
        """Tell whether a chunk is missing that was missing before; parses no manifest."""
        at_ns, span = self._lacking.get(key, (None, None))
        return span is not None and at_ns == _changed_ns(self._run(key[0])) and not self._has(span)

    def _has_all(self, run_id: RunId, version: PolicyVersion) -> bool:
        at_ns, manifest = _changed_ns(self._run(run_id)), self.manifest(run_id, version)
        if manifest is None:
            return False
        if missing := self.missing(manifest):
            self._lacking[run_id, version] = at_ns, missing[-1]
            return False
        self._mark_complete((run_id, version))
        return True

    def changed_ns(self) -> list[int]:
        """Return when runs last came or went, then the same for the versions of each run, whichever
        process did it; nanoseconds since 1970.
        """
        return [_changed_ns(self._runs), *(_changed_ns(self._run(r)) for r in self._stored_runs())]

    def complete(self) -> list[VersionKey]:
        """Return every version of every run whose chunks are all stored."""
        return [key for key in self.stored() if self.is_complete(*key)]

    def manifest_bytes(self, run_id: RunId, version: PolicyVersion) -> bytes | None:
        """Return a version's canonical manifest, or None."""
        return self._read(run_id, version, "manifest.json")

    def signature(self, run_id: RunId, version: PolicyVersion) -> bytes | None:
        """Return the trainer's signature on a version, or None."""
        return self._read(run_id, version, "signature")

    def manifest(self, run_id: RunId, version: PolicyVersion) -> Manifest | None:
        """Return a version's manifest; None when it is not stored or its file is damaged."""
        data = self.manifest_bytes(run_id, version)
        try:
            return Manifest.from_bytes(data) if data is not None else None
        except EncodingError:
            logger.error("manifest on disk was corrupt", extra={"version": version})
            return None

    def remove(self, run_id: RunId, version: PolicyVersion) -> None:
        """Delete a version, and the chunks that no other version needs."""
        with self._exclusive():
            self._discard_version((run_id, version))
            self._sweep()
        self._changed()

    def set_aside(self, manifest: Manifest) -> None:
        """Take a version that was published here from readers; its files stay for `put_back`."""
        key = (manifest.run_id, manifest.version)
        aside = self._aside(*key, manifest.root().hex())
        with self._exclusive():
            shutil.rmtree(aside, ignore_errors=True)
            self._withdraw(key, aside)
        self._changed()

    def put_back(self, run_id: RunId, version: PolicyVersion, root: Hash32) -> bool:
        """Let the version of this root that was set aside, if there is one, replace the stored one;
        return whether there was.
        """
        aside = self._aside(run_id, version, root.hex())
        if not aside.exists():
            return False
        with self._exclusive():
            self._discard_version((run_id, version))
            aside.rename(self._version_folder(run_id, version))
        self._changed()
        return True

    def drop_aside(self, run_id: RunId, version: PolicyVersion) -> None:
        """Delete what was set aside for a version."""
        for aside in self._run(run_id).glob(self._aside(run_id, version, "*").name):
            shutil.rmtree(aside, ignore_errors=True)

    def _aside(self, run_id: RunId, version: PolicyVersion, root: str) -> Path:
        return self._run(run_id) / f"aside-{version}-{root}"

    def on_change(self, listener: Callable[[], object]) -> Callable[[], None]:
        """Call `listener` (from any thread) after every change; return a function that stops it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _changed(self) -> None:
        for listener in list(self._listeners):
            listener()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Exclude every other writer of the folder, in this process and in others."""
        with self._writer, (self.folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                raise storage_error(error, f"write to {self.folder}") from error

    @contextmanager
    def _sweeping_after_failure(self) -> Iterator[None]:
        """Free the space of chunks that a failed publication has already stored."""
        try:
            yield
        except BaseException:
            self._sweep()
            raise

    def _learn_originals(self) -> bool:
        """Index versions that this or another process published; return whether any was new."""
        found = False
        for key in self.stored():
            folder = self._version_folder(*key) / "files"
            if not self._originals.knows(folder) and (manifest := self.manifest(*key)):
                found = self._originals.learn(folder, manifest) or found
        return found

    def _fresh_folder(self, run_id: RunId) -> Path:
        fresh = self._run(run_id) / temporary_name()
        fresh.mkdir(parents=True)
        return fresh

    def _install(self, fresh: Path, manifest: Manifest, signature: bytes) -> None:
        """Complete a version's fresh folder and give it its name."""
        if len(signature) != SIGNATURE_BYTES:
            raise EncodingError(f"a signature has {SIGNATURE_BYTES} bytes, got {len(signature)}")
        (fresh / "manifest.json").write_bytes(manifest.to_bytes())
        (fresh / "signature").write_bytes(signature)
        key = (manifest.run_id, manifest.version)
        self._discard_version(key)
        fresh.rename(self._version_folder(*key))

    def _sync_version(self, run_id: RunId, version: PolicyVersion) -> None:
        folder = self._version_folder(run_id, version)
        if (folder / "files").is_dir():
            sync_files(folder / "files")
        for path in [folder / "manifest.json", folder / "signature", folder, folder.parent]:
            sync_path(path)

    def _discard_version(self, key: VersionKey) -> None:
        trash = self._run(key[0]) / temporary_name()
        self._withdraw(key, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _withdraw(self, key: VersionKey, target: Path) -> None:
        """Take a version from readers, and move its folder, if there is one."""
        with self._state:
            self._receiving.pop(key, None)
            self._complete.discard(key)
            self._lacking.pop(key, None)
        folder = self._version_folder(*key)
        self._originals.forget(folder / "files")
        if folder.exists():
            folder.rename(target)

    def _make_room(self, manifest: Manifest) -> None:
        if self.max_bytes is None:
            return
        dropped, giving_way = list[VersionKey](), self._giving_way(manifest)
        while (needed := self._needed_bytes(manifest, dropped)) > self.max_bytes:
            if not giving_way:
                raise LacksRoom(
                    f"version {manifest.version} has {manifest.broadcast_bytes} bytes, "
                    f"the limit is {self.max_bytes} together with newer versions and what deltas "
                    f"start from, {needed} bytes in all",
                    needed_bytes=needed,
                    hint=f"raise --max-bytes, or lower --keep, which is {self.keep}",
                )
            dropped.append(giving_way.pop(0))
        for key in dropped:
            self._discard_version(key)

    def _giving_way(self, manifest: Manifest) -> list[VersionKey]:
        """Return the versions that make room for one, in this order. A version counts as the newest
        that its delta helps to build, so none gives way to an older one, to its own delta, or to
        what its own delta starts from.
        """
        counts_as = {
            (run_id, version): newest
            for run_id in self._stored_runs()
            for version, newest in self._with_parents(run_id, self.stored_versions(run_id)).items()
        }
        run_id, parent = manifest.run_id, manifest.parent if manifest.kind == DELTA else None
        rank = counts_as.get((run_id, manifest.version), manifest.version)
        needed = self._with_parents(run_id, [] if parent is None else [parent])
        giving_way = [
            key
            for key in self.stored()
            if key[0] != run_id or (counts_as[key] < rank and key[1] not in needed)
        ]
        # Of what belongs together, the newest first: the older ones are usable without it.
        return sorted(giving_way, key=lambda key: (counts_as[key], -key[1]))

    def _needed_bytes(self, manifest: Manifest, dropped: Collection[VersionKey]) -> int:
        """Return the bytes of all chunks once a version has arrived and others are dropped."""
        sizes = {span.digest: span.size for span in self.missing(manifest)}
        gone = {*dropped, (manifest.run_id, manifest.version)}
        kept = [self.manifest(*key) for key in self.stored() if key not in gone]
        for each in [manifest, *filter(None, kept)]:
            for span in each.broadcast_spans():
                if self.chunks.has(span.digest, span.size):
                    sizes[span.digest] = span.size
        return sum(sizes.values())

    def _drop_old(self, run_id: RunId) -> None:
        """Keep a run's newest versions, those being received, the held ones, and their deltas'
        parents.
        """
        stored = self.stored_versions(run_id)
        receiving = [version for version in stored if (run_id, version) in self._receiving]
        newest, held = [*stored[: self.keep], *receiving], self._held(run_id, stored)
        needed_by = self._with_parents(run_id, [*newest, *held])
        for version in stored:
            if version not in needed_by:
                self._discard_version((run_id, version))
            elif version not in newest:
                self._discard_files((run_id, version))
        self._sweep()
        if held and self._is_crowded():
            self._give_way(run_id, held, needed_by)

    def _held(self, run_id: RunId, stored: list[PolicyVersion]) -> list[PolicyVersion]:
        """Return the complete versions, newest first, that were among the newest less than `hold_s`
        ago.
        """
        now_s, held = time.time(), []
        for version, successor in zip(stored[self.keep :], stored, strict=False):
            manifest = self._version_folder(run_id, successor) / "manifest.json"
            is_recent = now_s - manifest.stat().st_mtime < self.hold_s
            if is_recent and self.is_complete(run_id, version):
                held.append(version)
        return held

    def _is_crowded(self) -> bool:
        disk = shutil.disk_usage(self.folder)
        return disk.free < disk.total // HELD_LEAVES

    def _give_way(
        self,
        run_id: RunId,
        held: list[PolicyVersion],
        needed_by: Mapping[PolicyVersion, PolicyVersion],
    ) -> None:
        """Drop held versions, the oldest first, while the disk is crowded."""
        # Counted once: a manifest can have thousands of chunks, and writers wait meanwhile.
        uses = Counter(digest for key in self.stored() for digest in self._digests(key))
        while held and self._is_crowded():
            last = held.pop()
            for version in [each for each, by in needed_by.items() if by == last]:
                digests = self._digests((run_id, version))
                self._discard_version((run_id, version))
                uses.subtract(digests)
                self.chunks.discard(digest for digest in digests if not uses[digest])

    def wanted_parents(self, run_id: RunId) -> list[PolicyVersion]:
        """Return the parents of kept deltas that are not complete here."""
        newest = self.stored_versions(run_id)[: self.keep]
        parents = sorted(self._with_parents(run_id, newest), reverse=True)
        return [version for version in parents if not self.is_complete(run_id, version)]

    def _with_parents(
        self, run_id: RunId, versions: Iterable[PolicyVersion]
    ) -> dict[PolicyVersion, PolicyVersion]:
        """Add the parents of these versions' deltas, back to the nearest anchor; with each, the
        first of the versions that needs it.
        """
        needed_by: dict[PolicyVersion, PolicyVersion] = {}
        for version in versions:
            needed: PolicyVersion | None = version
            while needed is not None and needed not in needed_by:
                needed_by[needed] = version
                manifest = self.manifest(run_id, needed)
                needed = manifest.parent if manifest and manifest.kind == DELTA else None
        return needed_by

    def _discard_files(self, key: VersionKey) -> None:
        """Free the space of a published version's files if only its delta is broadcast."""
        folder, manifest = self._version_folder(*key) / "files", self.manifest(*key)
        if manifest is None or manifest.kind != DELTA:
            return
        held = [folder / file.name for file in manifest.files if (folder / file.name).exists()]
        for path in held:
            path.unlink()
        if held:
            self._originals.forget(folder)

    def _sweep(self) -> None:
        needed = set[Hash32]()
        for key in self.stored():
            needed |= self._digests(key)
        for leftover in self._runs.glob(f"*/{TEMPORARY_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self.chunks.sweep(needed)

    def _digests(self, key: VersionKey) -> set[Hash32]:
        """Return the chunks that a version's broadcast needs."""
        manifest = self.manifest(*key)
        return {span.digest for span in manifest.broadcast_spans()} if manifest else set()

    def stored(self) -> list[VersionKey]:
        """Return every version of every run that has a manifest, even if chunks are missing."""
        return [(run, v) for run in self._stored_runs() for v in self.stored_versions(run)]

    def _stored_runs(self) -> list[RunId]:
        try:
            return [RunId(int(name)) for name in os.listdir(self._runs) if name.isdecimal()]
        except FileNotFoundError:
            return []

    def _run(self, run_id: RunId) -> Path:
        return self._runs / str(int(run_id))

    def _version_folder(self, run_id: RunId, version: PolicyVersion) -> Path:
        return self._run(run_id) / str(int(version))

    def _read(self, run_id: RunId, version: PolicyVersion, name: str) -> bytes | None:
        try:
            return (self._version_folder(run_id, version) / name).read_bytes()
        except FileNotFoundError:
            return None

    def _mark_complete(self, key: VersionKey) -> None:
        with self._state:
            self._receiving.pop(key, None)
            self._complete.add(key)

    def _settle(self) -> None:
        """Move versions that now have all chunks to the complete ones; called under `_state`."""
        done = [key for key, expected in self._receiving.items() if not expected]
        for key in done:
            del self._receiving[key]
        self._complete.update(done)


def _changed_ns(folder: Path) -> int:
    """Return when entries of a folder last came or went; 0 for a folder that is not there."""
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return 0
