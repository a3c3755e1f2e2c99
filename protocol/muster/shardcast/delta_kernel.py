"""The block codec that deltas are made with: the compiled one where there is one, else numpy's.

Both give the same bytes. `tools/build_kernel.py` compiles native/delta.c when the package is
installed; calls release the GIL.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

from muster.protocol.compiled import load_library
from muster.shardcast.delta_block import (
    BLOCK_FLOATS,
    CODED,
    RAW,
    SAME,
    FloatFormat,
    Patterns,
    decode_block,
    encode_block,
    malformed,
)

FOLDER = Path(__file__).parent / "native"

_FAILURES = {
    1: "it is cut off",
    2: "a number of its table is out of range",
    3: "a gap leads outside of its class",
    4: "it is longer than its table says",
}


class BlockCodec(Protocol):
    """Encodes and decodes blocks, one at a time; see `muster.shardcast.delta_block`."""

    def encode(self, base: Patterns, fresh: Patterns, kind: FloatFormat) -> bytes:
        """Return the delta that turns `base` into `fresh`."""

    def decode(self, base: Patterns, delta: bytes, kind: FloatFormat) -> Patterns:
        """Return the patterns that a delta makes of `base`; raises DeltaError ("block")."""


class NumpyCodec:
    """The reference."""

    def encode(self, base: Patterns, fresh: Patterns, kind: FloatFormat) -> bytes:
        """Return the delta that turns `base` into `fresh`."""
        return encode_block(base, fresh, kind)

    def decode(self, base: Patterns, delta: bytes, kind: FloatFormat) -> Patterns:
        """Return the patterns that a delta makes of `base`; raises DeltaError ("block")."""
        return decode_block(base, delta, kind)


class CompiledCodec:
    """The kernel, with 16 MiB of memory to work in. Not thread-safe."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._encode, self._decode = library.muster_delta_encode, library.muster_delta_decode
        self._scratch = np.empty(4 * BLOCK_FLOATS, np.uint32)
        self._room = np.empty(4 * BLOCK_FLOATS, np.uint8)

    def encode(self, base: Patterns, fresh: Patterns, kind: FloatFormat) -> bytes:
        """Return the delta that turns `base` into `fresh`."""
        size = self._encode(
            base.ctypes.data,
            fresh.ctypes.data,
            len(base),
            kind.width,
            kind.mantissa_bits,
            self._room.ctypes.data,
            fresh.nbytes,
            self._scratch.ctypes.data,
        )
        if size == 0:
            return bytes([SAME])
        if size < 0:
            return bytes([RAW]) + fresh.tobytes()
        return bytes([CODED]) + self._room[:size].tobytes()

    def decode(self, base: Patterns, delta: bytes, kind: FloatFormat) -> Patterns:
        """Return the patterns that a delta makes of `base`; raises DeltaError ("block")."""
        if delta[:1] != bytes([CODED]):
            return decode_block(base, delta, kind)
        body, made = np.frombuffer(delta, np.uint8), np.empty_like(base)
        fault = self._decode(
            base.ctypes.data,
            len(base),
            kind.width,
            kind.mantissa_bits,
            body.ctypes.data + 1,
            len(body) - 1,
            made.ctypes.data,
            self._scratch.ctypes.data,
        )
        if fault:
            raise malformed(_FAILURES[fault])
        return made


def make_codec() -> BlockCodec:
    """Return a codec for one thread."""
    library = load_kernel()
    return CompiledCodec(library) if library else NumpyCodec()


@cache
def load_kernel(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Return the kernel in a folder, or None: not compiled, or not from the sources there."""
    library = load_library(folder / "delta.so", "muster_delta_source", what="deltas")
    if library is None or sys.byteorder != "little":
        return None
    address, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    encode, decode = library.muster_delta_encode, library.muster_delta_decode
    encode.argtypes = [address, address, size, number, number, address, size, address]
    encode.restype = size
    decode.argtypes = [address, size, number, number, address, size, address, address]
    decode.restype = number
    return library
