"""A folder of immutable chunks, each named by the BLAKE3 of its bytes.

Owns the chunk files of a ChunkStore; knows nothing of versions or the network. A chunk gets its
name only after its bytes were hashed, and one found on disk is hashed again before its first use in
a process, so neither a crash, a lost write nor a flipped bit can make the folder serve wrong bytes.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from muster.protocol.errors import EncodingError, StorageError, storage_error_of
from muster.protocol.ids import Hash32
from muster.shardcast.digests import region_digest
from muster.shardcast.manifest import parse_digest

logger = logging.getLogger(__name__)

TEMPORARY_PREFIX = ".tmp-"
"""Prefix of names of unfinished files and folders; no digest, version or manifest name has it."""
STALE_AFTER_S = 3600.0
"""A temporary file that did not change for so many seconds belongs to a process that died."""

COPY_BYTES = 64 << 20
"""Most bytes per call that copies within the kernel."""

_counter = itertools.count()


class Region(NamedTuple):
    """Where a chunk's bytes lie."""

    path: Path
    offset: int
    """The chunk's first byte in it."""
    size: int
    """Bytes of the chunk."""

    def read(self) -> bytes:
        """Return the bytes; raises OSError."""
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), self.size, self.offset)


def temporary_name() -> str:
    """Return a name that no other process or thread uses."""
    return f"{TEMPORARY_PREFIX}{os.getpid()}-{next(_counter)}-{time.monotonic_ns():x}"


def storage_error(error: OSError, what: str) -> StorageError:
    """Return the StorageError for a failed file operation; `what` names it."""
    return storage_error_of(
        error,
        f"cannot {what}: {error.strerror or error}",
        hint="free disk space or check the folder's permissions, then try again",
    )


class LacksRoom(StorageError):
    """A disk or a limit has too little room for fetched files."""

    def __init__(self, message: str, *, needed_bytes: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.needed_bytes = needed_bytes
        """What all of them take."""


class VerifyingSink(ABC):
    """Receives one chunk's bytes piece by piece and verifies their hash."""

    def __init__(self, digest: Hash32, size: int) -> None:
        self.digest = digest
        self.size = size
        self.seen = 0
        """Bytes that have arrived, including those that are not written yet."""
        self._received = 0
        self._hasher = blake3()

    @property
    def received(self) -> int:
        """Bytes written so far; another relay can continue from there."""
        return self._received

    def saw(self, count: int) -> None:
        """Count bytes that have arrived."""
        self.seen += count

    def restart(self) -> None:
        """Forget what was written: the next bytes are the chunk's first."""
        self.seen = self._received = 0
        self._hasher = blake3()

    def still_holds(self) -> bool:
        """Tell whether the committed bytes are still there; hashes them again if others may write
        too.

        Only a sink that shares its place with other sinks has to look.
        """
        return True

    def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Append bytes; raises EncodingError on too many, StorageError when the disk refuses."""
        self._received += sum(len(piece) for piece in pieces)
        if self._received > self.size:
            raise EncodingError(f"chunk {self.digest.hex()} is longer than {self.size} bytes")
        for piece in pieces:
            self._hasher.update(piece)
        try:
            self._store(pieces)
        except OSError as error:
            raise storage_error(error, "write a chunk") from error

    def commit(self) -> None:
        """Keep the bytes; raises EncodingError unless their size and hash are right."""
        if self._received != self.size:
            raise EncodingError(
                f"chunk {self.digest.hex()} has {self._received} bytes, expected {self.size}"
            )
        if self._hasher.digest() != self.digest:
            raise EncodingError(f"chunk {self.digest.hex()} has other bytes than its hash says")
        self._keep()

    @abstractmethod
    def close(self) -> None:
        """Release the sink's resources; without a commit, no bytes count as received."""

    @abstractmethod
    def _store(self, pieces: Sequence[bytes | memoryview]) -> None: ...

    @abstractmethod
    def _keep(self) -> None: ...


class ChunkSink(VerifyingSink):
    """A sink whose bytes become a chunk file of a folder."""

    def __init__(
        self, folder: ChunkFolder, digest: Hash32, size: int, kept: Callable[[Hash32], None]
    ) -> None:
        super().__init__(digest, size)
        self._folder = folder
        self._kept = kept
        self._path = folder.path / temporary_name()
        try:
            self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except OSError as error:
            raise storage_error(error, "create a chunk") from error

    def close(self) -> None:
        """Release the file; without a commit, delete it."""
        os.close(self._fd)
        self._path.unlink(missing_ok=True)

    def restart(self) -> None:
        """Forget what was written, on the disk too."""
        super().restart()
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)

    def _store(self, pieces: Sequence[bytes | memoryview]) -> None:
        write_all(self._fd, pieces)

    def _keep(self) -> None:
        # No fsync: a chunk found on disk is hashed again before its first use in a process.
        self._folder.adopt(self._path, self.digest)
        self._kept(self.digest)


class ChunkFolder:
    """Content-addressed files in one folder. Safe to use from several threads and processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._checked: set[Hash32] = set()
        self._lock = threading.Lock()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise storage_error(error, f"create {path}") from error

    def path_of(self, digest: Hash32) -> Path:
        """Return the path of the chunk, whether it exists or not."""
        return self.path / digest.hex()

    def sink(self, digest: Hash32, size: int, *, kept: Callable[[Hash32], None]) -> ChunkSink:
        """Return a receiver for one chunk that calls `kept` after its commit; close it in a
        `finally`.
        """
        return ChunkSink(self, digest, size, kept)

    def has(self, digest: Hash32, size: int) -> bool:
        """Tell whether the chunk is there in full length; its bytes are checked on first use."""
        try:
            return os.stat(self.path_of(digest)).st_size == size
        except OSError:
            return False

    def is_checked(self, digest: Hash32) -> bool:
        """Tell whether this process has already verified the chunk, so that `find` is instant."""
        with self._lock:
            return digest in self._checked

    def find(self, digest: Hash32) -> Region | None:
        """Return where a chunk with matching bytes lies, hashing it on first use; else None.

        A chunk that does not match is deleted, so that it can be fetched again. Raises OSError when
        it cannot be read now, such as with too many open files.
        """
        path = self.path_of(digest)
        try:
            region = Region(path, 0, os.stat(path).st_size)
            if self.is_checked(digest):
                return region
            with path.open("rb", buffering=0) as file:
                found = region_digest(file.fileno(), 0, region.size)
        except FileNotFoundError:
            return None
        if found == digest:
            self._remember(digest)
            return region
        logger.error("chunk on disk was corrupt", extra={"chunk": digest.hex()})
        path.unlink(missing_ok=True)
        return None

    def adopt(self, path: Path, digest: Hash32) -> None:
        """Rename a verified file in this folder to its digest."""
        try:
            path.rename(self.path_of(digest))
        except OSError as error:
            raise storage_error(error, "store a chunk") from error
        self._remember(digest)

    def sweep(self, needed: Collection[Hash32]) -> None:
        """Delete chunks that are not needed and stale temporary files."""
        for entry in _entries(self.path):
            digest = parse_digest(entry.name)
            if digest is not None and digest not in needed:
                self.discard([digest])
            elif digest is None and is_stale(Path(entry.path)):
                Path(entry.path).unlink(missing_ok=True)

    def discard(self, digests: Iterable[Hash32]) -> None:
        """Delete chunks, if they are there."""
        for digest in digests:
            with self._lock:
                self._checked.discard(digest)
            self.path_of(digest).unlink(missing_ok=True)

    def used_bytes(self) -> int:
        """Return the size of all files in the folder."""
        return sum(_size(entry) for entry in _entries(self.path))

    def _remember(self, digest: Hash32) -> None:
        with self._lock:
            self._checked.add(digest)


def write_all(fd: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write every byte at the descriptor's position; raises OSError."""
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(fd, view) :]


def copy_file(source: Path, target: Path) -> None:
    """Copy a file within the kernel, sharing its disk space where the file system can.

    Raises OSError; the target must not exist.
    """
    with source.open("rb", buffering=0) as file, target.open("xb", buffering=0) as copy:
        try:
            while os.copy_file_range(file.fileno(), copy.fileno(), COPY_BYTES):
                pass
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            file.seek(0)
            copy.truncate(0)
            shutil.copyfileobj(file, copy, COPY_BYTES >> 6)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def is_stale(entry: Path) -> bool:
    """Tell whether a temporary file or folder belongs to a process that died."""
    if entry.name.startswith(f"{TEMPORARY_PREFIX}{os.getpid()}-"):
        return False  # our own, whatever the clock says
    try:
        age_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return False
    return entry.name.startswith(TEMPORARY_PREFIX) and age_s > STALE_AFTER_S
