"""A relay's room: files and proofs of submissions that are named on chain with a bond.

Validators and jurors of such a submission find here what the run's orchestrator may withhold. An
admission check (`NamedOnChain`) decides what may be uploaded, so that nobody can fill the room for
free. When space is needed, files that the chain no longer names are deleted, the oldest first.
Then the worker that has most loses its largest file once another is complete and verified, so a few
bonds keep nobody else out; a worker offers again what a room lost.
Unfinished uploads give way, too: the slowest of the machine that has most.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from muster.lifecycle import machine_of, sync_path
from muster.protocol.bounds import MAX_FILE_BYTES
from muster.protocol.errors import MusterError, StorageError
from muster.protocol.ids import Address, Hash32

logger = logging.getLogger(__name__)

MAX_WORK_BYTES = 64 << 10
"""Most bytes of the document that proves a submission."""
UPLOADS = 32
"""Most uploads at the same time; beyond that, a newcomer replaces one."""
UPLOADS_PER_MACHINE = 4
"""Most uploads at the same time from one IPv4 address, or from the /64 of an IPv6 address."""
FIRST_BYTES = 64 << 10
"""Recent bytes that a new upload begins with: it is compared with others by what it sends next."""
HALF_LIFE_S = 2.0
"""Seconds after which a received byte counts half in the speed of its upload."""
LOOKS = 256
"""Parts of a room's size after each of which an upload looks again at what makes way for it."""
_PARTIAL = "partial-"


class RoomRefusal(MusterError):
    """A refusal of a file or a proof, with its reason."""

    def __init__(self, status: int, code: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code


class NamedOnChain(Protocol):
    """Tells what the chain names at present."""

    def worker_of_file(self, name: Hash32) -> Address | None:
        """Return whose work with a bond a file belongs to, if any."""

    def worker_of_work(self, leaf: Hash32) -> Address | None:
        """Return whose work this is, if it has a bond."""

    def work_fault(self, leaf: Hash32, document: bytes) -> str | None:
        """Return why a document does not prove that work; None if it does."""


@dataclass(slots=True, eq=False)
class _Upload:
    """An unfinished upload."""

    machine: str
    worker: Address
    """Whose work it is."""
    scope: asyncio.Timeout
    """Ends the upload when another one takes its place."""
    at_s: float
    """Time of the last part on the event loop's clock."""
    recent_bytes: float
    """Received bytes, the older ones counted less, at that time."""
    size: int = 0
    """Received bytes."""
    looks_at: int = 0
    """Size from which the files that make way for it are looked up again."""
    way_bytes: int = 0
    """Bytes of those files."""

    def add(self, size: int, now_s: float) -> None:
        """Count a part."""
        self.recent_bytes, self.at_s = self.recent(now_s) + size, now_s
        self.size += size

    def recent(self, now_s: float) -> float:
        """Return the recent bytes now: they compare the speeds of uploads."""
        return self.recent_bytes * math.exp2((self.at_s - now_s) / HALF_LIFE_S)


class FileRoom:
    """A folder of files by their SHA-256, and of proofs by the submission's leaf."""

    def __init__(self, folder: Path, *, max_bytes: int, admission: NamedOnChain) -> None:
        self._files, self._work = folder / "files", folder / "work"
        self._max_bytes = max_bytes
        self._admission = admission
        self._uploads: list[_Upload] = []
        for each in (self._files, self._work):
            each.mkdir(parents=True, exist_ok=True)
            for left_over in each.glob(f"{_PARTIAL}*"):
                left_over.unlink()
        kept = [*self._files.iterdir(), *self._work.iterdir()]
        kept.sort(key=lambda path: path.stat().st_mtime)
        self._sizes = {path: path.stat().st_size for path in kept}
        """Sizes by file, the oldest first."""
        self._unread = {path for path in kept if path.parent == self._files}
        """Files that an earlier process kept: the disk may have lost some of their bytes."""
        self._reading = asyncio.Lock()
        """Held while an unread file is read, so that all who ask for it wait for one reading."""
        self._held = sum(self._sizes.values())

    def used_bytes(self) -> int:
        """Return the bytes that are held or being received."""
        return self._held + sum(upload.size for upload in self._uploads)

    def find(self, kind: str, name: Hash32) -> Path | None:
        """Return the path of a file (`files`) or of proofs (`work`); None if it is not here."""
        path = self._path(kind, name)
        return path if path in self._sizes else None

    async def find_whole(self, kind: str, name: Hash32) -> Path | None:
        """Return what `find` does, but read a file before its first use in this process, and
        delete it if it is damaged: then it can be uploaded again. Raises OSError when it cannot be
        read now, such as with too many open files.
        """
        path = self.find(kind, name)
        if path is not None and path in self._unread:
            async with self._reading:
                await self._read(path, name)
        return self.find(kind, name)

    async def _read(self, path: Path, name: Hash32) -> None:
        """Delete an unread file if it is damaged; nothing if it was read or replaced meanwhile."""
        if path not in self._unread:
            return
        digest = await asyncio.to_thread(_digest_of, path)
        if path in self._unread:
            self._unread.discard(path)
            if digest != name:
                logger.error("file of the room was corrupt", extra={"file": path.name})
                self._delete(path)

    async def take(
        self, kind: str, name: Hash32, parts: AsyncIterator[bytes], address: str
    ) -> None:
        """Receive a file or proofs; raises RoomRefusal, and keeps nothing, when the upload is
        unwanted, too large, displaced by another, or does not match its name. What it kept
        survives a power failure.
        """
        is_file = kind == "files"
        path = self._path(kind, name)
        worker = self._worker_of(path)
        if worker is None:
            raise RoomRefusal(
                404,
                "not_named",
                "the chain has no such work with a bond",
                hint="submit it directly, or open a dispute, then try again after some blocks",
            )
        with contextlib.suppress(OSError):  # what cannot be read is replaced
            if is_file and await self.find_whole(kind, name):
                return
        partial = path.with_name(_PARTIAL + secrets.token_hex(8))
        async with self._turn(machine_of(address), worker) as upload:
            try:
                limit = MAX_FILE_BYTES if is_file else MAX_WORK_BYTES
                digest = await self._receive(upload, parts, partial, limit)
                if is_file and digest != name:
                    raise RoomRefusal(422, "other_hash", "the file has another hash than its name")
                if not is_file and (
                    fault := self._admission.work_fault(name, partial.read_bytes())
                ):
                    message = f"these are no proofs of that work: {fault}"
                    raise RoomRefusal(422, "not_proven", message)
                await asyncio.to_thread(sync_path, partial)
                self._keep(partial, path, upload)
                await asyncio.to_thread(sync_path, path.parent)
            except OSError as error:
                raise StorageError(
                    f"the room cannot keep it: {error.strerror}", hint="check the relay's disk"
                ) from error
            finally:
                partial.unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def _turn(self, machine: str, worker: Address) -> AsyncIterator[_Upload]:
        if sum(upload.machine == machine for upload in self._uploads) >= UPLOADS_PER_MACHINE:
            raise RoomRefusal(503, "busy", "too many uploads at the same time", hint="try again")
        if len(self._uploads) >= UPLOADS:
            self._displace(self._slowest(machine))
        try:
            async with asyncio.timeout(None) as scope:
                now_s = asyncio.get_running_loop().time()
                upload = _Upload(machine, worker, scope, now_s, FIRST_BYTES)
                self._uploads.append(upload)
                try:
                    yield upload
                finally:
                    if upload in self._uploads:
                        self._uploads.remove(upload)
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise RoomRefusal(
                503, "busy", "a faster upload took its place", hint="try again"
            ) from error

    def _slowest(self, *newcomers: str) -> _Upload:
        """Return the slowest upload of the machines that have most, newcomers counted."""
        count = Counter([*(upload.machine for upload in self._uploads), *newcomers])
        now_s, most = asyncio.get_running_loop().time(), max(count.values())
        crowd = (upload for upload in self._uploads if count[upload.machine] == most)
        return min(crowd, key=lambda upload: upload.recent(now_s))

    def _displace(self, upload: _Upload) -> None:
        self._uploads.remove(upload)
        upload.scope.reschedule(asyncio.get_running_loop().time())

    async def _receive(
        self, upload: _Upload, parts: AsyncIterator[bytes], partial: Path, limit: int
    ) -> bytes:
        """Write the parts of an upload once there is space for each; return their SHA-256."""
        hasher = hashlib.sha256()
        with partial.open("wb") as file:
            async for part in parts:
                upload.add(len(part), asyncio.get_running_loop().time())
                if upload.size > limit:
                    raise RoomRefusal(413, "too_large", f"more than {limit} bytes")
                self._make_room(upload)
                hasher.update(part)
                await asyncio.to_thread(file.write, part)
        return hasher.digest()

    def _keep(self, partial: Path, path: Path, upload: _Upload) -> None:
        making_way = self._making_way(upload)
        if self._held + upload.size - self._size_of(making_way) > self._max_bytes:
            raise self._full()
        # Only now: anybody can send what turns out to be no such file.
        for each in making_way:
            self._delete(each)
        partial.replace(path)
        self._held += upload.size - self._sizes.pop(path, 0)
        self._sizes[path] = upload.size
        self._unread.discard(path)

    def _make_room(self, upload: _Upload) -> None:
        """Delete files no longer named by the chain, then end slower uploads, until what has
        arrived fits once files of workers that have more make way; raises RoomRefusal.
        """
        for path in list(self._sizes):
            if self.used_bytes() <= self._max_bytes:
                return
            if self._worker_of(path) is None:
                self._delete(path)
        if self.used_bytes() <= self._max_bytes:
            return
        if upload.size > upload.looks_at:
            upload.looks_at = upload.size + self._max_bytes // LOOKS
            upload.way_bytes = self._size_of(self._making_way(upload))
        free_bytes = self._max_bytes - self._held + upload.way_bytes
        while sum(each.size for each in self._uploads) > free_bytes:
            if upload.size > free_bytes or (slowest := self._slowest()) is upload:
                raise self._full()
            self._displace(slowest)

    def _full(self) -> RoomRefusal:
        return RoomRefusal(
            507,
            "full",
            f"the room's {self._max_bytes} bytes hold work that is still open",
            hint="try again later, or use another relay",
        )

    def _size_of(self, paths: Iterable[Path]) -> int:
        return sum(self._sizes[path] for path in paths)

    def _making_way(self, upload: _Upload) -> list[Path]:
        """Return the files that make way for an upload: the largest of the worker that has most,
        again and again, until it fits or its own worker has most.
        """
        files = defaultdict[Address | None, list[Path]](list)
        for path in sorted(self._sizes, key=self._sizes.__getitem__):
            files[self._worker_of(path)].append(path)
        held = Counter({worker: self._size_of(paths) for worker, paths in files.items()})
        held[upload.worker] += upload.size
        missing, found = self._held + upload.size - self._max_bytes, list[Path]()
        while missing > 0:
            [(most, size)] = held.most_common(1)
            if size == held[upload.worker]:
                break
            found.append(largest := files[most].pop())
            held[most] -= self._sizes[largest]
            missing -= self._sizes[largest]
        return found

    def _delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._held -= self._sizes.pop(path)
        self._unread.discard(path)

    def _worker_of(self, path: Path) -> Address | None:
        name = Hash32(bytes.fromhex(path.name))
        if path.parent == self._files:
            return self._admission.worker_of_file(name)
        return self._admission.worker_of_work(name)

    def _path(self, kind: str, name: Hash32) -> Path:
        return (self._files if kind == "files" else self._work) / name.hex()


def _digest_of(path: Path) -> bytes:
    """Return a file's SHA-256, none if it is gone; raises OSError when it cannot be read now."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except FileNotFoundError:
        return b""
