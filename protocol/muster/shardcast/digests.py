"""BLAKE3 of files, read through one small buffer so that memory does not grow with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from muster.protocol.ids import Hash32

BLOCK_BYTES = 1 << 20
"""Bytes held in memory at a time while a file is hashed or copied."""


def digest_of(data: bytes) -> Hash32:
    """Return the BLAKE3 of bytes in memory."""
    return Hash32(blake3(data).digest())


def file_digest(path: Path) -> Hash32:
    """Return the BLAKE3 of a file."""
    hasher = blake3()
    block = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
    return Hash32(hasher.digest())


def joined_digest(digests: Mapping[str, Hash32]) -> Hash32:
    """Return the state hash of files whose BLAKE3 digests are known, by name."""
    return digest_of(b"".join(digests[name] for name in sorted(digests)))


def state_hash(files: Mapping[str, Path]) -> Hash32:
    """Return the BLAKE3 of the files' BLAKE3 digests joined in the order of their names."""
    return joined_digest({name: file_digest(path) for name, path in files.items()})
