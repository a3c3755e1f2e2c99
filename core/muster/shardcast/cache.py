"""The folder of fetched versions; several processes may share it.

    <run>/v<version>/            the verified files
    <run>/v<version>.manifest    what they are
    <run>/.v<version>.part/      files that are being fetched
    <run>/.v<version>.delta/     a delta that is being fetched
    <run>/.v<version>.lock       held by the process that fetches

Chunks are written to their places in the files, so nothing is copied at the end. There is no
journal: after any interruption the files are hashed chunk by chunk, and matching chunks are kept. A
file here is trusted only after it has been hashed. Knows nothing of relays.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError, PolicyUnavailable, StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.chunks import (
    TEMPORARY_PREFIX,
    LacksRoom,
    Region,
    VerifyingSink,
    is_stale,
    storage_error,
    temporary_name,
)
from muster.shardcast.digests import digest_of, file_digest, joined_digest, region_digest
from muster.shardcast.download import in_thread
from muster.shardcast.manifest import ChunkSpan, Manifest, ManifestFile

logger = logging.getLogger(__name__)

RESERVE_BYTES = 1 << 30
"""Bytes that fetched files leave free on a disk, for journals; on a small disk a 16th of it."""
LOCK_POLL_S = 0.02
"""Seconds between two checks whether another process has finished fetching the same version."""

_VERSION_FOLDER = re.compile(r"v(0|[1-9][0-9]{0,9})")
_UNFINISHED = re.compile(r"\.v(0|[1-9][0-9]{0,9})\.(?:part|delta)")


def reserve_in(folder: Path) -> int:
    """Return how many bytes fetched files leave free on a folder's disk."""
    return min(RESERVE_BYTES, shutil.disk_usage(folder).total // 16)


def room_in(folder: Path) -> int:
    """Return how many bytes fetched files may still take on a folder's disk."""
    return shutil.disk_usage(folder).free - reserve_in(folder)


def require_room(folder: Path, bytes_now: int, *, what: str, needed_bytes: int) -> None:
    """Raise LacksRoom when less than `bytes_now` fit on the disk; `what` needs the bytes."""
    room = room_in(folder)
    if bytes_now > room:
        raise LacksRoom(
            f"{what} needs {bytes_now} bytes, {max(room, 0)} are free in {folder.parent} besides "
            "the reserve for journals",
            needed_bytes=needed_bytes,
            hint="free disk space, or choose a cache folder on a larger disk",
        )


def version_folder(cache: Path, run_id: RunId, version: PolicyVersion) -> Path:
    """Return the folder of a version's files, whether it exists or not."""
    return cache / str(int(run_id)) / f"v{int(version)}"


def part_path(folder: Path) -> Path:
    """Return where a version's files are while they are fetched."""
    return folder.with_name(f".{folder.name}.part")


def delta_path(folder: Path) -> Path:
    """Return where a version's delta is while it is fetched."""
    return folder.with_name(f".{folder.name}.delta")


@asynccontextmanager
async def only_process(folder: Path) -> AsyncIterator[None]:
    """Exclude other processes that fetch the same version; the lock ends with the process."""
    path = folder.with_name(f".{folder.name}.lock")
    fd = await _locked(path)
    try:
        yield
    finally:
        os.close(fd)


async def _locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
            try:
                await _wait_for_lock(fd)
            except BaseException:
                os.close(fd)
                raise
            if os.fstat(fd).st_nlink:
                return fd
            os.close(fd)  # the lock was deleted with its version while we waited
    except OSError as error:
        raise storage_error(error, f"lock {path}") from error


async def _wait_for_lock(fd: int) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            await asyncio.sleep(LOCK_POLL_S)


def manifest_path(folder: Path) -> Path:
    """Return where the manifest of a fetched folder is: beside it."""
    return folder.with_name(f"{folder.name}.manifest")


def holds_parent(folder: Path, manifest: Manifest) -> bool:
    """Tell whether the version that a manifest's delta starts from is cached beside `folder`."""
    if manifest.delta is None:
        return False
    neighbour = folder.with_name(f"v{manifest.parent}")
    cached = _read_manifest(neighbour) if neighbour.is_dir() else None
    return cached is not None and cached.root() == manifest.delta.parent_root


def _read_manifest(folder: Path) -> Manifest | None:
    try:
        return Manifest.from_bytes(manifest_path(folder).read_bytes())
    except (OSError, EncodingError):
        return None


async def is_intact(folder: Path, root: Hash32) -> bool:
    """Tell whether the folder has the whole version; if not, its files are kept for resuming."""
    if not folder.is_dir():
        return False
    manifest = _read_manifest(folder)
    if manifest is None or keccak(manifest.to_bytes()) != root:
        await in_thread(discard, folder)
        return False
    names = {path.name for path in folder.iterdir()}
    if names == {file.name for file in manifest.files} and await _has_state(folder, manifest):
        return True
    logger.warning("cached policy was damaged", extra={"folder": folder.name})
    await in_thread(discard, part_path(folder))
    folder.rename(part_path(folder))
    return False


async def _has_state(folder: Path, manifest: Manifest) -> bool:
    """Tell whether the files, read back from the disk, have the manifest's state hash."""
    try:
        digests = {
            file.name: await in_thread(file_digest, folder / file.name) for file in manifest.files
        }
    except OSError:
        return False
    return joined_digest(digests) == manifest.state_hash


def require_consistent(manifest: Manifest) -> None:
    """Raise PolicyUnavailable when no files can have both these chunks and this state hash."""
    if manifest.derived_state_hash() not in (None, manifest.state_hash):
        raise PolicyUnavailable(
            f"the chunks of version {manifest.version} do not have the published state hash",
            hint="the trainer published a manifest that contradicts itself",
        )


async def require_state(part: PartFolder) -> None:
    """Raise PolicyUnavailable unless the files have the published state hash.

    Every chunk has been verified, so this only finds a manifest that contradicts itself. If its
    chunks are the blocks of the state hash, `require_consistent` has checked that, and nothing is
    read again.
    """
    if part.manifest.derived_state_hash() is not None:
        return
    if not await _has_state(part.path, part.manifest):
        await in_thread(discard, part.path)
        raise PolicyUnavailable(
            f"the files of version {part.manifest.version} do not have the published state hash",
            hint="the trainer published a manifest that contradicts itself, or the disk is failing",
        )


def copy_from_neighbours(
    part: PartFolder, lacking: list[list[ChunkSpan]], folder: Path
) -> list[list[ChunkSpan]]:
    """Copy chunks that another cached version has too; return those that no version has."""
    held: dict[Hash32, tuple[Path, int]] = {}
    for neighbour, _ in _cached_versions(folder.parent):
        manifest = _read_manifest(neighbour)
        for span in manifest.spans() if manifest else ():
            held[span.digest] = (neighbour / span.name, span.offset)
    return [
        places
        for places in lacking
        if places[0].digest not in held or not part.fill_from(places, *held[places[0].digest])
    ]


def install(part: PartFolder, folder: Path) -> None:
    """Rename the finished folder to its final name; the manifest comes first, so no folder lacks
    one.
    """
    try:
        fresh = folder.with_name(temporary_name())
        fresh.write_bytes(part.manifest.to_bytes())
        fresh.rename(manifest_path(folder))
        part.path.rename(folder)
    except OSError as error:
        raise storage_error(error, f"install {folder}") from error


def drop_old(folder: Path, keep: int, named: Collection[PolicyVersion] = ()) -> bool:
    """Delete all but the newest versions and those in `named`; return whether any was deleted.

    The version in `folder` and its delta's parent stay.
    """
    manifest = _read_manifest(folder)
    kept = {folder}
    if manifest is not None and manifest.parent is not None:
        kept.add(folder.with_name(f"v{int(manifest.parent)}"))
    kept |= {folder.with_name(f"v{int(version)}") for version in named}
    old = [path for path, _ in _cached_versions(folder.parent)[keep:] if path not in kept]
    for path in old:
        trash = path.with_name(temporary_name())
        path.rename(trash)
        lock = path.with_name(f".{path.name}.lock")
        for leftover in (trash, manifest_path(path), delta_path(path), lock):
            discard(leftover)
    versions = [version for _, version in _cached_versions(folder.parent)]
    if len(versions) >= keep:
        _drop_unfinished(folder.parent, versions[keep - 1])
    return bool(old)


def _drop_unfinished(run_folder: Path, oldest: int) -> None:
    """Delete the leftovers of failed fetches of versions older than every kept one."""
    for path in list(run_folder.iterdir()):
        match = _UNFINISHED.fullmatch(path.name)
        is_old = match is not None and int(match[1]) < oldest
        if is_old and match and not _is_locked(run_folder / f".v{match[1]}.lock"):
            discard(path)
        if path.name.startswith(TEMPORARY_PREFIX) and is_stale(path):
            discard(path)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _cached_versions(run_folder: Path) -> list[tuple[Path, int]]:
    """Return the version folders of a run, newest first."""
    found = [(path, _VERSION_FOLDER.fullmatch(path.name)) for path in run_folder.iterdir()]
    versions = [(path, int(match[1])) for path, match in found if match and path.is_dir()]
    return sorted(versions, key=lambda item: item[1], reverse=True)


# A version's folder while it is fetched


class PartSink(VerifyingSink):
    """A sink whose bytes go to one place of a part folder."""

    def __init__(self, folder: Path, place: ChunkSpan, writing: threading.Lock) -> None:
        """`writing` is a lock that is held while bytes go to the disk."""
        super().__init__(place.digest, place.size)
        self._writing = writing
        self._start = place.offset
        self._offset = 0
        try:
            self._file = (folder / place.name).open("r+b", buffering=0)
        except OSError as error:
            raise storage_error(error, "open a file of the version") from error

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def restart(self) -> None:
        """Forget the written bytes; later ones overwrite them."""
        super().restart()
        self._offset = 0

    def still_holds(self) -> bool:
        """Tell whether the place has the chunk: another sink may have written there since."""
        return region_digest(self._file.fileno(), self._start, self.size) == self.digest

    def _store(self, pieces: Sequence[bytes | memoryview]) -> None:
        # The kernel lets one thread at a time write to a file; other threads would spin meanwhile.
        with self._writing:
            for piece in pieces:
                _write_at(self._file.fileno(), memoryview(piece), self._start + self._offset)
                self._offset += len(piece)

    def _keep(self) -> None:
        return None


class PartFolder:
    """The files of one version, full size from the start, filled chunk by chunk."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._writing = threading.Lock()

    def sink(self, places: Sequence[ChunkSpan]) -> PartSink:
        """Return a receiver for the chunk at these places; close it in a `finally`.

        It fills the first place, for `copy` to fill the others: a manifest may name thousands.
        Raises StorageError, also when others have filled the disk since the fetch began.
        """
        self.require_room(sum(place.size for place in places))
        return PartSink(self.path, places[0], self._writing)

    def copy(self, place: ChunkSpan, other: ChunkSpan) -> None:
        """Copy a chunk that is held from one place to another; raises StorageError."""
        if not self.fill_from([other], self.path / place.name, place.offset):
            raise StorageError(
                f"{place.name} of version {self.manifest.version} changed while it was fetched",
                hint="let no other program write to the cache folder, and check the disk",
            )

    def prepare(self) -> bool:
        """Make the folder hold exactly the manifest's files, in full size.

        Returns whether it existed: then it may hold chunks already. Raises StorageError.
        """
        try:
            existed = self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._remove_strangers()
            for file in self.manifest.files:
                self._size_file(file)
        except OSError as error:
            raise storage_error(error, f"prepare {self.path}") from error
        return existed

    def held(self, file: ManifestFile, spans: Sequence[ChunkSpan]) -> list[ChunkSpan]:
        """Return the chunks of a file whose bytes are already there; hashes all of them."""
        try:
            with (self.path / file.name).open("rb", buffering=0) as source:
                fd = source.fileno()
                return [s for s in spans if region_digest(fd, s.offset, s.size) == s.digest]
        except OSError as error:
            raise storage_error(error, f"read {file.name} of the version") from error

    def require_room(self, needed_bytes: int) -> None:
        """Raise LacksRoom when the disk has less room than that."""
        what = f"version {self.manifest.version}"
        total_bytes = self.manifest.total_bytes
        require_room(self.path, needed_bytes, what=what, needed_bytes=total_bytes)

    def fill_from(self, places: Sequence[ChunkSpan], source: Path, offset: int) -> bool:
        """Copy one chunk out of another file; False when that file does not hold it."""
        self.require_room(sum(place.size for place in places))
        try:
            data = Region(source, offset, places[0].size).read()
        except FileNotFoundError:
            return False
        if digest_of(data) != places[0].digest:
            return False
        try:
            for place in places:
                with (self.path / place.name).open("r+b", buffering=0) as file:
                    _write_at(file.fileno(), memoryview(data), place.offset)
        except OSError as error:
            raise storage_error(error, "write a chunk") from error
        return True

    def _remove_strangers(self) -> None:
        names = {file.name for file in self.manifest.files}
        for entry in list(self.path.iterdir()):
            if entry.name not in names or not entry.is_file() or entry.is_symlink():
                discard(entry)

    def _size_file(self, file: ManifestFile) -> None:
        fd = os.open(self.path / file.name, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o644)
        try:
            os.ftruncate(fd, file.size)
        finally:
            os.close(fd)


def discard(path: Path) -> None:
    """Delete a file or folder, whatever it holds."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _write_at(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


def group_by_digest(spans: Iterable[ChunkSpan]) -> list[list[ChunkSpan]]:
    """Return the places of each digest, in the order in which digests first occur."""
    places: dict[Hash32, list[ChunkSpan]] = {}
    for span in spans:
        places.setdefault(span.digest, []).append(span)
    return list(places.values())
