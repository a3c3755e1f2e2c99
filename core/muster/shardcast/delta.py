"""Lossless deltas between two versions' files, as in docs/protocol.md section 10.

 * `write_delta` compares a version with its parent and writes one file
 * `apply_delta` rebuilds the version's files exactly, from the parent's files and that file
 * `add_delta` decides for the publisher whether a version gets a delta, and whether it is an anchor

The first two go through the files once, a block at a time, so memory does not grow with the model.
A delta comes from strangers. It is applied only to the parent that it names, and never writes more
than the sizes in the signed manifest; any other fault is a DeltaError. The caller compares the
state hash of the rebuilt files.
"""

from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from muster.protocol.errors import AdapterError, DeltaError, StorageError
from muster.protocol.ids import Hash32, PolicyVersion
from muster.shardcast.adapter import (
    FACTOR_TYPES,
    WEIGHTS_NAME,
    Adapter,
    Factors,
    Merge,
    block_rows,
    is_adapter,
    merged,
    read_factors,
)
from muster.shardcast.chunks import storage_error
from muster.shardcast.delta_block import (
    BLOCK_FLOATS,
    FORMATS,
    FloatFormat,
    Patterns,
    make_codec,
    write_varint,
)
from muster.shardcast.delta_layout import ParentLayout, ParentPlace, Piece
from muster.shardcast.digests import state_hash
from muster.shardcast.manifest import (
    DELTA,
    DELTA_NAME,
    FULL,
    MAX_TOTAL_BYTES,
    Manifest,
    ManifestDelta,
)
from muster.shardcast.originals import Stamp, hash_file

WORTH_CARRYING = 2
"""A delta is published only if it is at most the files' size divided by this."""

MAGIC = b"MUSTERD1"
"""First bytes of a delta: its kind, and the version of the format."""
COPY, LITERAL = 1, 2
"""Operations: copy bytes of the parent; write the bytes that follow."""
CHANGED = {3: "BF16", 4: "F16", 5: "F32"}
"""Operations: write blocks of floats, coded as changes to the parent's floats."""
MERGED = 6
"""Operation: write a weight of the parent, merged with an adapter that was written before."""
PART_BYTES = 1 << 20
"""Most bytes of one operation that are not floats."""

_OPERATIONS = {dtype: operation for operation, dtype in CHANGED.items()}


class States(NamedTuple):
    """The two versions that a delta connects."""

    parent: Hash32
    """State hash of the files it is applied to."""
    made: Hash32
    """State hash of the files it makes."""


def write_delta(
    target: BinaryIO,
    files: Mapping[str, Path],
    parent: Mapping[str, Path],
    *,
    states: States,
    max_bytes: int,
) -> bool:
    """Write the delta from `parent` to `files`; return False when it takes more than `max_bytes`.

    The caller has checked the state hashes. Blocks for seconds per gigabyte: call it in a thread.
    Raises OSError.
    """
    adapter = _adapter(files)
    layout = ParentLayout(parent, adapted=adapter.merges if adapter else ())
    with _opened(parent) as bases:
        writer = _Writer(target, bases, max_bytes, adapter)
        try:
            writer.put(MAGIC + states.parent + states.made)
            for name, path in sorted(files.items()):
                writer.put(_file_head(name, path.stat().st_size))
                with path.open("rb") as fresh:
                    for piece in layout.pieces(name, path):
                        # A merge needs the adapter's file, which must be written before.
                        writer.put_piece(piece, fresh, may_merge=name > WEIGHTS_NAME)
        except _TooLarge:
            return False
    return True


def apply_delta(
    source: BinaryIO,
    parent: Mapping[str, Path],
    folder: Path,
    sizes: Mapping[str, int],
    *,
    states: States,
) -> None:
    """Write the files named in `sizes`, with these sizes, to `folder`.

    Raises DeltaError when the delta is malformed or not between these states, OSError when reading
    or writing fails. The files are right only if their state hash is right.
    """
    with _opened(parent) as bases:
        reader = _Reader(source, bases, folder / WEIGHTS_NAME)
        reader.require_states(states)
        for name, size in sorted(sizes.items()):
            reader.require_file(name, size)
            with (folder / name).open("wb") as target:
                left = size
                while left:
                    left -= reader.apply_operation(target, left, may_merge=name > WEIGHTS_NAME)
    if source.read(1):
        raise DeltaError("the delta goes on after its end", reason="trailing")


class _TooLarge(Exception):
    """The delta would exceed its budget."""


class _Writer:
    """Writes operations until the budget is used up."""

    def __init__(
        self, target: BinaryIO, bases: list[BinaryIO], max_bytes: int, adapter: Adapter | None
    ) -> None:
        self._adapter = adapter
        self._target = target
        self._bases = bases
        self._left = max_bytes
        self._codec = make_codec()

    def put(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise _TooLarge
        self._target.write(data)

    def put_piece(self, piece: Piece, fresh: BinaryIO, *, may_merge: bool) -> None:
        """Write a piece that is read at the position of `fresh`."""
        if piece.tensor and may_merge and self._put_merged(piece, fresh):
            return
        if piece.dtype is not None and piece.parent is not None:
            self._put_floats(piece.dtype, piece.size, piece.parent, fresh)
            return
        for start in range(0, piece.size, PART_BYTES):
            data = _read_exactly(fresh, min(PART_BYTES, piece.size - start))
            place = piece.parent and ParentPlace(piece.parent.file, piece.parent.offset + start)
            if place and _read_at(self._bases, place, len(data)) == data:
                self.put(bytes([COPY]) + _varints(*place, len(data)))
            else:
                self.put(bytes([LITERAL]) + _varints(len(data)) + data)

    def _put_merged(self, piece: Piece, fresh: BinaryIO) -> bool:
        """Write a weight as a merge, if the merge gives it; else restore `fresh`'s position."""
        assert self._adapter is not None
        assert piece.parent is not None
        assert piece.dtype is not None
        merge, kind = self._adapter.merges[piece.tensor], FORMATS[piece.dtype]
        if merge.size * kind.width != piece.size:
            return False
        start, factors = fresh.tell(), read_factors(merge, self._adapter.path)
        base = self._bases[piece.parent.file]
        base.seek(piece.parent.offset)
        for data in _merged_blocks(base, merge, factors, piece.dtype):
            if data != fresh.read(len(data)):
                fresh.seek(start)
                return False
        self.put(bytes([MERGED]) + _merge_head(merge, piece.dtype, piece.parent))
        return True

    def _put_floats(self, dtype: str, size: int, place: ParentPlace, fresh: BinaryIO) -> None:
        kind = FORMATS[dtype]
        self.put(bytes([_OPERATIONS[dtype]]) + _varints(*place, size // kind.width))
        base = self._bases[place.file]
        base.seek(place.offset)
        for block_bytes in _block_sizes(size, kind):
            old = _patterns(_read_exactly(base, block_bytes), kind)
            new = _patterns(_read_exactly(fresh, block_bytes), kind)
            block = self._codec.encode(old, new, kind)
            self.put(write_varint(len(block)) + block)


class _Reader:
    """Reads operations front to back; raises DeltaError for missing or wrong ones."""

    def __init__(self, source: BinaryIO, bases: list[BinaryIO], adapter: Path) -> None:
        self._adapter = adapter
        self._source = source
        self._bases = bases
        self._codec = make_codec()

    def require_states(self, states: States) -> None:
        if self._source.read(len(MAGIC)) != MAGIC:
            raise DeltaError("this is not a delta", reason="format")
        if self._take(len(states.parent)) != states.parent:
            raise DeltaError("the delta was made against another version", reason="base")
        if self._take(len(states.made)) != states.made:
            raise DeltaError("the delta makes another version than announced", reason="target")

    def require_file(self, name: str, size: int) -> None:
        head = _file_head(name, size)
        if self._take(len(head)) != head:
            raise DeltaError(f"the delta does not make {name} of {size} bytes", reason="target")

    def apply_operation(self, target: BinaryIO, left: int, *, may_merge: bool) -> int:
        """Apply one operation; returns how many bytes it wrote, from 1 to `left`."""
        operation = self._take(1)[0]
        if operation == COPY:
            place = self._place()
            size = self._size(min(PART_BYTES, left))
            return target.write(_read_at(self._bases, place, size))
        if operation == LITERAL:
            return target.write(self._take(self._size(min(PART_BYTES, left))))
        if operation == MERGED and may_merge:
            return self._apply_merge(target, left)
        if operation not in CHANGED:
            raise DeltaError(f"the delta has an unknown operation {operation}", reason="format")
        kind, place = FORMATS[CHANGED[operation]], self._place()
        size = self._size(left // kind.width) * kind.width
        self._apply_blocks(place, size, kind, target)
        return size

    def _apply_merge(self, target: BinaryIO, left: int) -> int:
        try:
            dtype, place, merge = self._merge_head()
            size = merge.size * FORMATS[dtype].width
            if size > left:
                raise DeltaError(f"a merge makes {size} bytes, {left} are left", reason="bounds")
            factors = read_factors(merge, self._adapter)
        except AdapterError as error:
            raise DeltaError(f"the delta cannot be merged: {error}", reason="adapter") from error
        base = self._bases[place.file]
        base.seek(place.offset)
        for data in _merged_blocks(base, merge, factors, dtype):
            target.write(data)
        return size

    def _merge_head(self) -> tuple[str, ParentPlace, Merge]:
        dtype, place = self._dtype(), self._place()
        rows, columns, rank = self._varint(), self._varint(), self._varint()
        scale = np.frombuffer(self._take(4), "<f4")[0]
        factor_type = self._dtype()
        if factor_type not in FACTOR_TYPES:
            raise DeltaError(f"factors of type {factor_type} cannot be merged", reason="format")
        down, up = self._varint(), self._varint()
        return dtype, place, Merge(rows, columns, rank, scale, factor_type, down, up)

    def _dtype(self) -> str:
        code = self._take(1)[0]
        if code not in CHANGED:
            raise DeltaError(f"the delta names an unknown type {code}", reason="format")
        return CHANGED[code]

    def _apply_blocks(
        self, place: ParentPlace, size: int, kind: FloatFormat, target: BinaryIO
    ) -> None:
        base = self._bases[place.file]
        base.seek(place.offset)
        for block_bytes in _block_sizes(size, kind):
            block = self._take(self._size(block_bytes + 1))
            old = _patterns(_read_exactly(base, block_bytes), kind)
            target.write(self._codec.decode(old, block, kind).data)

    def _take(self, size: int) -> bytes:
        data = self._source.read(size)
        if len(data) != size:
            raise DeltaError("the delta ends in the middle", reason="truncated")
        return data

    def _place(self) -> ParentPlace:
        file, offset = self._varint(), self._varint()
        if file >= len(self._bases) or offset > MAX_TOTAL_BYTES:
            raise DeltaError("the delta reads what the base does not have", reason="bounds")
        return ParentPlace(file, offset)

    def _size(self, limit: int) -> int:
        size = self._varint()
        if not 1 <= size <= limit:
            raise DeltaError(
                f"the delta has a part of size {size}, not 1 to {limit}", reason="bounds"
            )
        return size

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 63, 7):
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise DeltaError("the delta has a number that is too large", reason="bounds")


def _adapter(files: Mapping[str, Path]) -> Adapter | None:
    """Return the adapter among a version's files; None without one that can be merged."""
    try:
        return Adapter(files) if is_adapter(files) else None
    except AdapterError:
        return None


def _merged_blocks(base: BinaryIO, merge: Merge, factors: Factors, dtype: str) -> Iterator[bytes]:
    """Yield a merged weight, some rows at a time, reading the base at the position of `base`."""
    kind, step = FORMATS[dtype], block_rows(merge.columns)
    for row in range(0, merge.rows, step):
        numbers = min(step, merge.rows - row) * merge.columns
        old = _patterns(_read_exactly(base, numbers * kind.width), kind)
        yield merged(old, factors, row, dtype).tobytes()


def _merge_head(merge: Merge, dtype: str, place: ParentPlace) -> bytes:
    """Return the head of a merge: its type, shape, rank and scale."""
    head = bytes([_OPERATIONS[dtype]]) + _varints(*place, merge.rows, merge.columns, merge.rank)
    factors = np.array(merge.scale, "<f4").tobytes() + bytes([_OPERATIONS[merge.dtype]])
    return head + factors + _varints(merge.down, merge.up)


@contextmanager
def _opened(files: Mapping[str, Path]) -> Iterator[list[BinaryIO]]:
    """Open files in the order of their names, by which a delta numbers them."""
    with ExitStack() as stack:
        yield [stack.enter_context(path.open("rb")) for _, path in sorted(files.items())]


def _file_head(name: str, size: int) -> bytes:
    encoded = name.encode()
    return _varints(len(encoded)) + encoded + _varints(size)


def _varints(*values: int) -> bytes:
    return b"".join(write_varint(value) for value in values)


def _block_sizes(size: int, kind: FloatFormat) -> Iterator[int]:
    whole = BLOCK_FLOATS * kind.width
    for start in range(0, size, whole):
        yield min(whole, size - start)


def _patterns(data: bytes, kind: FloatFormat) -> Patterns:
    return np.frombuffer(data, f"<u{kind.width}")


def _read_at(files: list[BinaryIO], place: ParentPlace, size: int) -> bytes:
    files[place.file].seek(place.offset)
    return _read_exactly(files[place.file], size)


def _read_exactly(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise DeltaError("the delta reads beyond the base", reason="bounds")
    return data


# Which versions get a delta, and for which ones relays carry only the delta. The decision depends
# only on version number and content, so publishing again gives the same manifest.


def parent_to_publish(version: PolicyVersion, files: Container[str]) -> PolicyVersion | None:
    """Return the version that a new version's delta starts from; None if it is the base model.

    An adapter's delta starts from the base model, version 0; other versions differ least from the
    previous one.
    """
    if not version:
        return None
    return PolicyVersion(0 if is_adapter(files) else version - 1)


class Parent(NamedTuple):
    """The version that a delta starts from."""

    version: PolicyVersion
    root: Hash32
    """Root of its manifest."""
    state_hash: Hash32
    """State hash that its files must have."""
    files: Mapping[str, Path]
    """Its files by name."""


def add_delta(
    manifest: Manifest, folder: Path, parent: Parent, *, anchor_every: int
) -> tuple[Manifest, dict[Hash32, Stamp]]:
    """Return the manifest with a delta, which is now in `folder`, and the stamps of its chunks.

    The manifest is returned unchanged and without stamps when a delta saves too little, when the
    version is larger than its parent and the delta together, when the manifest would exceed its
    limit, or when the parent's files have another state hash. The folder holds the version's files.
    Every `anchor_every`-th version, and every one without a delta, is an anchor: relays carry its
    files too, so that a client without earlier versions can start there. Raises StorageError when
    the disk refuses.
    """
    target, old = folder / DELTA_NAME, parent.files
    files = {file.name: folder / file.name for file in manifest.files}
    try:
        if not all(path.is_file() for path in old.values()) or state_hash(old) != parent.state_hash:
            return manifest, {}
        parent_bytes = sum(path.stat().st_size for path in old.values())
        with target.open("wb") as out:
            is_worth_it = write_delta(
                out,
                files,
                old,
                states=States(parent.state_hash, manifest.state_hash),
                max_bytes=manifest.total_bytes // WORTH_CARRYING,
            )
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, f"write the delta of version {manifest.version}") from error
    if not is_worth_it:
        target.unlink()
        return manifest, {}
    with ThreadPoolExecutor(1, thread_name_prefix="publish") as hashers:
        entry, _, stamp = hash_file(target, manifest.chunk_bytes, hashers)
    # Deltas from the base do not form chains, so no anchors are needed.
    is_anchor = manifest.version % anchor_every == 0 and not is_adapter(files)
    carried = replace(
        manifest,
        kind=FULL if is_anchor else DELTA,
        parent=parent.version,
        delta=ManifestDelta(parent.root, entry.size, entry.chunks),
    )
    if manifest.total_bytes > parent_bytes + entry.size or not carried.fits():
        target.unlink()  # fetchers would refuse it
        return manifest, {}
    return carried, dict.fromkeys(entry.chunks, stamp)
