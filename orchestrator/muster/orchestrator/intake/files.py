"""Kept files: submission files, and beside them the sources for rebuilding the database.

<sha256>.parquet, <sha256>.json          a file; its submission, signatures and ticket
batches/<root>.json                      a batch's file hashes in order, before it is committed
outcomes/<batch id>-<validator>.json     a validator's signed outcomes
doubles/<offence>-<owner>-<tag>.json     second signatures by someone who may sign once
metrics.jsonl                            the trainer's figures
transactions.sqlite3                     journal of sent transactions, owned by their sender; in
                                         the folder even if the files are in a bucket
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from muster.api.answers import AccountAddress, BatchEntry, HexBytes, HexHash, HexSignature
from muster.orchestrator.http.errors import CANNOT_WRITE, refuse
from muster.orchestrator.intake.blobs import LEFTOVER_S, TEMPORARY, Blobs, LocalBlobs, sync
from muster.protocol.errors import StorageError, storage_error_of
from muster.protocol.ids import Hash32

logger = logging.getLogger(__name__)

_FLUSH_BYTES = 1 << 20
_BATCHES, _OUTCOMES, _DOUBLES, _METRICS = "batches", "outcomes", "doubles", "metrics.jsonl"


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
    """Wall clock in nanoseconds; of two compositions that overlap, only the later can have been
    sent."""


class StoredOutcomes(_Stored):
    """One validator's outcomes of one batch."""

    batch_id: int
    root: HexHash
    """The batch's root, because batch ids are reused when a local chain starts over."""
    validator: AccountAddress
    """The validator that signed."""
    records: HexBytes
    """The packed records."""
    signature: HexSignature
    """EIP-712 `Outcomes`."""


class StoredDouble(_Stored):
    """Second signatures by someone who may sign only once."""

    offence: str
    """Name of the offence in the contracts: two submissions, or two outcomes."""
    owner: AccountAddress
    """The worker or the validator."""
    tag: int
    """The slot as `step << 32 | index`, or the batch."""
    signed: dict[str, Any]
    """Both outcomes, or the second submission, with signatures, in JSON form."""


M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class CompleteUpload:
    """An upload that is complete on disk but not kept yet."""

    path: Path
    """The temporary file."""
    file_hash: Hash32
    """SHA-256 of its content."""
    size_bytes: int


class _Arriving:
    """An upload in progress. Its methods block on the disk, so they run in threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digest = hashlib.sha256()
        self._file: IO[bytes] | None = None
        self.size_bytes = 0

    def write(self, data: bytes | bytearray) -> None:
        """Append bytes."""
        if self._file is None:
            self._file = NamedTemporaryFile(dir=self._folder, suffix=TEMPORARY, delete=False)  # noqa: SIM115
        self._digest.update(data)
        self._file.write(data)
        self.size_bytes += len(data)

    def finish(self, data: bytes | bytearray) -> CompleteUpload:
        """Write the last bytes, and return the file once it is on disk."""
        self.write(data)
        assert self._file is not None
        with self._file as file:
            sync(file)
        return CompleteUpload(Path(file.name), Hash32(self._digest.digest()), self.size_bytes)

    def discard(self) -> None:
        """Remove the incomplete file."""
        if self._file is not None:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)


class FileStore:
    """Kept files, addressed by meaning instead of by name."""

    def __init__(self, folder: Path, blobs: Blobs | None = None) -> None:
        """Keep files in `blobs` if given; the folder then holds only uploads in progress."""
        self._folder = folder
        self._blobs = blobs or LocalBlobs(folder)

    def open(self) -> None:
        """Create the folder and remove the leftovers of interrupted uploads."""
        try:
            kinds = (_BATCHES, _OUTCOMES, _DOUBLES)
            for folder in (self._folder, *(self._folder / kind for kind in kinds)):
                folder.mkdir(parents=True, exist_ok=True)
                for leftover in folder.glob(f"*{TEMPORARY}"):
                    _unlink_old(leftover)
        except OSError as error:
            raise storage_error_of(
                error,
                f"the files folder {self._folder} is unusable: {error.strerror}",
                hint="choose a folder that this user may write to with --files",
            ) from error

    async def find(self, file_hash: Hash32) -> Path | str | None:
        """Return a path, or a temporary URL, at which readers get a kept file."""
        return await self._blobs.find(_parquet(file_hash))

    @asynccontextmanager
    async def on_disk(self, file_hash: Hash32) -> AsyncIterator[Path | None]:
        """Yield the path of a kept file, or of a temporary copy if it is in a bucket."""
        place = await self.find(file_hash)
        if not isinstance(place, str):
            yield place
            return
        with NamedTemporaryFile(dir=self._folder, suffix=TEMPORARY) as file:
            await self._blobs.fetch(_parquet(file_hash), Path(file.name))
            yield Path(file.name)

    async def receive(self, stream: AsyncIterator[bytes], *, max_bytes: int) -> CompleteUpload:
        """Write a stream to a temporary file; refuses more than `max_bytes` while streaming."""
        arriving, waiting = _Arriving(self._folder), bytearray()
        try:
            with reporting_disk():
                async for part in stream:
                    if arriving.size_bytes + len(waiting) + len(part) > max_bytes:
                        raise refuse("body_too_large", f"the file exceeds {max_bytes} bytes")
                    waiting += part
                    if len(waiting) >= _FLUSH_BYTES:
                        await asyncio.to_thread(arriving.write, waiting)
                        waiting = bytearray()
                return await asyncio.to_thread(arriving.finish, waiting)
        except BaseException:
            arriving.discard()
            raise

    def discard(self, received: CompleteUpload) -> None:
        """Remove an upload that is not kept."""
        received.path.unlink(missing_ok=True)

    async def keep(self, uploads: Sequence[tuple[CompleteUpload, StoredSubmission]]) -> None:
        """Keep uploads with their submissions; an upload counts once its sidecar is written."""
        with reporting_disk():
            # In parallel, so that they share the wait for the disk.
            await asyncio.gather(*(self._keep(*upload) for upload in uploads))

    async def _keep(self, received: CompleteUpload, stored: StoredSubmission) -> None:
        name, sidecar = _parquet(received.file_hash), f"{received.file_hash.hex()}.json"
        await self._blobs.take(name, received.path, sidecar, stored.model_dump_json().encode())

    async def drop(self, file_hash: Hash32) -> None:
        """Delete a file that nobody needs any more; its submission is kept."""
        with reporting_disk():
            await self._blobs.delete(_parquet(file_hash))

    async def keep_batch(self, stored: StoredBatch) -> None:
        """Keep a batch's composition."""
        await self._put(f"{_BATCHES}/{stored.root.hex()}.json", stored)

    async def keep_outcomes(self, stored: StoredOutcomes) -> None:
        """Keep a validator's outcomes."""
        await self._put(f"{_OUTCOMES}/{stored.batch_id}-{stored.validator}.json", stored)

    async def keep_double(self, stored: StoredDouble) -> None:
        """Keep a second signature."""
        await self._put(f"{_DOUBLES}/{stored.offence}-{stored.owner}-{stored.tag}.json", stored)

    async def keep_metrics(self, step: int, figures: dict[str, float | str]) -> None:
        """Append the figures of one step."""
        with reporting_disk():
            await self._blobs.append(_METRICS, json.dumps({"step": step, "figures": figures}))

    def submissions(self) -> Iterator[StoredSubmission]:
        """Yield every kept submission, in order of upload."""
        found = self._parse_all(StoredSubmission, "")
        yield from sorted(found, key=lambda stored: stored.sequence)

    def batches(self) -> Iterator[StoredBatch]:
        """Yield every kept composition."""
        return self._parse_all(StoredBatch, _BATCHES)

    def outcomes(self) -> Iterator[StoredOutcomes]:
        """Yield every kept set of outcomes."""
        return self._parse_all(StoredOutcomes, _OUTCOMES)

    def doubles(self) -> Iterator[StoredDouble]:
        """Yield all second signatures."""
        return self._parse_all(StoredDouble, _DOUBLES)

    def metrics(self) -> Iterator[tuple[int, dict[str, float | str]]]:
        """Yield the trainer's figures in the order reported, without incomplete lines."""
        for line in self._blobs.lines(_METRICS):
            try:
                entry: dict[str, Any] = json.loads(line)
                yield int(entry["step"]), dict(entry["figures"])
            except (ValueError, KeyError, TypeError):
                continue

    async def _put(self, name: str, model: BaseModel) -> None:
        with reporting_disk():
            await self._blobs.put({name: model.model_dump_json().encode()})

    def _parse_all(self, kind: type[M], folder: str) -> Iterator[M]:
        for name, data in self._blobs.read_folder(folder):
            try:
                yield kind.model_validate_json(data)
            except ValidationError as error:
                problem = error.errors()[0]["msg"]
                logger.warning("corrupt file ignored", extra={"path": name, "problem": problem})


def _parquet(file_hash: Hash32) -> str:
    return f"{file_hash.hex()}.parquet"


def _unlink_old(leftover: Path) -> None:
    # A recent one may be an upload in progress at another replica, which may also end it now.
    with suppress(FileNotFoundError):
        if leftover.stat().st_mtime < time.time() - LEFTOVER_S:
            leftover.unlink()


class reporting_disk:
    """Turns a disk error into a refusal; the peer may retry once there is space."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _type: object, error: BaseException | None, _tb: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            logger.error("cannot write files", extra={"error": str(error)})
            raise refuse("storage_failed", CANNOT_WRITE) from error
