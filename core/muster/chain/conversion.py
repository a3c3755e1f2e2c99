"""Values between Python's types, the ABI's, and encoded bytes. Knows no contract.

`to_abi` and `from_abi` convert by Python types alone: dataclasses are structs, enums are numbers.
`compile_decoder` turns an ABI type once into nested readers, several times faster than a general
codec. It decodes addresses as checksummed strings, `bytesN` and `bytes` as bytes, arrays and
structs as tuples. Bytes that do not decode raise EncodingError.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import IntEnum, StrEnum
from functools import cache, lru_cache
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from eth_abi.grammar import ABIType, BasicType, TupleType, parse

from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, to_address
from muster.protocol.messages import Reason

T = TypeVar("T")
_Convert = Callable[[Any], Any]
_PLAIN = (int, str, bytes, bool)


class SolidityEnum(StrEnum):
    """An enum of the contracts: members in Solidity's order, values its names there."""

    @property
    def number(self) -> int:
        """The member's number in Solidity."""
        return list(type(self)).index(self)

    @classmethod
    def of(cls, number: int) -> Self:
        """Return the member with a number; raises EncodingError when there is none."""
        members = tuple(cls)
        if not 0 <= number < len(members):
            raise EncodingError(f"{cls.__name__} has no number {number}")
        return members[number]


def lenient_reason(value: int) -> Reason:
    """Return a reason by number; an unknown one gets the name UNKNOWN_n."""
    try:
        return Reason(value)
    except ValueError:
        unknown = int.__new__(Reason, value)
        unknown._name_, unknown._value_ = f"UNKNOWN_{value}", value
        return unknown


def to_abi(value: Any) -> Any:
    """Return a value as the ABI encodes it: a dataclass as the tuple of its fields."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, SolidityEnum):
        return value.number
    if isinstance(value, (tuple, list)):
        return tuple(map(to_abi, value))
    if is_dataclass(value):
        return tuple([to_abi(getattr(value, field.name)) for field in fields(value)])
    return value


def from_abi(kind: type[T], value: Any) -> T:
    """Return a decoded ABI value as this Python type; raises EncodingError if it does not fit."""
    hashable: Any = kind  # mypy does not know that type[T] is hashable
    convert = _converter(hashable)
    converted: T = value if convert is None else convert(value)
    return converted


@cache
def _converter(kind: Any) -> _Convert | None:
    """Return the function that converts to this type; None if decoded values already have it."""
    kind = getattr(kind, "__supertype__", kind)
    if kind in _PLAIN:
        return None
    if get_origin(kind) is tuple:
        return _tuple_converter(get_args(kind)[0])
    if is_dataclass(kind):
        return _struct_converter(kind)
    if kind is Reason:  # the ledger accepts any number
        return lenient_reason
    if issubclass(kind, SolidityEnum):
        return lambda value: kind.of(value)
    assert issubclass(kind, IntEnum), f"no conversion from the ABI to {kind}"
    return lambda value: _member(kind, value)


def _tuple_converter(element: Any) -> _Convert:
    convert = _converter(element)
    return tuple if convert is None else lambda values: tuple(map(convert, values))


def _struct_converter(kind: Any) -> _Convert:
    hints = get_type_hints(kind)
    parts = [_converter(hints[field.name]) for field in fields(kind)]

    def convert(values: Sequence[Any]) -> Any:
        if len(values) != len(parts):
            raise EncodingError(f"{kind.__name__} has {len(parts)} fields, got {len(values)}")
        return kind(
            *(v if part is None else part(v) for part, v in zip(parts, values, strict=True))
        )

    return convert


def _member(kind: type[IntEnum], value: int) -> IntEnum:
    try:
        return kind(value)
    except ValueError as error:
        raise EncodingError(f"{kind.__name__} has no number {value}") from error


# ------------------------------------------------------------- from encoded bytes

Decoder = Callable[[bytes], tuple[Any, ...]]
"""Turns ABI-encoded bytes into a tuple of values."""

_Reader = Callable[[bytes, int], Any]
"""Reads one value, given the data and the value's offset."""

WORD = 32
MAX_ELEMENTS = 1 << 20
"""Most elements of an array: a guard against hostile lengths."""


@cache
def compile_decoder(types: tuple[str, ...]) -> Decoder:
    """Return a decoder of a sequence of values of these canonical ABI types."""
    read = _sequence_reader([parse(kind) for kind in types])

    def decode(data: bytes) -> tuple[Any, ...]:
        values: tuple[Any, ...] = read(data, 0)
        return values

    return decode


def _head_size(kind: ABIType) -> int:
    if isinstance(kind, TupleType) and not kind.is_dynamic:
        return sum(map(_head_size, kind.components))
    return WORD


def _reader(kind: ABIType) -> _Reader:
    if kind.arrlist and not kind.arrlist[-1]:
        return _array_reader(kind.item_type)
    if isinstance(kind, TupleType) and not kind.is_array:
        return _sequence_reader(kind.components)
    if isinstance(kind, BasicType) and not kind.is_array:
        if kind.base == "uint":
            return _uint_reader(int(kind.sub))
        if kind.base == "address":
            return lambda data, at: _address(_word(data, at))
        if kind.base == "bool":
            return lambda data, at: _bool(_word(data, at))
        if kind.base in ("bytes", "string") and kind.is_dynamic:
            return _read_bytes if kind.base == "bytes" else _read_string
        if kind.base == "bytes":
            size = int(kind.sub)
            return lambda data, at: _word(data, at)[:size]
    raise EncodingError(f"no decoder for the ABI type {kind}")


def _sequence_reader(types: Sequence[ABIType]) -> _Reader:
    """Return the reader of a struct or argument list; offsets count from its start."""
    plan, at = [], 0
    for kind in types:
        plan.append((at, kind.is_dynamic, _reader(kind)))
        at += _head_size(kind)

    def read(data: bytes, start: int) -> tuple[Any, ...]:
        return tuple(
            [
                reader(data, start + (_length(data, start + head) if is_dynamic else head))
                for head, is_dynamic, reader in plan
            ]
        )

    return read


def _array_reader(kind: ABIType) -> _Reader:
    reader, is_dynamic, size = _reader(kind), kind.is_dynamic, _head_size(kind)

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
