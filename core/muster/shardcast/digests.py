"""BLAKE3 of files, read through one small buffer so that memory does not grow with them.

A file's digest is the digest of its blocks' digests, joined. If a manifest's chunks have the size
of these blocks, it already holds the blocks' digests, so a fetcher that has verified the chunks
need not read the file again.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

from muster.lifecycle import usable_cores
from muster.protocol.ids import Hash32

STATE_BLOCK_BYTES = 8 << 20
"""Bytes of the blocks whose digests make up a file's digest; a file's last block may be shorter."""
BUFFER_BYTES = 512 << 10
"""Buffer for hashing a file, in bytes; it fits a core's own cache."""
HASHERS = min(4, usable_cores())
"""Blocks of a file that are hashed at the same time."""


def digest_of(data: bytes | memoryview) -> Hash32:
    """Return the BLAKE3 of bytes in memory."""
    return Hash32(blake3(data).digest())


def region_digest(fd: int, offset: int, size: int) -> Hash32:
    """Return the BLAKE3 of a part of an open file; if the file ends earlier, up to its end."""
    hasher = blake3()
    buffer = memoryview(bytearray(min(BUFFER_BYTES, size)))
    while size and (count := os.preadv(fd, [buffer[:size]], offset)):
        hasher.update(buffer[:count])
        offset, size = offset + count, size - count
    return Hash32(hasher.digest())


def block_digests(
    fd: int, size: int, block_bytes: int, hashers: ThreadPoolExecutor
) -> tuple[Hash32, ...]:
    """Return the BLAKE3 of each block of an open file's first `size` bytes."""
    starts = range(0, size, block_bytes)
    sizes = [min(block_bytes, size - start) for start in starts]
    return tuple(hashers.map(lambda start, size: region_digest(fd, start, size), starts, sizes))


def digest_of_blocks(blocks: Iterable[Hash32]) -> Hash32:
    """Return the digest of a file whose blocks have these BLAKE3 digests."""
    return digest_of(b"".join(blocks))


def file_digest(path: Path) -> Hash32:
    """Return the digest of a file: BLAKE3 of the joined BLAKE3 digests of its 8 MiB blocks."""
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(HASHERS) as hashers:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        return digest_of_blocks(block_digests(fd, size, STATE_BLOCK_BYTES, hashers))


def joined_digest(digests: Mapping[str, Hash32]) -> Hash32:
    """Return the state hash of files whose digests are known, by name."""
    return digest_of(b"".join(digests[name] for name in sorted(digests)))


def state_hash(files: Mapping[str, Path]) -> Hash32:
    """Return the BLAKE3 of the files' digests joined in the order of their names."""
    return joined_digest({name: file_digest(path) for name, path in files.items()})
