"""Measures a Parquet file by its own headers, without decoding it.

A few bytes can stand for millions of values (runs, dictionaries, compressed zeros), so a stranger's
file is measured before the Parquet library sees it. The library decodes no more than the page
headers state, so their sums are an upper bound, if both read the same headers. Therefore everything
that two readers could understand differently is refused: a repeated field, a list with a type other
than the format's, a number too wide for its field, pages that do not fill their column, and any
kind of page, encoding or codec that submissions do not use.

Knows nothing of rollouts. Format: https://parquet.apache.org/docs/file-format/metadata/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from muster.protocol.errors import EncodingError

MAX_FOOTER_BYTES = 1 << 16
"""Most bytes of a footer. A submission's footer has a few KiB, nearly all of it statistics."""
MAX_FIELDS = 1 << 14
"""Most fields and list elements in a file's headers; a submission's have hundreds."""
MAX_DEPTH = 8
"""Deepest nesting of structures."""

_MAGIC = b"PAR1"
_TAIL_BYTES = 8
"""The footer's length and the magic number, at the very end."""
_TRUE, _FALSE, _I8, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST = range(1, 10)
_STRUCT = 12
_BITS = {_I16: 16, _I32: 32, _I64: 64}
_FOOTER_LISTS = {
    (2,): _STRUCT,  # schema
    (4,): _STRUCT,  # row groups
    (5,): _STRUCT,  # key-value pairs
    (7,): _STRUCT,  # column orders
    (4, 1): _STRUCT,  # a row group's columns
    (4, 4): _STRUCT,  # what it is sorted by
    (4, 1, 3, 2): _I32,  # a column's encodings
    (4, 1, 3, 3): _BINARY,  # its path
    (4, 1, 3, 8): _STRUCT,  # its key-value pairs
    (4, 1, 3, 13): _STRUCT,  # its encodings by page
    (4, 1, 3, 16, 2): _I64,  # histograms of its levels
    (4, 1, 3, 16, 3): _I64,
}
"""The lists of a footer by their place, and the type of their elements: the library assumes this
type, whatever a file states."""

_WIDTHS = {1: 4, 2: 8, 5: 8, 6: 0}
"""Bytes of a value of INT32, INT64 and DOUBLE; 0 for a BYTE_ARRAY, which states its length."""
_CODECS = {0: "uncompressed", 1: "snappy", 6: "zstd"}
_PLAIN, _RLE = 0, 3
_ENCODINGS = frozenset({_PLAIN, 2, 8})
"""Encodings that are read: plain, and both kinds of dictionary indices."""
_DATA_PAGE, _DICTIONARY_PAGE, _DATA_PAGE_V2 = 0, 2, 3

_Fields = dict[int, tuple[int, Any]]
"""Type and value of a structure's fields, by number."""


@dataclass(frozen=True, slots=True)
class DictionaryPage:
    """The distinct values of a column of byte strings."""

    values: int
    """Stated number of values."""
    size_bytes: int
    """Stated size after decompression."""
    codec: str
    """Compression codec."""
    stored: memoryview
    """Its bytes in the file."""

    def longest(self) -> int:
        """Return the bytes of its longest value; raises EncodingError when its content differs from
        its header.
        """
        page: Any = self.stored
        if self.codec != _CODECS[0]:
            page = pa.decompress(pa.py_buffer(page), self.size_bytes, codec=self.codec)
        page, start, most = memoryview(page), 0, 0
        for _ in range(self.values):
            size = int.from_bytes(page[start : start + 4], "little")
            start += 4 + size
            if start > len(page):
                raise EncodingError("a dictionary ends before its last value")
            most = max(most, size)
        return most


@dataclass(slots=True)
class Column:
    """One leaf column, all row groups together."""

    width: int
    """Bytes of one value; 0 for byte strings."""
    values: int = 0
    """Values stated by its pages; for lists the elements of all rows."""
    page_bytes: int = 0
    """Size of its pages once decompressed, dictionaries included."""
    dictionaries: list[DictionaryPage] = field(default_factory=list)
    """Its dictionaries; empty unless it holds byte strings."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The contents of a file according to its headers."""

    rows: int
    columns: list[Column]
    """Leaf columns, in the schema's order."""


def footer_bytes(data: bytes) -> int:
    """Return the size of a file's footer, by its last bytes; raises EncodingError when it cannot be
    a submission's.
    """
    end = len(data) - _TAIL_BYTES
    size = int.from_bytes(data[end : end + 4], "little")
    if end < len(_MAGIC) or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise EncodingError("not a readable Parquet file: it does not begin and end as one")
    if not 0 < size <= min(MAX_FOOTER_BYTES, end - len(_MAGIC)):
        raise EncodingError(f"not a readable Parquet file: a footer of {size} bytes")
    return size


def measure(data: bytes) -> Measured:
    """Return a file's sizes; raises EncodingError when its headers are not a submission's.

    Time and memory depend only on the headers, of which at most MAX_FIELDS fields are read.
    """
    end, size = len(data) - _TAIL_BYTES, footer_bytes(data)
    reader = _HeaderReader(memoryview(data))
    footer = reader.read(end - size, end, _FOOTER_LISTS)
    if 8 in footer or 9 in footer:
        raise EncodingError("not a readable Parquet file: its footer is signed or encrypted")
    groups = _get(footer, 4, _LIST)
    rows = _get(footer, 3, _I64)
    sizes = [_get(group, 3, _I64) for group in groups]
    if rows != sum(sizes) or min(sizes, default=0) < 0:
        raise EncodingError("not a readable Parquet file: row groups of another number of rows")
    if rows < 1:
        raise EncodingError(f"file has {rows} rows")
    columns: list[Column] = []
    for group in groups:
        chunks = [_ColumnChunk.of(each, end - size) for each in _get(group, 1, _LIST)]
        columns = columns or [Column(chunk.width) for chunk in chunks]
        if [chunk.width for chunk in chunks] != [column.width for column in columns]:
            raise EncodingError("not a readable Parquet file: row groups of other columns")
        for column, chunk in zip(columns, chunks, strict=True):
            _add_pages(reader, chunk, column)
    return Measured(rows, columns)


@dataclass(frozen=True, slots=True)
class _ColumnChunk:
    """A column's part of a row group."""

    width: int
    codec: str
    values: int
    start: int
    end: int

    @classmethod
    def of(cls, fields: _Fields, footer_start: int) -> _ColumnChunk:
        meta: _Fields = _get(fields, 3, _STRUCT)
        kind, codec = _get(meta, 1, _I32), _get(meta, 4, _I32)
        if kind not in _WIDTHS or codec not in _CODECS or {1, 8, 9} & fields.keys():
            raise EncodingError("not a readable Parquet file: a column of no submission")
        start, dictionary = _get(meta, 9, _I64), _get(meta, 11, _I64, 0)
        if 0 < dictionary < start:
            start = dictionary
        end = start + _get(meta, 7, _I64)
        if not len(_MAGIC) <= start < end <= footer_start:
            raise EncodingError("not a readable Parquet file: a column outside the file")
        return cls(_WIDTHS[kind], _CODECS[codec], _get(meta, 5, _I64), start, end)


def _add_pages(reader: _HeaderReader, chunk: _ColumnChunk, column: Column) -> None:
    """Add the stated sizes of a chunk's pages to its column."""
    at, values = chunk.start, 0
    while at < chunk.end:
        header = reader.read(at, chunk.end, {})
        kind, size, stored = (_get(header, number, _I32) for number in (1, 2, 3))
        start, is_first, at = reader.at, at == chunk.start, reader.at + stored
        if min(size, stored) < 0 or at > chunk.end:
            raise EncodingError("not a readable Parquet file: a page outside its column")
        column.page_bytes += size
        if kind == _DICTIONARY_PAGE and is_first:
            count = _dictionary_values(_get(header, 7, _STRUCT))
            if column.width == 0:
                page = DictionaryPage(count, size, chunk.codec, reader.data[start:at])
                column.dictionaries.append(page)
        else:
            values += _page_values(kind, header)
    if values != chunk.values:
        # The library would read on until it has as many values as the column states.
        raise EncodingError("not a readable Parquet file: pages of another number of values")
    column.values += values


def _page_values(kind: int, header: _Fields) -> int:
    if kind == _DATA_PAGE:
        page = _get(header, 5, _STRUCT)
        encoding, levels = _get(page, 2, _I32), [_get(page, 3, _I32), _get(page, 4, _I32)]
    elif kind == _DATA_PAGE_V2:
        page = _get(header, 8, _STRUCT)
        encoding, levels = _get(page, 4, _I32), []
    else:
        raise EncodingError(f"not a readable Parquet file: a page of kind {kind}")
    return _counted(_get(page, 1, _I32), encoding, all(level == _RLE for level in levels))


def _dictionary_values(page: _Fields) -> int:
    return _counted(_get(page, 1, _I32), _get(page, 2, _I32), True)


def _counted(values: int, encoding: int, has_known_levels: bool) -> int:
    if encoding not in _ENCODINGS or not has_known_levels:
        raise EncodingError(f"not a readable Parquet file: encoding {encoding} is not read")
    if values < 0:
        raise EncodingError("not a readable Parquet file: a page of less than no values")
    return values


class _HeaderReader:
    """Reads structures of Thrift's compact protocol, with a bound on their total size."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0
        """End of the structure that was read last."""
        self._end = 0
        self._left = MAX_FIELDS
        self._lists: dict[tuple[int, ...], int] = {}

    def read(self, start: int, end: int, lists: dict[tuple[int, ...], int]) -> _Fields:
        """Return the structure at `start`, which must end before `end` and have only `lists`."""
        self.at, self._end, self._lists = start, end, lists
        return self._struct(())

    def _struct(self, path: tuple[int, ...]) -> _Fields:
        if len(path) > MAX_DEPTH:
            raise EncodingError("not a readable Parquet file: its headers are nested too deep")
        fields: _Fields = {}
        number = 0
        while head := self._byte():
            kind, step = head & 15, head >> 4
            number = number + step if step else self._integer(16)
            # In the library the number would wrap around and name another field.
            if not 0 <= number < 1 << 15 or number in fields:
                raise EncodingError(f"not a readable Parquet file: field {number}, again or not")
            fields[number] = kind, self._value(kind, (*path, number))
        return fields

    def _value(self, kind: int, path: tuple[int, ...]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise EncodingError("not a readable Parquet file: headers without end")
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind in _BITS:
            return self._integer(_BITS[kind])
        if kind == _BINARY:
            return self._skip(self._varint(32))
        if kind == _LIST:
            return list(self._elements(path))
        if kind == _STRUCT:
            return self._struct(path)
        if kind in (_I8, _DOUBLE):
            return self._skip(1 if kind == _I8 else 8)
        raise EncodingError(f"not a readable Parquet file: a header's field of type {kind}")

    def _elements(self, path: tuple[int, ...]) -> Iterator[Any]:
        head = self._byte()
        count, kind = head >> 4, head & 15
        if count == 15:
            count = self._varint(32)
        if kind != self._lists.get(path):
            raise EncodingError("not a readable Parquet file: a header's list of another type")
        return (self._value(kind, path) for _ in range(count))

    def _integer(self, bits: int) -> int:
        number = self._varint(bits)
        return (number >> 1) ^ -(number & 1)

    def _varint(self, bits: int) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            shift += 7
            if number >> bits:
                raise EncodingError("not a readable Parquet file: a header's number is too large")
            if byte < 128:
                return number
            if shift > 63:
                raise EncodingError("not a readable Parquet file: a header's number is too long")

    def _skip(self, size: int) -> None:
        if size > self._end - self.at:
            raise EncodingError("not a readable Parquet file: a header ends too early")
        self.at += size

    def _byte(self) -> int:
        if self.at >= self._end:
            raise EncodingError("not a readable Parquet file: a header ends too early")
        self.at += 1
        return self.data[self.at - 1]


def _get(fields: _Fields, number: int, kind: int, default: Any = None) -> Any:
    """Return a field's value; raises EncodingError for one that is missing or of another type."""
    found_kind, value = fields.get(number, (kind, default))
    if found_kind != kind or value is None:
        raise EncodingError(f"not a readable Parquet file: a header without field {number}")
    return value
