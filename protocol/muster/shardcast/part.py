"""A version's folder while it is being fetched.

Chunks are written where they belong in their files, so nothing is copied at the end. There is no
journal: after any interruption the files are hashed chunk by chunk, and what matches is kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32
from muster.shardcast.chunks import VerifyingSink, storage_error
from muster.shardcast.digests import digest_of, region_digest
from muster.shardcast.manifest import ChunkSpan, Manifest, ManifestFile


class PartSink(VerifyingSink):
    """A sink whose bytes go to every place of a part folder where the chunk occurs."""

    def __init__(
        self, folder: Path, places: Sequence[ChunkSpan], writing: threading.Lock | None = None
    ) -> None:
        """`writing` is held while bytes go to the disk."""
        super().__init__(places[0].digest, places[0].size)
        self._writing = writing or threading.Lock()
        self.places = len(places)
        self._offset = 0
        self._starts = [place.offset for place in places]
        self._fds: list[int] = []
        try:
            for place in places:
                self._fds.append(os.open(folder / place.name, os.O_WRONLY))
        except OSError as error:
            self.close()
            raise storage_error(error, "open a file of the version") from error

    def close(self) -> None:
        """Release the files."""
        while self._fds:
            os.close(self._fds.pop())

    def _store(self, pieces: Sequence[bytes | memoryview]) -> None:
        # The kernel lets one thread at a time write to a file; the others would spin meanwhile.
        with self._writing:
            for fd, start in zip(self._fds, self._starts, strict=True):
                offset = start + self._offset
                for piece in pieces:
                    _write_at(fd, memoryview(piece), offset)
                    offset += len(piece)
        self._offset += sum(len(piece) for piece in pieces)

    def _keep(self) -> None:
        return None


class PartFolder:
    """The files of one version, full size from the start, filled chunk by chunk."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._writing = threading.Lock()

    def sink(self, places: Sequence[ChunkSpan]) -> PartSink:
        """Return a receiver for the chunk at these places; close it in a `finally`."""
        return PartSink(self.path, places, self._writing)

    def prepare(self) -> bool:
        """Make the folder hold exactly the manifest's files, in full size.

        Returns whether it existed, so that it may hold chunks already. Raises StorageError.
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
        """Return those chunks of a file whose bytes are there; hashes them all."""
        try:
            with (self.path / file.name).open("rb", buffering=0) as source:
                fd = source.fileno()
                return [s for s in spans if region_digest(fd, s.offset, s.size) == s.digest]
        except OSError as error:
            raise storage_error(error, f"read {file.name} of the version") from error

    def require_room(self, needed_bytes: int) -> None:
        """Raise StorageError when the disk has less room than that."""
        free_bytes = shutil.disk_usage(self.path).free
        if needed_bytes > free_bytes:
            raise StorageError(
                f"version {self.manifest.version} needs {needed_bytes} bytes, "
                f"{free_bytes} are free in {self.path.parent}",
                hint="free disk space, or choose a cache folder on a larger disk",
            )

    def fill_from(self, places: list[ChunkSpan], source: Path, offset: int) -> bool:
        """Copy one chunk out of another file; False when that file does not hold it."""
        sink = PartSink(self.path, places)
        try:
            with source.open("rb", buffering=0) as file:
                file.seek(offset)
                data = file.read(sink.size)
            if digest_of(data) != sink.digest:
                return False
            sink.write([data])
            return True
        except FileNotFoundError:
            return False
        finally:
            sink.close()

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
