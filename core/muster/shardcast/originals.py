"""The whole files that an origin published: its chunks are regions of them, not copies.

Owns the `files` folders of published versions; does not verify manifests and knows no network. A
file may share its disk space with the publisher's file (a hard link). So it is trusted only while
its size and modification time are those of the last hashing; otherwise it is hashed again.
"""

import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from muster.lifecycle import sync_path
from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32
from muster.shardcast.chunks import Region, copy_file, storage_error
from muster.shardcast.digests import (
    HASHERS,
    STATE_BLOCK_BYTES,
    block_digests,
    digest_of_blocks,
    file_digest,
    joined_digest,
    region_digest,
)
from muster.shardcast.manifest import MAX_TOTAL_BYTES, Manifest, ManifestFile, require_file_name

logger = logging.getLogger(__name__)


class Stamp(NamedTuple):
    """Identity of a file's content: a file with the same stamp is still the one that was hashed."""

    inode: int
    """The file's number in the file system."""
    size: int
    """Bytes."""
    changed_ns: int
    """Time of the last change to its bytes, nanoseconds."""


class Originals:
    """Index of the places of published versions' chunks. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Path, int] = {}
        self._regions: dict[Hash32, Region] = {}
        self._hashed: dict[Hash32, Stamp] = {}

    def knows(self, folder: Path) -> bool:
        """Tell whether a version's folder of files is indexed in its present state, or does not
        exist.
        """
        inode = _inode(folder)
        with self._lock:
            return inode is None or self._known.get(folder) == inode

    def learn(self, folder: Path, manifest: Manifest) -> bool:
        """Index the files of a version's folder; return whether the folder exists."""
        inode = _inode(folder)
        if inode is None:
            return False
        with self._lock:
            self._known[folder] = inode
            held = {path.name for path in folder.glob("*")}
            for span in [*manifest.delta_spans(), *manifest.spans()]:
                if span.name in held:
                    region = Region(folder / span.name, span.offset, span.size)
                    self._regions[span.digest] = region
        return True

    def forget(self, folder: Path) -> None:
        """Drop a folder's files from the index."""
        with self._lock:
            self._known.pop(folder, None)
            gone = [d for d, region in self._regions.items() if region.path.parent == folder]
            for digest in gone:
                del self._regions[digest]
                self._hashed.pop(digest, None)
            # A chunk that another folder has too is found again when that folder is indexed again.
            self._known.clear()

    def trust(self, digest: Hash32, stamp: Stamp) -> None:
        """Note that a chunk was hashed while its file had this stamp."""
        with self._lock:
            self._hashed[digest] = stamp

    def is_checked(self, digest: Hash32) -> bool:
        """Tell whether `find` is instant: the chunk was hashed and its file has not changed."""
        with self._lock:
            region, stamp = self._regions.get(digest), self._hashed.get(digest)
        return region is not None and stamp is not None and _stamp(region.path) == stamp

    def is_indexed(self, digest: Hash32) -> bool:
        """Tell whether a place of the chunk is known; the bytes there may have changed."""
        with self._lock:
            return digest in self._regions

    def has(self, digest: Hash32) -> bool:
        """Tell whether the chunk's place exists in full; its bytes are checked on first use."""
        with self._lock:
            region = self._regions.get(digest)
        if region is None or (stamp := _stamp(region.path)) is None:
            return False
        return stamp.size >= region.offset + region.size

    def find(self, digest: Hash32) -> Region | None:
        """Return where a chunk's bytes lie, hashing them if needed; None if they have changed.

        Raises OSError when they cannot be read now.
        """
        with self._lock:
            region, trusted = self._regions.get(digest), self._hashed.get(digest)
        if region is None:
            return None
        stamp = _stamp(region.path)
        if stamp is not None and stamp == trusted:
            return region
        if stamp is not None and _digest_at(region) == digest:
            self.trust(digest, stamp)
            return region
        logger.error("published file was changed", extra={"file": region.path.name})
        with self._lock:
            self._regions.pop(digest, None)
        return None


def place_files(
    files: Mapping[str, Path], folder: Path, chunk_bytes: int, *, link: bool
) -> tuple[tuple[ManifestFile, ...], Hash32, dict[Hash32, Stamp]]:
    """Put a version's files into a folder of the store, and hash them chunk by chunk.

    Returns their entries in the manifest, their state hash, and each chunk's file stamp. Raises
    EncodingError for names or sizes the format refuses, StorageError when reading or writing fails.
    """
    entries: list[ManifestFile] = []
    digests: dict[str, Hash32] = {}
    stamps: dict[Hash32, Stamp] = {}
    with ThreadPoolExecutor(HASHERS, thread_name_prefix="publish") as hashers:
        for name in sorted(require_file_name(name) for name in files):
            _place_file(name, files[name], folder / name, link=link)
            entry, digests[name], stamp = hash_file(folder / name, chunk_bytes, hashers)
            entries.append(entry)
            stamps.update(dict.fromkeys(entry.chunks, stamp))
    return tuple(entries), joined_digest(digests), stamps


def _place_file(name: str, source: Path, target: Path, *, link: bool) -> None:
    """Put a file into the store: a hard link if allowed and possible, else a copy.

    Raises StorageError when neither is possible.
    """
    try:
        if link:
            try:
                os.link(source.resolve(strict=True), target)
                return
            except OSError:
                logger.info("cannot link, copying", extra={"file": name})
        copy_file(source, target)
    except OSError as error:
        raise storage_error(error, f"copy {name} into the store") from error


def hash_file(
    path: Path, chunk_bytes: int, hashers: ThreadPoolExecutor
) -> tuple[ManifestFile, Hash32, Stamp]:
    """Return a file's manifest entry, its digest and its stamp; raises StorageError.

    Every byte is read once when chunks are as large as the blocks of the file's digest.
    """
    before = _stamp(path)
    if before is None:
        raise StorageError(f"{path.name} vanished while it was published")
    size = min(before.size, MAX_TOTAL_BYTES + 1)
    with path.open("rb", buffering=0) as file:
        chunks = block_digests(file.fileno(), size, chunk_bytes, hashers)
    whole = digest_of_blocks(chunks) if chunk_bytes == STATE_BLOCK_BYTES else file_digest(path)
    if _stamp(path) != before:
        raise StorageError(
            f"{path.name} changed while it was published",
            hint="write it under another name and rename it when it is whole",
        )
    return ManifestFile(path.name, size, chunks), whole, before


def sync_files(folder: Path) -> None:
    """Flush every file of a folder to the disk."""
    for path in [*folder.iterdir(), folder]:
        sync_path(path)


def _stamp(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)


def _inode(folder: Path) -> int | None:
    try:
        return folder.stat().st_ino
    except OSError:
        return None


def _digest_at(region: Region) -> Hash32 | None:
    try:
        with region.path.open("rb", buffering=0) as file:
            return region_digest(file.fileno(), region.offset, region.size)
    except FileNotFoundError:
        return None
