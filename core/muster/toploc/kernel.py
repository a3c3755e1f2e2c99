"""The compiled backend: finds the library, calls it, and names its errors.

`tools/build_kernel.py` compiles native/*.c when the package is installed. Calls release the GIL.
Knows no algorithm.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from muster.protocol.compiled import load_library, source_of
from muster.protocol.errors import ProofError
from muster.toploc.chunks import Chosen, ChunkResult, Chunks

FOLDER = Path(__file__).parent / "native"
SOURCE_SYMBOL = "muster_toploc_source"
"""Symbol in which the library states the sources that it was compiled from."""

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
        self._build_chosen = self._library.muster_toploc_build_chosen
        self._build_chosen.argtypes = [address, size, size, size, address]
        self._verify_chosen = self._library.muster_toploc_verify_chosen
        self._verify_chosen.argtypes = [address, size, size, size, address, address]

    @property
    def source(self) -> str:
        """Digest of the C sources that the library was compiled from."""
        return source_of(self._library, SOURCE_SYMBOL)

    def build(self, chunks: Chunks) -> list[bytes]:
        """Return every chunk's proof; raises ProofError."""
        sizes = chunks.proof_sizes
        room = ctypes.create_string_buffer(sum(sizes))
        self._call_on(chunks, self._build, ctypes.addressof(room))
        joined, proofs, start = room.raw, [], 0
        for size in sizes:
            proofs.append(joined[start : start + size])
            start += size
        return proofs

    def verify(self, chunks: Chunks, proofs: Sequence[bytes]) -> list[ChunkResult]:
        """Return the distances of chunks from their proofs, which must have the right lengths."""
        figures = np.empty((len(proofs), 5), np.float64)
        self._call_on(chunks, self._verify, b"".join(proofs), figures.ctypes.data)
        return _results(figures, chunks.compared.tolist())

    def build_chosen(self, chosen: Chosen) -> list[bytes]:
        """Return the proofs of chunks; raises ProofError."""
        count, size = len(chosen.packed_BN), 2 + 2 * chosen.points
        room = ctypes.create_string_buffer(count * size)
        given = chosen.packed_BN.ctypes.data, count, chosen.elements, chosen.points
        self._call(self._build_chosen, *given, ctypes.addressof(room))
        joined = room.raw
        return [joined[start : start + size] for start in range(0, len(joined), size)]

    def verify_chosen(
        self, chosen: Chosen, proofs: Sequence[bytes], points: int
    ) -> list[ChunkResult]:
        """Return the distances of chunks from their proofs of `points` points, which must have the
        right lengths; raises ProofError.
        """
        figures = np.empty((len(proofs), 5), np.float64)
        given = chosen.packed_BN.ctypes.data, len(proofs), chosen.elements, points
        self._call(self._verify_chosen, *given, b"".join(proofs), figures.ctypes.data)
        return _results(figures, [chosen.points] * len(proofs))

    def _call_on(
        self, chunks: Chunks, function: ctypes._NamedFuncPointer, *results: object
    ) -> None:
        addresses, sizes = chunks.addresses, chunks.sizes
        given = addresses.ctypes.data, sizes.ctypes.data, len(sizes), int(chunks.points.max())
        self._call(function, *given, *results)

    def _call(self, function: ctypes._NamedFuncPointer, *given: object) -> None:
        status = function(*given)
        if status == _NO_MEMORY:
            raise MemoryError("no memory to prove hidden states")
        if status != _OK:
            reason, message = _FAILURES[status]
            raise ProofError(message, reason=reason)


def _results(figures_B5: npt.NDArray[np.float64], compared: Sequence[int]) -> list[ChunkResult]:
    return [
        ChunkResult(int(exponents), mean, median, int(signs), points, int(decoys))
        for (exponents, mean, median, signs, decoys), points in zip(
            figures_B5.tolist(), compared, strict=True
        )
    ]


def load(folder: Path = FOLDER) -> Kernel | None:
    """Return the kernel in a folder, or None: not compiled, or not from the sources there."""
    path = folder / "proofs.so"
    return Kernel(path) if load_library(path, SOURCE_SYMBOL, what="proofs") else None
