"""Cutting a version's files into chunks: one pass that copies, hashes and names them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast.chunks import ChunkFolder, storage_error, temporary_name, write_all
from muster.shardcast.digests import BLOCK_BYTES, joined_digest
from muster.shardcast.manifest import Manifest, ManifestFile, require_file_name


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
    """Return the manifest of the files, with every chunk of them stored in the folder.

    Raises EncodingError for names or sizes the format refuses, StorageError when reading or
    writing fails.
    """
    entries: list[ManifestFile] = []
    digests: dict[str, Hash32] = {}
    for name in sorted(require_file_name(name) for name in files):
        try:
            with files[name].open("rb", buffering=0) as source:
                entry, digests[name] = _split_file(name, source, chunks, chunk_bytes)
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
    name: str, source: BinaryIO, chunks: ChunkFolder, chunk_bytes: int
) -> tuple[ManifestFile, Hash32]:
    whole = blake3()
    digests: list[Hash32] = []
    size = 0
    while True:
        digest, copied = _copy_chunk(source, chunks, chunk_bytes, whole)
        if not copied:
            break
        digests.append(digest)
        size += copied
    return ManifestFile(name, size, tuple(digests)), Hash32(whole.digest())


def _copy_chunk(
    source: BinaryIO, chunks: ChunkFolder, chunk_bytes: int, whole: blake3
) -> tuple[Hash32, int]:
    """Store the next chunk of a file; returns its digest and size, size 0 at the end."""
    hasher = blake3()
    temporary = chunks.path / temporary_name()
    block = memoryview(bytearray(min(BLOCK_BYTES, chunk_bytes)))
    copied = 0
    try:
        with temporary.open("xb", buffering=0) as target:
            while copied < chunk_bytes:
                count = source.readinto(block[: chunk_bytes - copied])  # type: ignore[attr-defined]
                if not count:
                    break
                for sink in (hasher, whole):
                    sink.update(block[:count])
                write_all(target.fileno(), [block[:count]])
                copied += count
        digest = Hash32(hasher.digest())
        if copied:
            chunks.adopt(temporary, digest)
        return digest, copied
    finally:
        temporary.unlink(missing_ok=True)
