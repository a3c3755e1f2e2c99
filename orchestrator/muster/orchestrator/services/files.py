"""The files folder: submission files, and beside them what the database is rebuilt from.

    <sha256>.parquet, <sha256>.json          a file; its submission, signatures and ticket
    batches/<root>.json                      a batch's file hashes in order, before it is committed
    outcomes/<batch id>-<validator>.json     a validator's signed outcomes
    metrics.jsonl                            the trainer's figures
    transactions.sqlite3                     what was sent to the chain: its sender owns it

Everything is written to a temporary file in the same folder, synced, then renamed: a name stands
for complete content. No name comes from a peer; they are hashes and addresses already parsed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from muster.api.answers import AccountAddress, BatchEntry, HexBytes, HexHash, HexSignature
from muster.orchestrator.services.refusals import refuse
from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32

logger = logging.getLogger(__name__)

_FLUSH_BYTES = 1 << 20
_TEMPORARY = ".part"
LEFTOVER_S = 600
"""Age from which a temporary file is what an interrupted upload left behind."""


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoredSubmission(BatchEntry):
    """A received submission, as written beside its file."""

    sequence: int
    """Order of upload."""
    size_bytes: int
    """Size of its file."""


class StoredBatch(_Stored):
    """A batch's composition, as written before it is committed."""

    root: HexHash
    """Merkle root over the submissions' leaves."""
    file_hashes: list[HexHash]
    """The submissions, in batch order."""
    composed_ns: int
    """Wall clock in nanoseconds: of two that overlap, only the later can have been sent."""


class StoredOutcomes(_Stored):
    """One validator's outcomes of one batch."""

    batch_id: int
    """The batch."""
    root: HexHash
    """The batch's root: numbers are reused when a local chain starts over."""
    validator: AccountAddress
    """Who signed."""
    records: HexBytes
    """The packed records."""
    signature: HexSignature
    """EIP-712 `Outcomes`."""


M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Received:
    """An upload that is complete on disk but not kept yet."""

    path: Path
    """The temporary file."""
    file_hash: Hash32
    """SHA-256 of its content."""
    size_bytes: int
    """Its size."""


def _unlink_old(leftover: Path) -> None:
    # A young one may be an upload that another replica is taking in.
    if leftover.stat().st_mtime < time.time() - LEFTOVER_S:
        leftover.unlink(missing_ok=True)


class FileStore:
    """The folder, by meaning instead of by path."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._batches = folder / "batches"
        self._outcomes = folder / "outcomes"
        self._metrics = folder / "metrics.jsonl"

    def open(self) -> None:
        """Create the folder and clear what interrupted uploads left behind."""
        try:
            for folder in (self._folder, self._batches, self._outcomes):
                folder.mkdir(parents=True, exist_ok=True)
                for leftover in folder.glob(f"*{_TEMPORARY}"):
                    _unlink_old(leftover)
        except OSError as error:
            raise StorageError(
                f"the files folder {self._folder} is unusable: {error.strerror}",
                hint="give a folder that this user may write with --files",
            ) from error

    def path(self, file_hash: Hash32) -> Path | None:
        """Return where a kept file lies."""
        path = self._parquet(file_hash)
        return path if path.is_file() else None

    async def receive(self, stream: AsyncIterator[bytes], *, max_bytes: int) -> Received:
        """Write a stream to a temporary file; refuses more than `max_bytes` while streaming."""
        with _reporting_disk():
            file = NamedTemporaryFile(dir=self._folder, suffix=_TEMPORARY, delete=False)  # noqa: SIM115
        digest, size, waiting = hashlib.sha256(), 0, bytearray()

        def flush() -> None:
            digest.update(waiting)
            file.write(waiting)
            waiting.clear()

        try:
            with file, _reporting_disk():
                async for part in stream:
                    size += len(part)
                    if size > max_bytes:
                        raise refuse("body_too_large", f"the file exceeds {max_bytes} bytes")
                    waiting += part
                    if len(waiting) >= _FLUSH_BYTES:
                        await asyncio.to_thread(flush)
                await asyncio.to_thread(flush)
                await asyncio.to_thread(_sync, file)
        except BaseException:
            os.unlink(file.name)
            raise
        return Received(Path(file.name), Hash32(digest.digest()), size)

    def discard(self, received: Received) -> None:
        """Remove an upload that is not kept."""
        received.path.unlink(missing_ok=True)

    async def keep(self, received: Received, stored: StoredSubmission) -> None:
        """Keep an upload with its submission; the sidecar comes last and makes it count."""

        def move() -> None:
            received.path.replace(self._parquet(received.file_hash))
            self._write(self._sidecar(received.file_hash), stored)

        with _reporting_disk():
            await asyncio.to_thread(move)

    async def keep_batch(self, stored: StoredBatch) -> None:
        """Keep a batch's composition."""
        path = self._batches / f"{stored.root.hex()}.json"
        with _reporting_disk():
            await asyncio.to_thread(self._write, path, stored)

    async def keep_outcomes(self, stored: StoredOutcomes) -> None:
        """Keep a validator's outcomes."""
        path = self._outcomes / f"{stored.batch_id}-{stored.validator}.json"
        with _reporting_disk():
            await asyncio.to_thread(self._write, path, stored)

    async def keep_metrics(self, step: int, figures: dict[str, float]) -> None:
        """Append the figures of one step."""

        def append() -> None:
            with self._metrics.open("a") as file:
                file.write(json.dumps({"step": step, "figures": figures}) + "\n")

        with _reporting_disk():
            await asyncio.to_thread(append)

    def submissions(self) -> Iterator[StoredSubmission]:
        """Yield every kept submission, in order of upload."""
        found = list(_parse_all(StoredSubmission, self._folder))
        for stored in sorted(found, key=lambda s: s.sequence):
            if self.path(stored.submission.file_hash) is None:
                logger.warning("a submission's file is gone", extra={"file": _hex(stored)})
            yield stored

    def batches(self) -> Iterator[StoredBatch]:
        """Yield every kept composition."""
        return _parse_all(StoredBatch, self._batches)

    def outcomes(self) -> Iterator[StoredOutcomes]:
        """Yield every kept set of outcomes."""
        return _parse_all(StoredOutcomes, self._outcomes)

    def metrics(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the trainer's figures in the order reported; stops at a torn last line."""
        if not self._metrics.exists():
            return
        for line in self._metrics.read_text().splitlines():
            try:
                entry: dict[str, Any] = json.loads(line)
                yield int(entry["step"]), dict(entry["figures"])
            except (ValueError, KeyError, TypeError):
                return

    def _parquet(self, file_hash: Hash32) -> Path:
        return self._folder / f"{file_hash.hex()}.parquet"

    def _sidecar(self, file_hash: Hash32) -> Path:
        return self._folder / f"{file_hash.hex()}.json"

    def _write(self, path: Path, model: BaseModel) -> None:
        temporary = path.with_suffix(_TEMPORARY)
        with temporary.open("wb") as file:
            file.write(model.model_dump_json().encode())
            _sync(file)
        temporary.replace(path)
        _sync_folder(path.parent)


def _hex(stored: StoredSubmission) -> str:
    return stored.submission.file_hash.hex()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _reporting_disk:
    """Turns a failing disk into a refusal; the peer may try again once there is room."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _tb: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            logger.error("the files folder cannot be written", extra={"error": str(error)})
            raise refuse("storage_failed", "the orchestrator's disk cannot be written") from error


def _parse_all(kind: type[M], folder: Path) -> Iterator[M]:
    for path in sorted(folder.glob("*.json")):
        try:
            yield kind.model_validate_json(path.read_bytes())
        except ValidationError as error:
            logger.warning(
                "a file is ignored: it is corrupt",
                extra={"path": str(path), "problem": error.errors()[0]["msg"]},
            )
