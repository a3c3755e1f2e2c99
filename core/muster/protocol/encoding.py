"""Hashing and canonical encodings shared by every component and by the contracts."""

import hashlib
import importlib
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import rfc8785

from muster.protocol.compiled import keccak256
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, Hash32


def _tame_py_ecc() -> None:
    """Import py_ecc, which eth-account needs, and undo its change to the interpreter.

    On import it raises the recursion limit to 100,000. Under that, deeply nested JSON from a
    stranger overflows the C stack and kills the process instead of raising RecursionError.
    Later imports of it have no such effect.
    """
    importlib.import_module("py_ecc")
    if sys.getrecursionlimit() >= 100_000:
        sys.setrecursionlimit(1_000)


_tame_py_ecc()


def keccak(data: bytes) -> Hash32:
    """Return the Keccak-256 digest of `data`, as the EVM computes it."""
    return Hash32(keccak256(data))


def file_hash(data: bytes) -> Hash32:
    """Return the SHA-256 of a submission file: what `sha256sum` prints."""
    return Hash32(hashlib.sha256(data).digest())


def abi_words(*values: int | bytes) -> bytes:
    """Return `abi.encode` of static values, 32 bytes each.

    Integers are uint256; 20-byte strings are addresses (left-padded); 32-byte strings are bytes32.
    Raises EncodingError on a negative or too large integer and on any other length.
    """
    return b"".join(_word(value) for value in values)


def _word(value: int | bytes) -> bytes:
    if isinstance(value, int):
        if not 0 <= value < 1 << 256:
            raise EncodingError(f"does not fit uint256: {value}")
        return value.to_bytes(32, "big")
    if len(value) not in (20, 32):
        raise EncodingError(f"expected 20 or 32 bytes, got {len(value)}")
    return value.rjust(32, b"\0")


def address_bytes(address: Address) -> bytes:
    """Return the 20 bytes of an account address."""
    return bytes.fromhex(address[2:])


_MAX_EXACT_INT = 1 << 53
"""Integers in JSON are exact below this."""
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":")
)
_BEYOND_BMP = re.compile("[\U00010000-\U0010ffff]")


def canonical_json(value: Any) -> bytes:
    """Return the RFC 8785 (JCS) encoding of a JSON value: one value, one byte string.

    Raises EncodingError for what JSON cannot hold: NaN, infinities, integers beyond 2^53, keys that
    are not strings.
    """
    try:
        plain = _plain_json(value)
        return rfc8785.dumps(value) if plain is None else plain
    except (rfc8785.CanonicalizationError, RecursionError, UnicodeEncodeError) as error:
        raise EncodingError(f"cannot be canonical JSON: {error}") from error


def _plain_json(value: Any) -> bytes | None:
    """Return the encoding of Python's own encoder; None where that may not be canonical.

    It is five times as fast. JCS writes floats differently, and sorts names by UTF-16.
    """
    if not _is_plain(value):
        return None
    text = _ENCODER.encode(value)
    if not text.isascii() and _BEYOND_BMP.search(text):
        return None
    try:
        return text.encode()
    except UnicodeEncodeError:
        return None


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return bool(-_MAX_EXACT_INT < value < _MAX_EXACT_INT)
    if kind is dict:
        if any(type(name) is not str for name in value):
            return False
        value = value.values()
    return (kind is dict or kind is list) and all(map(_is_plain, value))


def parse_canonical_json(data: bytes, *, max_bytes: int) -> Any:
    """Return the value of canonical JSON bytes; refuses oversized and non-canonical input."""
    if len(data) > max_bytes:
        raise EncodingError(f"document of {len(data)} bytes exceeds the limit of {max_bytes}")
    try:
        value = json.loads(data, parse_int=_json_number)
    except (ValueError, RecursionError) as error:
        raise EncodingError(f"not JSON: {error}") from error
    if canonical_json(value) != data:
        raise EncodingError("JSON is not in canonical form (RFC 8785)")
    return value


def _json_number(text: str) -> int | float:
    # JCS writes large floats without exponent or point; integers in JSON are exact only below 2^53.
    number = int(text)
    return number if abs(number) < _MAX_EXACT_INT else float(text)


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def message_fault(value: Any) -> str | None:
    """Return why a JSON value is unfit for a message; None if it is fit.

    Messages are stored, logged and shown. So no database, terminal or JSON parser may meet a
    control character, a lone surrogate, an integer beyond 64 bits, NaN or infinity.
    """
    if isinstance(value, str):
        return "holds a control character or a lone surrogate" if _CONTROL.search(value) else None
    if isinstance(value, int):
        return None if -(1 << 63) <= value < 1 << 63 else "does not fit 64 bits"
    if isinstance(value, float):
        return None if math.isfinite(value) else "is no finite number"
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = chain.from_iterable(value.items())
    elif isinstance(value, (list, tuple)):
        parts = value
    return next(filter(None, map(message_fault, parts)), None)


def require_uint(name: str, value: int, bits: int) -> int:
    """Return `value` if it fits an unsigned integer of `bits` bits; else raises EncodingError."""
    if not 0 <= value < 1 << bits:
        raise EncodingError(f"{name} does not fit uint{bits}: {value}")
    return value


def hex0x(data: bytes) -> str:
    """Return `0x` followed by lower-case hexadecimal."""
    return "0x" + data.hex()
