"""The block codec that deltas are made with: the compiled one where there is one, else numpy's.

Both give the same bytes. `tools/build_kernel.py` compiles native/delta.c when the package is
installed; calls release the GIL.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sys
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np

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

logger = logging.getLogger(__name__)

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
    library = load_library()
    return CompiledCodec(library) if library else NumpyCodec()


@cache
def load_library(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Return the kernel in a folder, or None: not compiled, or not from the sources there."""
    path = folder / "delta.so"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        logger.warning("deltas are computed in numpy, slowly: no compiled kernel (%s)", error)
        return None
    digest = (ctypes.c_char * 65).in_dll(library, "muster_delta_source").value.decode()
    if digest != source_digest(folder) or sys.byteorder != "little":
        logger.warning("deltas are computed in numpy, slowly: %s is stale, reinstall", path)
        return None
    address, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    encode, decode = library.muster_delta_encode, library.muster_delta_decode
    encode.argtypes = [address, address, size, number, number, address, size, address]
    encode.restype = size
    decode.argtypes = [address, size, number, number, address, size, address, address]
    decode.restype = number
    return library


def source_digest(folder: Path) -> str:
    """Return what identifies the C sources in `folder`, as the build hook computes it."""
    sources = sorted(folder.glob("*.[ch]"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
