"""Pairs the bytes of a version's files with the bytes of its parent that they are compared with.

Reads only safetensors headers, except to say which weight is not finite. A tensor is compared with
the parent's tensor of the same name, type and size, in any file. All other bytes are compared with
the bytes at the same place in the file of the same name. A file that is not safetensors is a single
such piece.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muster.protocol.errors import PolicyBroken, StorageError
from muster.protocol.ids import PolicyVersion
from muster.shardcast.delta_block import FORMATS

SUFFIXES = {".safetensors", ".peft"}
"""Files with these endings are read as safetensors files."""
MAX_HEADER_BYTES = 100 << 20
"""Most bytes of a header that is read; a file with a larger one is a single piece."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies in a file."""

    name: str
    """As in the header."""
    dtype: str
    """As in the header."""
    offset: int
    """Its first byte in the file."""
    size: int
    """Bytes."""
    shape: tuple[int, ...]
    """As in the header; it is not checked against the size."""


class ParentPlace(NamedTuple):
    """Where bytes of the parent start."""

    file: int
    """Number of the parent's file, in the order of names."""
    offset: int
    """Byte in that file."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a file, and the parent's bytes that they are compared with."""

    size: int
    """Bytes; at least 1."""
    dtype: str | None
    """Type of its floats, as in `FORMATS`; None if it is not floats."""
    parent: ParentPlace | None
    """Counterpart in the parent; None without one, and then `dtype` is None too."""
    tensor: str = ""
    """Name of the tensor, if an adapter may have changed it."""


class ParentLayout:
    """The parent's bytes that pieces can be compared with."""

    def __init__(self, files: Mapping[str, Path], *, adapted: Collection[str] = ()) -> None:
        """`adapted` are tensors that an adapter changes: each is a piece of its own."""
        self._adapted = adapted
        self._files: dict[str, tuple[int, int, int]] = {}
        self._tensors: dict[tuple[str, str, int], ParentPlace] = {}
        for number, (name, path) in enumerate(sorted(files.items())):
            tensors = read_tensors(path)
            size = path.stat().st_size
            self._files[name] = (number, tensors[0].offset if tensors else size, size)
            for tensor in tensors:
                self._tensors[tensor.name, tensor.dtype, tensor.size] = ParentPlace(
                    number, tensor.offset
                )

    def pieces(self, name: str, path: Path) -> list[Piece]:
        """Return the pieces of a file of the new version, in order and without gaps."""
        return list(_merged(self._pieces(name, path)))

    def _pieces(self, name: str, path: Path) -> Iterator[Piece]:
        tensors = read_tensors(path)
        head = tensors[0].offset if tensors else path.stat().st_size
        number, parent_head, parent_size = self._files.get(name, (0, -1, -1))
        is_alike = head == (parent_head if tensors else parent_size)
        yield Piece(head, None, ParentPlace(number, 0) if is_alike else None)
        for tensor in tensors:
            place = self._tensors.get((tensor.name, tensor.dtype, tensor.size))
            coded = tensor.dtype if place is not None and tensor.dtype in FORMATS else None
            is_adapted = coded is not None and tensor.name in self._adapted
            yield Piece(tensor.size, coded, place, tensor.name if is_adapted else "")


def read_tensors(path: Path) -> list[Tensor]:
    """Return a safetensors file's tensors in the order of their bytes; [] for any other file.

    They cover the file from the end of its header to its end without gap or overlap.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if path.suffix not in SUFFIXES or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            return []
        header = file.read(length)
    try:
        tensors = [
            _tensor(name, entry, 8 + length)
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
    ends = [8 + length, *(tensor.offset + tensor.size for tensor in tensors)]
    starts = [*(tensor.offset for tensor in tensors), size]
    return tensors if starts == ends else []


def _tensor(name: str, entry: Any, data_start: int) -> Tensor:
    start, end = entry["data_offsets"]
    shape = tuple(int(length) for length in entry["shape"])
    return Tensor(name, str(entry["dtype"]), data_start + int(start), int(end) - int(start), shape)


def _merged(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Join adjacent pieces whose counterparts are adjacent too; leave out empty pieces."""
    last: Piece | None = None
    for piece in pieces:
        if not piece.size:
            continue
        joined = _join(last, piece) if last else piece
        if last is not None and joined is None:
            yield last
        last = joined or piece
    if last is not None:
        yield last


def _join(first: Piece, second: Piece) -> Piece | None:
    if first.dtype != second.dtype or first.tensor or second.tensor:
        return None
    if first.parent is None or second.parent is None:
        continues = first.parent is second.parent
    else:
        continues = second.parent == (first.parent.file, first.parent.offset + first.size)
    return Piece(first.size + second.size, first.dtype, first.parent) if continues else None


# Weights that are not finite

_Bits = np.unsignedinteger[Any]


def _all_set(bits: _Bits) -> tuple[_Bits, _Bits]:
    return bits, bits


_NOT_FINITE: dict[str, tuple[_Bits, _Bits]] = {
    "F64": _all_set(np.uint64(0x7FF0 << 48)),
    "F32": _all_set(np.uint32(0x7F80 << 16)),
    "BF16": _all_set(np.uint16(0x7F80)),
    "F16": _all_set(np.uint16(0x7C00)),
    "F8_E5M2": _all_set(np.uint8(0x7C)),
    "F8_E4M3": _all_set(np.uint8(0x7F)),
    "F8_E8M0": _all_set(np.uint8(0xFF)),
    "F8_E5M2FNUZ": (np.uint8(0xFF), np.uint8(0x80)),
    "F8_E4M3FNUZ": (np.uint8(0xFF), np.uint8(0x80)),
}
"""By format, the bits that tell NaN and infinity from all other numbers, and their value there."""
_NUMBERS = 1 << 16
"""Numbers that are looked at together; they fit into a processor's cache."""


def require_finite(folder: Path, version: PolicyVersion) -> None:
    """Raise PolicyBroken when a weight of a policy folder is not finite, even one that few samples
    use: all machines then refuse the same versions, whatever their engines make of them. Reads all
    weights; raises StorageError when they cannot be read.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            named = (each.name for each in read_tensors(path) if not _is_finite(path, each))
            name = next(named, None)
        except (OSError, ValueError) as error:
            raise StorageError(f"cannot read {path}: {error}") from error
        if name is not None:
            raise PolicyBroken(
                f"policy version {version} is refused everywhere: its {name} is not finite",
                hint="nothing is wrong with this machine: the run's owner has to publish another "
                "version, which is then used",
            )


def _is_finite(path: Path, stored: Tensor) -> bool:
    if stored.dtype not in _NOT_FINITE or not stored.size:
        return True
    bits, value = _NOT_FINITE[stored.dtype]
    count = stored.size // bits.itemsize
    numbers = np.memmap(path, bits.dtype, "r", stored.offset, (count,))
    parts = (numbers[start : start + _NUMBERS] for start in range(0, count, _NUMBERS))
    return not any(bool(((part & bits) == value).any()) for part in parts)
