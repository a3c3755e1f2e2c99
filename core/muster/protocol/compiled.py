"""Loads libraries that `tools/build_kernel.py` compiled, if they match their C sources.

Without a library its users fall back to Python. Keccak-256 is here because everything hashes:
compiled it is ten times as fast as the portable library. SHAKE-256 is here because Python's own
keeps other threads waiting while it computes.
"""

import ctypes
import hashlib
import logging
import sys
from functools import cache
from pathlib import Path

from eth_hash.auto import keccak as _portable

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "native"
"""The sources of Keccak-256, and their compiled library."""
_Digest = ctypes.c_char * 32


def load_library(
    path: Path, source_symbol: str, *, what: str, level: int = logging.WARNING
) -> ctypes.CDLL | None:
    """Return a library; None if it was not compiled, or not from the sources now beside it.

    `source_symbol` holds the digest of the sources that it was compiled from. `what` names the
    purpose in the message that is logged at `level` without a library.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        logger.log(level, "%s are computed in Python, slowly: no compiled kernel (%s)", what, error)
        return None
    if source_of(library, source_symbol) != source_digest(path.parent):
        logger.log(level, "%s are computed in Python, slowly: %s is stale, reinstall", what, path)
        return None
    return library


def source_of(library: ctypes.CDLL, source_symbol: str) -> str:
    """Return the digest of the C sources that a library was compiled from."""
    text = ctypes.c_char.in_dll(library, source_symbol)
    return ctypes.string_at(ctypes.addressof(text)).decode()


def source_digest(folder: Path) -> str:
    """Return the digest of the C sources in `folder`, as the build hook computes it."""
    sources = sorted(folder.glob("*.[ch]"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()


@cache
def load_keccak(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Return the kernel in a folder; None if it was not compiled from the sources there."""
    # No warning: every command hashes, and the portable library is fast enough for most.
    library = load_library(
        folder / "keccak.so", "muster_keccak_source", what="Keccak hashes", level=logging.INFO
    )
    if library is None or sys.byteorder != "little":
        return None
    address, size = ctypes.c_void_p, ctypes.c_int64
    whole, stream = library.muster_keccak256, library.muster_shake256
    leaves, parents = library.muster_lines_leaves, library.muster_lines_parents
    whole.argtypes = [ctypes.c_char_p, size, _Digest]
    stream.argtypes = [ctypes.c_char_p, size, address, size]
    leaves.argtypes = [ctypes.c_char_p, size, ctypes.c_uint64, size, address, address, size]
    leaves.restype = size
    parents.argtypes = [address, size, address]
    whole.restype = stream.restype = parents.restype = None
    return library


def keccak256(data: bytes) -> bytes:
    """Return the 32 bytes of the digest."""
    kernel = load_keccak()
    if kernel is None:
        return _portable(data)
    digest = _Digest()
    kernel.muster_keccak256(data, len(data), digest)
    return digest.raw


def shake256(data: bytes, size: int) -> bytes:
    """Return the first bytes of SHAKE-256's output (FIPS 202). Releases the GIL."""
    kernel = load_keccak()
    if kernel is None:
        return hashlib.shake_256(data).digest(size)
    stream = ctypes.create_string_buffer(size)
    kernel.muster_shake256(data, len(data), stream, size)
    return stream.raw
