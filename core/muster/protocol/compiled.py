"""Libraries that `tools/build_kernel.py` compiled from C sources, used only if made from those.

Knows no library's functions; its users fall back to Python when there is none.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def load_library(
    path: Path, source_symbol: str, *, what: str, level: int = logging.WARNING
) -> ctypes.CDLL | None:
    """Return a library, or None: not compiled, or not from the sources that lie beside it now.

    `source_symbol` is where the library says what it was compiled from; `what` is computed without
    it, in the words of the message, which is logged at `level`.
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
    """Return what identifies the C sources in `folder`, as the build hook computes it."""
    sources = sorted(folder.glob("*.[ch]"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
