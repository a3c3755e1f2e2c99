"""Cutting a version's files into chunks: copies, hashes and names them, a few at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from blake3 import blake3

from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.chunks import ChunkFolder, storage_error, temporary_name, write_all
from muster.shardcast.digests import BLOCK_BYTES, file_digest, joined_digest
from muster.shardcast.manifest import MAX_TOTAL_BYTES, Manifest, ManifestFile, require_file_name

COPIERS = 3
"""Chunks copied at the same time: while one is flushed to the disk, others are hashed."""


def split_files(
    files: Mapping[str, Path],
    chunks: ChunkFolder,
    *,
    run_id: RunId,
    version: PolicyVersion,
    stream_from: int,
    stream_to: int,
    chunk_bytes: int,
) -> Manifest:
    """Return the manifest of the files, with every chunk of them stored and on the disk.

    Raises EncodingError for names or sizes the format refuses, StorageError when reading or
    writing fails.
    """
    entries: list[ManifestFile] = []
    digests: dict[str, Hash32] = {}
    with ThreadPoolExecutor(COPIERS, thread_name_prefix="split") as copiers:
        for name in sorted(require_file_name(name) for name in files):
            try:
                entry, digests[name] = _split_file(name, files[name], chunks, chunk_bytes, copiers)
            except OSError as error:
                if isinstance(error, StorageError):
                    raise
                raise storage_error(error, f"copy {name} into the store") from error
            entries.append(entry)
    return Manifest(
        run_id=run_id,
        version=version,
        files=tuple(entries),
        state_hash=joined_digest(digests),
        stream_from=stream_from,
        stream_to=stream_to,
        chunk_bytes=chunk_bytes,
    )


def _split_file(
    name: str, path: Path, chunks: ChunkFolder, chunk_bytes: int, copiers: ThreadPoolExecutor
) -> tuple[ManifestFile, Hash32]:
    size = min(path.stat().st_size, MAX_TOTAL_BYTES + 1)
    copy = partial(_copy_chunk, path, chunks)
    offsets = range(0, size, chunk_bytes)
    sizes = [min(chunk_bytes, size - offset) for offset in offsets]
    copies = copiers.map(copy, offsets, sizes)
    whole = file_digest(path)
    return ManifestFile(name, size, tuple(copies)), whole


def _copy_chunk(path: Path, chunks: ChunkFolder, offset: int, size: int) -> Hash32:
    """Store one chunk of a file, flushed to the disk, and return its digest."""
    hasher = blake3()
    temporary = chunks.path / temporary_name()
    block = memoryview(bytearray(min(BLOCK_BYTES, size)))
    try:
        with path.open("rb", buffering=0) as source, temporary.open("xb", buffering=0) as target:
            source.seek(offset)
            left = size
            while left:
                count = source.readinto(block[:left])
                if not count:
                    raise StorageError(f"{path.name} became shorter while it was published")
                hasher.update(block[:count])
                write_all(target.fileno(), [block[:count]])
                left -= count
            os.fsync(target.fileno())
        digest = Hash32(hasher.digest())
        chunks.adopt(temporary, digest)
        return digest
    finally:
        temporary.unlink(missing_ok=True)
