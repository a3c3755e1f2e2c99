"""The Merkle tree over a document's lines, whose root a run pins.

The leaf of line i is `keccak(keccak(line) ‖ uint64(i))`, so that a root fixes the order of lines,
which sorted pairs alone would not. Parents are those of `muster.protocol.merkle`, so that
OpenZeppelin's `MerkleProof` accepts a path. Without the compiled Keccak-256 the tree is computed in
Python, ten times as slow.

numpy is imported only by functions that compute: it would be a third of the imports of a process
that only grades.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from muster.protocol.compiled import load_keccak
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Hash32
from muster.protocol.merkle import hash_pair

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

HASH_BYTES = 32

Leaves: TypeAlias = "npt.NDArray[np.uint8]"
"""Nodes of a level, (count, 32)."""
Ends: TypeAlias = "npt.NDArray[np.uint64]"
"""Ends of lines in their bytes, without the line breaks, (count,)."""

_TOO_LONG = -1


def leaf_of(line: bytes, position: int) -> Hash32:
    """Return the leaf of one line, without its line break."""
    return keccak(keccak(line) + position.to_bytes(8, "big"))


def hash_lines(data: bytes, first: int, *, max_line_bytes: int) -> tuple[Leaves, Ends]:
    """Return leaf and end of every line in `data` that a line break ends; `first` numbers them.

    Raises EncodingError for a line above `max_line_bytes`, ended or not. Releases the GIL.
    """
    import numpy as np

    kernel = load_keccak()
    if kernel is None:
        return _hash_lines(data, first, max_line_bytes)
    room = data.count(b"\n")
    leaves, ends = np.empty((room, HASH_BYTES), np.uint8), np.empty(room, np.uint64)
    count = kernel.muster_lines_leaves(
        data, len(data), first, max_line_bytes, leaves.ctypes.data, ends.ctypes.data, room
    )
    if count == _TOO_LONG:
        raise _too_long(max_line_bytes)
    assert count == room
    return leaves, ends


def _hash_lines(data: bytes, first: int, max_line_bytes: int) -> tuple[Leaves, Ends]:
    import numpy as np

    *lines, rest = data.split(b"\n")
    if max(map(len, (*lines, rest))) > max_line_bytes:
        raise _too_long(max_line_bytes)
    ends = np.cumsum([len(line) + 1 for line in lines], dtype=np.uint64) - np.uint64(1)
    return as_leaves(leaf_of(line, first + i) for i, line in enumerate(lines)), ends


def _too_long(limit: int) -> EncodingError:
    return EncodingError(f"a line exceeds {limit} bytes")


def as_leaves(hashes: Iterable[bytes]) -> Leaves:
    """Return hashes as the rows of an array."""
    import numpy as np

    return np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, HASH_BYTES)


def root_of(leaves: Leaves) -> Hash32:
    """Return the root; raises EncodingError when there are no leaves."""
    if not len(leaves):
        raise EncodingError("a Merkle tree needs at least one leaf")
    while len(leaves) > 1:
        leaves = _parents(leaves)
    return Hash32(leaves[0].tobytes())


def path_of(leaves: Leaves, position: int) -> list[Hash32]:
    """Return the siblings from the leaf at `position` up to the root."""
    if not 0 <= position < len(leaves):
        raise EncodingError(f"no leaf {position} among {len(leaves)}")
    path: list[Hash32] = []
    while len(leaves) > 1:
        sibling = position ^ 1
        if sibling < len(leaves):
            path.append(Hash32(leaves[sibling].tobytes()))
        leaves, position = _parents(leaves), position // 2
    return path


def _parents(level: Leaves) -> Leaves:
    import numpy as np

    kernel, count = load_keccak(), len(level)
    if kernel is None:
        nodes = [row.tobytes() for row in level]
        pairs = [hash_pair(a, b) for a, b in zip(nodes[::2], nodes[1::2], strict=False)]
        return as_leaves([*pairs, *nodes[len(pairs) * 2 :]])
    level, above = np.ascontiguousarray(level), np.empty(((count + 1) // 2, HASH_BYTES), np.uint8)
    kernel.muster_lines_parents(level.ctypes.data, count, above.ctypes.data)
    return above
