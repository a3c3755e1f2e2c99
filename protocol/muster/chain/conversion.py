"""Values between Python's types and the ABI's: dataclasses are structs, enums are numbers.

Both ways follow the Python types alone. Knows no contract.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from enum import IntEnum, StrEnum
from functools import cache
from typing import Any, Self, TypeVar, get_args, get_origin, get_type_hints

from muster.protocol.errors import EncodingError
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
    """Return what the ABI decoded as a value of this type; raises EncodingError if it is none."""
    hashable: Any = kind  # which mypy does not believe of type[T]
    convert = _converter(hashable)
    converted: T = value if convert is None else convert(value)
    return converted


@cache
def _converter(kind: Any) -> _Convert | None:
    """Return what makes values of this type; None when they are such already."""
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
