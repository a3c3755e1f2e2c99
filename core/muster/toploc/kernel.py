"""The compiled backend: finds the library, calls it, and names its errors.

`tools/build_kernel.py` compiles native/*.c when the package is installed. Calls release the GIL.
Knows no algorithm.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from muster.protocol.compiled import load_library, source_of
from muster.protocol.errors import ProofError
from muster.toploc.chunks import ChunkResult, Chunks

FOLDER = Path(__file__).parent / "native"
SOURCE_SYMBOL = "muster_toploc_source"
"""Where the library says which sources it was compiled from."""

_OK = 0
_NO_MEMORY = 2
_FAILURES = {
    1: ("hidden", "hidden states hold NaN or infinity"),
    3: ("hidden", "no modulus keeps the chosen indices distinct"),
    4: ("modulus", "a modulus is outside what its chunk allows"),
    5: ("coefficient", "a coefficient is not below 65497"),
}


class Kernel:
    """Backend of `muster.toploc.proofs` in C; raises OSError when the library does not load."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self._build = self._library.muster_toploc_build
        self._build.argtypes = [address, address, size, size, address]
        self._verify = self._library.muster_toploc_verify
        self._verify.argtypes = [address, address, size, size, address, address]

    @property
    def source(self) -> str:
        """Digest of the C sources that the library was compiled from."""
        return source_of(self._library, SOURCE_SYMBOL)

    def build(self, chunks: Chunks) -> list[bytes]:
        """Return every chunk's proof; raises ProofError."""
        sizes = chunks.proof_sizes
        room = ctypes.create_string_buffer(sum(sizes))
        self._call(self._build, chunks, ctypes.addressof(room))
        joined, proofs, start = room.raw, [], 0
        for size in sizes:
            proofs.append(joined[start : start + size])
            start += size
        return proofs

    def verify(self, chunks: Chunks, proofs: list[bytes]) -> list[ChunkResult]:
        """Return how far chunks are from their proofs, whose lengths are right."""
        figures = np.empty((len(proofs), 5), np.float64)
        self._call(self._verify, chunks, b"".join(proofs), figures.ctypes.data)
        return [
            ChunkResult(int(exponents), mean, median, int(signs), points, int(decoys))
            for (exponents, mean, median, signs, decoys), points in zip(
                figures.tolist(), chunks.compared.tolist(), strict=True
            )
        ]

    def _call(self, function: ctypes._NamedFuncPointer, chunks: Chunks, *rest: object) -> None:
        addresses, sizes = chunks.addresses, chunks.sizes
        status = function(
            addresses.ctypes.data, sizes.ctypes.data, len(sizes), int(chunks.points.max()), *rest
        )
        if status == _NO_MEMORY:
            raise MemoryError(f"no memory to prove chunks of {sizes.max()} elements")
        if status != _OK:
            reason, message = _FAILURES[status]
            raise ProofError(message, reason=reason)


def load(folder: Path = FOLDER) -> Kernel | None:
    """Return the kernel in a folder, or None: not compiled, or not from the sources there."""
    path = folder / "proofs.so"
    return Kernel(path) if load_library(path, SOURCE_SYMBOL, what="proofs") else None
