"""A relay's room: submissions' files and their proofs, for work that the chain names with a bond.

Judges of such work find here what the run's orchestrator may keep back. The room's maker decides
what may be put here (`NamedOnChain`), so that nobody fills it for nothing. When space is needed,
files that the chain no longer names are deleted, the oldest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

from muster.protocol.errors import MusterError, StorageError
from muster.protocol.ids import Hash32

MAX_FILE_BYTES = 64 << 20
"""Largest file: that of docs/protocol.md section 7, `muster.protocol.rollouts.MAX_FILE_BYTES`."""
MAX_WORK_BYTES = 64 << 10
"""Largest document of a submission with its proofs."""
UPLOADS = 32
"""Uploads that are received at the same time."""
UPLOADS_PER_ADDRESS = 4
"""How many of them come from one address."""
_PARTIAL = "partial-"


class RoomRefusal(MusterError):
    """A refusal of a file or a proof, with its reason."""

    def __init__(self, status: int, code: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code


class NamedOnChain(Protocol):
    """Says what the chain names now."""

    def names_file(self, name: Hash32) -> bool:
        """Return whether a file is of work with a bond behind it."""

    def names_work(self, leaf: Hash32) -> bool:
        """Return whether work has a bond behind it."""

    def work_fault(self, leaf: Hash32, document: bytes) -> str | None:
        """Return why a document does not prove that work, or None."""


class Room:
    """Files by their SHA-256 and proofs by the submission's leaf, in a folder."""

    def __init__(self, folder: Path, *, max_bytes: int, admission: NamedOnChain) -> None:
        self._files, self._work = folder / "files", folder / "work"
        self._max_bytes = max_bytes
        self._admission = admission
        self._uploads: Counter[str] = Counter()
        self._arriving = 0
        for each in (self._files, self._work):
            each.mkdir(parents=True, exist_ok=True)
            for left_over in each.glob(f"{_PARTIAL}*"):
                left_over.unlink()
        kept = [*self._files.iterdir(), *self._work.iterdir()]
        kept.sort(key=lambda path: path.stat().st_mtime)
        self._sizes = {path: path.stat().st_size for path in kept}
        """By file, the oldest first."""
        self._held = sum(self._sizes.values())

    def used_bytes(self) -> int:
        """Return how much is held, and is being received."""
        return self._held + self._arriving

    def find(self, kind: str, name: Hash32) -> Path | None:
        """Return where a file (`files`) or the proofs of work (`work`) are, if they are here."""
        path = self._path(kind, name)
        return path if path in self._sizes else None

    async def take(
        self, kind: str, name: Hash32, parts: AsyncIterator[bytes], address: str
    ) -> None:
        """Take in a file or proofs; raises RoomRefusal, and keeps nothing, when it is not wanted,
        not what its name says, or too large.
        """
        is_named = self._admission.names_file if kind == "files" else self._admission.names_work
        if not is_named(name):
            raise RoomRefusal(
                404,
                "not_named",
                "the chain names no such work with a bond behind it",
                hint="submit it directly, or claim about it, then try again in some blocks",
            )
        with self._turn(address):
            if kind == "files":
                await self._take_file(name, parts)
            else:
                await self._take_work(name, parts)

    @contextlib.contextmanager
    def _turn(self, address: str) -> Iterator[None]:
        if sum(self._uploads.values()) >= UPLOADS or self._uploads[address] >= UPLOADS_PER_ADDRESS:
            raise RoomRefusal(503, "busy", "too many uploads at the same time", hint="try again")
        self._uploads[address] += 1
        try:
            yield
        finally:
            self._uploads[address] -= 1
            self._uploads += Counter()  # forgets an address without uploads

    async def _take_file(self, name: Hash32, parts: AsyncIterator[bytes]) -> None:
        hasher, path = hashlib.sha256(), self._path("files", name)
        partial = path.with_name(_PARTIAL + secrets.token_hex(8))
        try:
            with partial.open("wb") as file:
                size = 0
                try:
                    async for part in parts:
                        if size + len(part) > MAX_FILE_BYTES:
                            raise _too_large(MAX_FILE_BYTES)
                        self._make_room(len(part))
                        self._arriving += len(part)
                        size += len(part)
                        hasher.update(part)
                        await asyncio.to_thread(file.write, part)
                finally:
                    self._arriving -= size
            if hasher.digest() != name:
                raise RoomRefusal(422, "other_hash", "the file has another hash than its name")
            self._keep(partial, path, size)
        except OSError as error:
            raise _cannot_keep(error) from error
        finally:
            partial.unlink(missing_ok=True)

    async def _take_work(self, leaf: Hash32, parts: AsyncIterator[bytes]) -> None:
        document = bytearray()
        async for part in parts:
            document += part
            if len(document) > MAX_WORK_BYTES:
                raise _too_large(MAX_WORK_BYTES)
        if fault := self._admission.work_fault(leaf, bytes(document)):
            raise RoomRefusal(422, "not_proven", f"these are no proofs of that work: {fault}")
        self._make_room(len(document))
        path = self._path("work", leaf)
        partial = path.with_name(_PARTIAL + secrets.token_hex(8))
        try:
            partial.write_bytes(document)
            self._keep(partial, path, len(document))
        except OSError as error:
            raise _cannot_keep(error) from error
        finally:
            partial.unlink(missing_ok=True)

    def _keep(self, partial: Path, path: Path, size: int) -> None:
        partial.replace(path)
        self._held += size - self._sizes.pop(path, 0)
        self._sizes[path] = size

    def _make_room(self, size: int) -> None:
        """Drop what the chain no longer names until so many bytes fit; raises RoomRefusal."""
        for path in list(self._sizes):
            if self.used_bytes() + size <= self._max_bytes:
                return
            if not self._is_named(path):
                path.unlink(missing_ok=True)
                self._held -= self._sizes.pop(path)
        if self.used_bytes() + size > self._max_bytes:
            raise RoomRefusal(
                507,
                "full",
                f"the room's {self._max_bytes} bytes hold work that is still open",
                hint="try again later, or another relay",
            )

    def _is_named(self, path: Path) -> bool:
        name = Hash32(bytes.fromhex(path.name))
        if path.parent == self._files:
            return self._admission.names_file(name)
        return self._admission.names_work(name)

    def _path(self, kind: str, name: Hash32) -> Path:
        return (self._files if kind == "files" else self._work) / name.hex()


def _too_large(limit: int) -> RoomRefusal:
    return RoomRefusal(413, "too_large", f"more than {limit} bytes")


def _cannot_keep(error: OSError) -> StorageError:
    return StorageError(f"the room cannot keep it: {error.strerror}", hint="check the relay's disk")
