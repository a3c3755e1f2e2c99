"""Accepted files on the trainer's own disk, until a saved step holds what they taught.

A step that is taken again after a crash reads the same files without asking for them again: the
orchestrator may be away, or have dropped them. Files are named by their hash, so whatever else is
found under the name is not used.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from muster.protocol.encoding import file_hash
from muster.protocol.ids import Hash32
from muster.trainer.ports import FileSource, Ledger

logger = logging.getLogger(__name__)


class FileBuffer:
    """A file source that remembers what it handed over."""

    def __init__(self, folder: Path, source: FileSource, ledger: Ledger) -> None:
        self._folder = folder
        self._source = source
        self._ledger = ledger
        folder.mkdir(parents=True, exist_ok=True)

    async def file(self, submission_file_hash: Hash32) -> bytes:
        """Return a submission's file, from the disk if it is there; raises ApiError."""
        path = self._folder / submission_file_hash.hex()
        kept = await asyncio.to_thread(_read, path, submission_file_hash)
        if kept is not None:
            return kept
        data = await self._source.file(submission_file_hash)
        if file_hash(data) == submission_file_hash:
            await asyncio.to_thread(_write, path, data)
        return data

    def forget_before(self, position: int) -> None:
        """Delete the files of records before a place in the training stream. Blocking."""
        names = {item.record.file_hash.hex() for item in self._ledger.stream()[position:]}
        for path in self._folder.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)


def _read(path: Path, digest: Hash32) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if file_hash(data) == digest else None


def _write(path: Path, data: bytes) -> None:
    """Write atomically; a disk that takes nothing costs a second download, no more."""
    fresh = path.with_name(f".{path.name}.part")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except OSError as error:
        logger.warning("cannot buffer a file", extra={"error": str(error)})
