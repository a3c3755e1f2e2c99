"""Decodes ABI-encoded values, several times faster than a general codec.

A type is compiled once into nested readers. Addresses come out checksummed, `bytesN` and `bytes` as
bytes, arrays and structs as tuples. Anything that does not decode raises EncodingError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, to_address

Decoder = Callable[[bytes], tuple[Any, ...]]
"""Turns ABI-encoded bytes into a tuple of values."""

_Reader = Callable[[bytes, int], Any]
"""Reads one value: (data, where it starts)."""

WORD = 32
MAX_ELEMENTS = 1 << 20
"""Elements above this in one array are refused: a guard against hostile lengths."""


@cache
def compile_decoder(types: tuple[str, ...]) -> Decoder:
    """Return what decodes a sequence of values of these canonical ABI types."""
    read = _sequence_reader(types)

    def decode(data: bytes) -> tuple[Any, ...]:
        values: tuple[Any, ...] = read(data, 0)
        return values

    return decode


def split_types(inner: str) -> tuple[str, ...]:
    """Return the comma-separated types at the top level of a tuple's inside."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(inner):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append(inner[start:i])
            start = i + 1
    return (*parts, inner[start:]) if inner else ()


def _is_dynamic(kind: str) -> bool:
    if kind.endswith("[]") or kind in ("bytes", "string"):
        return True
    return kind.startswith("(") and any(_is_dynamic(part) for part in split_types(kind[1:-1]))


def _head_size(kind: str) -> int:
    if kind.startswith("(") and not _is_dynamic(kind):
        return sum(_head_size(part) for part in split_types(kind[1:-1]))
    return WORD


def _reader(kind: str) -> _Reader:
    if kind.endswith("[]"):
        return _array_reader(kind[:-2])
    if kind.startswith("("):
        return _sequence_reader(split_types(kind[1:-1]))
    if kind.startswith("uint"):
        return _uint_reader(int(kind[4:]))
    if kind == "address":
        return lambda data, at: _address(_word(data, at))
    if kind == "bool":
        return lambda data, at: _bool(_word(data, at))
    if kind in ("bytes", "string"):
        return _read_bytes if kind == "bytes" else _read_string
    if kind.startswith("bytes"):
        size = int(kind[5:])
        return lambda data, at: _word(data, at)[:size]
    raise EncodingError(f"no decoder for the ABI type {kind}")


def _sequence_reader(types: Sequence[str]) -> _Reader:
    """Return the reader of a struct or argument list; offsets count from its start."""
    plan, at = [], 0
    for kind in types:
        plan.append((at, _is_dynamic(kind), _reader(kind)))
        at += _head_size(kind)

    def read(data: bytes, start: int) -> tuple[Any, ...]:
        return tuple(
            [
                reader(data, start + (_length(data, start + head) if is_dynamic else head))
                for head, is_dynamic, reader in plan
            ]
        )

    return read


def _array_reader(kind: str) -> _Reader:
    reader, is_dynamic, size = _reader(kind), _is_dynamic(kind), _head_size(kind)

    def read(data: bytes, start: int) -> tuple[Any, ...]:
        count, first = _length(data, start), start + WORD
        if count > MAX_ELEMENTS or count * size > len(data):
            raise EncodingError(f"an array of {count} elements in {len(data)} bytes")
        heads = range(first, first + count * size, size)
        if is_dynamic:
            return tuple(reader(data, first + _length(data, head)) for head in heads)
        return tuple(reader(data, head) for head in heads)

    return read


def _uint_reader(bits: int) -> _Reader:
    limit = 1 << bits

    def read(data: bytes, at: int) -> int:
        value = int.from_bytes(_word(data, at), "big")
        if value >= limit:
            raise EncodingError(f"does not fit uint{bits}: {value}")
        return value

    return read


def _word(data: bytes, at: int) -> bytes:
    word = data[at : at + WORD]
    if len(word) != WORD:
        raise EncodingError(f"ABI data of {len(data)} bytes ends inside a value")
    return word


def _length(data: bytes, at: int) -> int:
    value = int.from_bytes(_word(data, at), "big")
    if value > len(data):
        raise EncodingError(f"an offset or length of {value} in {len(data)} bytes")
    return value


@lru_cache(maxsize=1 << 16)
def _address(word: bytes) -> Address:
    # Checksumming costs a hash; the same few accounts appear again and again.
    if any(word[:12]):
        raise EncodingError(f"not an address: 0x{word.hex()}")
    return to_address(word[12:])


def _bool(word: bytes) -> bool:
    value = int.from_bytes(word, "big")
    if value > 1:
        raise EncodingError(f"not a bool: {value}")
    return value == 1


def _read_bytes(data: bytes, start: int) -> bytes:
    size, first = _length(data, start), start + WORD
    value = data[first : first + size]
    if len(value) != size:
        raise EncodingError(f"ABI data of {len(data)} bytes ends inside a byte string")
    return value


def _read_string(data: bytes, start: int) -> str:
    return _read_bytes(data, start).decode(errors="replace")
