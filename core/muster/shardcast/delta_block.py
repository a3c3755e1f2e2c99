"""The delta of one block of floats: which ones changed, and by how many representable values.

Owns the block format of docs/protocol.md section 10 and its implementation in numpy. The kernel
`native/delta.c` gives the same bytes ten times as fast; `tools/build_kernel.py` compiles it when
the package is installed, and its calls release the GIL.

Floats are numbered in ascending order, so that neighbours differ by one: if the sign bit of a
pattern is set, its other bits are inverted, and the result is read as a signed integer. This is a
bijection over all patterns, -0, infinities and NaN payloads included, and differences wrap around.

The probability that a weight changes in a training step depends mostly on its exponent: a step of a
given size crosses a rounding boundary twice as often if representable values are twice as close. So
changes are coded in classes by the base's exponent, which the decoder knows already. Each class has
three lists, each Rice coded with its own parameter: gaps between changed floats (or between
unchanged ones, if those are fewer), gaps between changes of more than one, and the sizes of those
changes.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from muster.protocol.compiled import load_library
from muster.protocol.errors import DeltaError

BLOCK_FLOATS = 1 << 20
"""Floats per block; the last block of a segment may have fewer."""
SAME, RAW, CODED = 0, 1, 2
"""A block's first byte: equal to the base; the floats themselves follow; changes follow."""
MAX_SHIFT = 31
"""Largest Rice parameter."""

KERNEL_FOLDER = Path(__file__).parent / "native"
_KERNEL_FAULTS = {
    1: "it is cut off",
    2: "a number of its table is out of range",
    3: "a gap leads outside of its class",
    4: "it is longer than its table says",
}

COMPLEMENT = 0x80
"""Flag in a Rice parameter's byte: the list holds the complement of the positions."""

Integers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]
Patterns = npt.NDArray[np.unsignedinteger[Any]]
"""Floats as unsigned integers with the same bits."""


class FloatFormat(NamedTuple):
    """A floating-point type as the codec sees it."""

    width: int
    """Bytes: 2 or 4."""
    mantissa_bits: int
    """Bits below the exponent."""


FORMATS = {"BF16": FloatFormat(2, 7), "F16": FloatFormat(2, 10), "F32": FloatFormat(4, 23)}
"""The types that are coded, by their name in safetensors."""


class _List(NamedTuple):
    """The table's entry for a list of gaps between positions."""

    listed: int
    """Number of listed positions."""
    complement: bool
    """Whether the complement of the positions is listed."""
    shift: int
    """Rice parameter."""


class _Class(NamedTuple):
    """The table's row for the floats whose base has a given exponent."""

    exponent: int
    changes: int
    changed: _List
    large: int
    """Number of changes of more than one."""
    largest: _List
    """Positions of those among the changes."""
    size_shift: int
    """Rice parameter of their sizes."""


def encode_block(base: Patterns, fresh: Patterns, kind: FloatFormat) -> bytes:
    """Return the delta that turns `base` into `fresh`: equal numbers of little-endian patterns."""
    if np.array_equal(base, fresh):
        return bytes([SAME])
    coded = _encode_changes(base, fresh, kind)
    if len(coded) > fresh.nbytes:
        return bytes([RAW]) + fresh.tobytes()
    return bytes([CODED]) + coded


def decode_block(base: Patterns, delta: bytes, kind: FloatFormat) -> Patterns:
    """Return the patterns that a delta makes of `base`; raises DeltaError ("block")."""
    mode, body = delta[:1], delta[1:]
    if mode == bytes([SAME]) and not body:
        return base
    if mode == bytes([RAW]) and len(body) == base.nbytes:
        return np.frombuffer(body, base.dtype)
    if mode != bytes([CODED]):
        raise malformed("its first byte or its length is wrong")
    return _decode_changes(base, body, kind)


def malformed(what: str) -> DeltaError:
    """Return the error for a block that does not follow the format."""
    return DeltaError(f"a block of the delta is malformed: {what}", reason="block")


def write_varint(value: int) -> bytes:
    """Return an unsigned integer in groups of seven bits, low ones first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an integer below 2^63 and where the next one starts; raises DeltaError."""
    value = 0
    for i in range(9):
        if at + i >= len(data):
            break
        value |= (data[at + i] & 0x7F) << 7 * i
        if data[at + i] < 0x80:
            return value, at + i + 1
    raise malformed("an integer is cut off or too long")


def _ordered(patterns: Patterns) -> npt.NDArray[np.signedinteger[Any]]:
    """Map patterns to integers in the order of the floats; it is its own inverse."""
    top = 8 * patterns.itemsize - 1
    signed: npt.NDArray[np.signedinteger[Any]] = patterns.view(f"i{patterns.itemsize}")
    numbers: npt.NDArray[np.signedinteger[Any]] = signed ^ ((signed >> top) & ((1 << top) - 1))
    return numbers


def _classes(patterns: Patterns, kind: FloatFormat) -> npt.NDArray[np.uint8]:
    bits = 8 * kind.width - 1 - kind.mantissa_bits
    return ((patterns >> kind.mantissa_bits) & ((1 << bits) - 1)).astype(np.uint8)


# Encoding


def _encode_changes(base: Patterns, fresh: Patterns, kind: FloatFormat) -> bytes:
    exponents = _classes(base, kind)
    order = np.argsort(exponents, kind="stable")
    members = np.bincount(exponents, minlength=256)
    places = np.flatnonzero((base != fresh)[order])
    where = order[places]
    steps = (_ordered(fresh[where]) - _ordered(base[where])).astype(np.int64)
    starts = np.cumsum(members) - members
    changed = np.bincount(exponents[where], minlength=256)
    table, unary, fixed = bytearray(), [], []
    at = 0
    for exponent in np.flatnonzero(changed).tolist():
        upto = at + int(changed[exponent])
        ranks = places[at:upto] - starts[exponent]
        row, bits = _encode_class(exponent, ranks, steps[at:upto], int(members[exponent]))
        table += row
        unary += bits[0]
        fixed += bits[1]
        at = upto
    count = write_varint(int(np.count_nonzero(changed)))
    quotients = _packed(unary)
    return b"".join([count, table, write_varint(len(quotients)), quotients, _packed(fixed)])


def _encode_class(
    exponent: int, ranks: Integers, steps: Integers, members: int
) -> tuple[bytes, tuple[list[Bits], list[Bits]]]:
    """Return a class's row of the table, and its unary and fixed bits."""
    sizes = np.abs(steps)
    large = np.flatnonzero(sizes > 1)
    gaps, complement = _gaps(ranks, members)
    large_gaps, large_complement = _gaps(large, len(ranks))
    lists = [gaps, large_gaps, sizes[large] - 2]
    shifts = [_best_shift(values) for values in lists]
    row = bytearray([exponent, shifts[0] | complement])
    row += write_varint(len(ranks))
    row += write_varint(len(gaps)) if complement else b""
    row += bytes([shifts[1] | large_complement])
    row += write_varint(len(large))
    row.append(shifts[2])
    unary = [_unary(values >> shift) for values, shift in zip(lists, shifts, strict=True)]
    fixed = [_fixed(values, shift) for values, shift in zip(lists, shifts, strict=True)]
    fixed.append((steps < 0).astype(np.uint8))
    return bytes(row), (unary, fixed)


def _gaps(positions: Integers, members: int) -> tuple[Integers, int]:
    """Return the gaps between positions, or with COMPLEMENT those between the others, if fewer."""
    complement = 2 * len(positions) > members
    listed = _others(positions, members) if complement else positions
    return np.diff(listed, prepend=-1) - 1, COMPLEMENT if complement else 0


def _best_shift(values: Integers) -> int:
    """Return the Rice parameter that needs the fewest bits, among three around the mean's bit
    length.
    """
    if not len(values):
        return 0
    guess = min(int(values.sum() // len(values)).bit_length(), MAX_SHIFT)
    shifts = range(max(0, guess - 2), guess + 1)
    return min(shifts, key=lambda shift: len(values) * shift + int((values >> shift).sum()))


def _unary(values: Integers) -> Bits:
    """Return each value as that many zero bits and a one."""
    bits = np.zeros(int(values.sum()) + len(values), np.uint8)
    bits[np.cumsum(values + 1) - 1] = 1
    return bits


def _fixed(values: Integers, width: int) -> Bits:
    """Return the low `width` bits of each value, lowest first."""
    return ((values[:, None] >> np.arange(width)) & 1).astype(np.uint8).ravel()


def _packed(parts: list[Bits]) -> bytes:
    return np.packbits(np.concatenate(parts), bitorder="little").tobytes()


# Decoding


def _decode_changes(base: Patterns, body: bytes, kind: FloatFormat) -> Patterns:
    rows, at = _read_table(body, len(base))
    length, at = read_varint(body, at)
    if length > len(body) - at:
        raise malformed("it is cut off")
    quotients = _Unary(body[at : at + length])
    fixed = _Fixed(body[at + length :])
    exponents = _classes(base, kind)
    order = np.argsort(exponents, kind="stable")
    members = np.bincount(exponents, minlength=256)
    starts = np.cumsum(members) - members
    values = _ordered(base).copy()
    for row in rows:
        ranks, steps = _decode_class(row, int(members[row.exponent]), quotients, fixed)
        values[order[starts[row.exponent] + ranks]] += steps.astype(values.dtype)
    quotients.require_end()
    fixed.require_end()
    return _ordered(values.view(base.dtype)).view(base.dtype)


def _read_table(body: bytes, floats: int) -> tuple[list[_Class], int]:
    count, at = read_varint(body, 0)
    rows: list[_Class] = []
    for _ in range(count):
        row, at = _read_row(body, at)
        if rows and row.exponent <= rows[-1].exponent:
            raise malformed("its classes are not in order")
        rows.append(row)
    if sum(row.changes for row in rows) > floats:
        raise malformed("it has more changes than floats")
    return rows, at


def _read_row(body: bytes, at: int) -> tuple[_Class, int]:
    exponent, shift = _bytes_at(body, at, 2)
    changes, at = read_varint(body, at + 2)
    complement = shift >= COMPLEMENT
    listed, at = read_varint(body, at) if complement else (changes, at)
    (large_shift,) = _bytes_at(body, at, 1)
    large, at = read_varint(body, at + 1)
    (size_shift,) = _bytes_at(body, at, 1)
    changed = _List(listed, complement, shift & ~COMPLEMENT)
    few = large_shift >= COMPLEMENT
    largest = _List(changes - large if few else large, few, large_shift & ~COMPLEMENT)
    if max(changed.shift, largest.shift, size_shift) > MAX_SHIFT:
        raise malformed("a number of its table is out of range")
    if not changes or listed > changes or large > changes:
        raise malformed("a number of its table is out of range")
    return _Class(exponent, changes, changed, large, largest, size_shift), at + 1


def _bytes_at(body: bytes, at: int, count: int) -> bytes:
    if at + count > len(body):
        raise malformed("it is cut off")
    return body[at : at + count]


def _decode_class(
    row: _Class, members: int, quotients: _Unary, fixed: _Fixed
) -> tuple[Integers, Integers]:
    """Return the ranks of the class's changed floats, and the steps of their changes."""
    gaps = _rice(row.changed, quotients, fixed)
    ranks = _positions(gaps, members, row.changed.complement)
    if len(ranks) != row.changes:
        raise malformed("a gap leads outside of its class")
    large_gaps = _rice(row.largest, quotients, fixed)
    large = _positions(large_gaps, row.changes, row.largest.complement)
    sizes = np.ones(row.changes, np.int64)
    sizes[large] = 2 + _rice(_List(row.large, False, row.size_shift), quotients, fixed)
    negative = fixed.take(row.changes, 1)
    return ranks, np.where(negative, -sizes, sizes)


def _rice(values: _List, quotients: _Unary, fixed: _Fixed) -> Integers:
    high = quotients.take(values.listed) << values.shift
    return high | fixed.take(values.listed, values.shift)


def _positions(gaps: Integers, members: int, complement: bool) -> Integers:
    # Every gap is checked first, so that the sum cannot overflow.
    if len(gaps) and (int(gaps.max()) >= members or int((gaps + 1).sum()) > members):
        raise malformed("a gap leads outside of its class")
    positions = np.cumsum(gaps + 1) - 1
    return _others(positions, members) if complement else positions


def _others(positions: Integers, members: int) -> Integers:
    is_other = np.ones(members, np.bool_)
    is_other[positions] = False
    return np.flatnonzero(is_other)


class _Unary:
    """Reads numbers written in unary."""

    def __init__(self, data: bytes) -> None:
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        self._values = np.diff(np.flatnonzero(bits), prepend=-1) - 1
        self._at = 0

    def take(self, count: int) -> Integers:
        taken = self._values[self._at : self._at + count]
        if len(taken) != count:
            raise malformed("it is cut off")
        self._at += count
        return taken

    def require_end(self) -> None:
        if self._at != len(self._values):
            raise malformed("it is longer than its table says")


class _Fixed:
    """Reads numbers with a fixed number of bits."""

    def __init__(self, data: bytes) -> None:
        self._bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        self._at = 0

    def take(self, count: int, width: int) -> Integers:
        taken = self._bits[self._at : self._at + count * width]
        if len(taken) != count * width:
            raise malformed("it is cut off")
        self._at += count * width
        powers = np.int64(1) << np.arange(width)
        return taken.reshape(count, width) @ powers if width else np.zeros(count, np.int64)

    def require_end(self) -> None:
        if len(self._bits) - self._at > 7:
            raise malformed("it is longer than its table says")


# The codecs


class BlockCodec:
    """Encodes and decodes blocks, one at a time, in numpy: the reference."""

    def encode(self, base: Patterns, fresh: Patterns, kind: FloatFormat) -> bytes:
        """Return the delta that turns `base` into `fresh`."""
        return encode_block(base, fresh, kind)

    def decode(self, base: Patterns, delta: bytes, kind: FloatFormat) -> Patterns:
        """Return the patterns that a delta makes of `base`; raises DeltaError ("block")."""
        return decode_block(base, delta, kind)


class CompiledCodec(BlockCodec):
    """Does the same in C, with 16 MiB of working memory. Not thread-safe."""

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
            raise malformed(_KERNEL_FAULTS[fault])
        return made


def make_codec() -> BlockCodec:
    """Return a codec for one thread."""
    library = load_kernel()
    return CompiledCodec(library) if library else BlockCodec()


@cache
def load_kernel(folder: Path = KERNEL_FOLDER) -> ctypes.CDLL | None:
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
    library.muster_merge.argtypes = [address, size, size, number, address, address, size, address]
    library.muster_merge.restype = None
    return library
