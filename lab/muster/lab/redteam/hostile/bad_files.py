"""Submission files that are expensive to read: a few kB that encode millions of values, false
headers, endless headers.

`bad_files` returns them by name, each far beyond what a recipe of `ROWS` rows of `LIMIT` tokens
allows. `odd_files` returns files that other writers may make of honest rows, which must be read.
`give` gives files to a validator's decoder and returns their cost.
"""

import asyncio
import contextlib
import io
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from muster.client.validator.decoding import FileDecoder
from muster.protocol.errors import EncodingError
from muster.protocol.rollouts import SCHEMA, SCHEMA_WITH_REPLIES, Bounds

ROWS, LIMIT, CHUNK_TOKENS, TOPK = 8, 512, 32, 128
"""The recipe that the files attack."""
MANY = 7_500_000
"""Values of a row in files with too many; encoded as runs, they take a few bytes."""

_SHORT: dict[str, Any] = {"prompt_tokens": [[1]], "completion_tokens": [[1]], "proofs": [b""]}


def bad_files(values: int = MANY) -> dict[str, bytes]:
    """Return the corpus by name; with the default values it takes half a minute and a GB to
    make."""
    whole, tokens = _written(_table()), _constant(values)
    many = _written(_table(completion_tokens=tokens), data_page_size=1 << 30)
    return {
        "runs of a token in completions": many,
        "runs of a token in prompts": _written(_table(prompt_tokens=tokens)),
        "runs of places in replies": _written(_table(replies=tokens)),
        "zero-width deltas": _written(
            _table(completion_tokens=tokens),
            use_dictionary=False,
            column_encoding={"completion_tokens.list.element": "DELTA_BINARY_PACKED"},
        ),
        "compressed zeros as proofs": _written(_table(proofs=[bytes(30 << 20)] * ROWS)),
        "compressed zeros as tokens": _written(
            _table(completion_tokens=tokens), use_dictionary=False
        ),
        "one long proof for all rows": _written(
            _table(proofs=[bytes(4 << 20)] * ROWS), dictionary_pagesize_limit=1 << 30
        ),
        "one long name for all rows": _written(
            _table(problem_id=["p" * (8 << 20)] * ROWS), dictionary_pagesize_limit=1 << 30
        ),
        "names by their prefixes": _written(
            _table(problem_id=["p" * (4 << 20)] * ROWS),
            use_dictionary=False,
            column_encoding={"problem_id": "DELTA_BYTE_ARRAY"},
        ),
        "rows without number": _written(_table(rows=100_000, **_SHORT)),
        "empty lists without number": _written(
            _table(rows=100_000, **_SHORT | {"completion_tokens": [[]]})
        ),
        "a row group for each row": _written(_table(rows=500, **_SHORT), row_group_size=1),
        "columns without number": _written(pa.table({f"c{i}": [0] for i in range(2_000)})),
        "lists within lists": _written(pa.table({"c": _nested(60)})),
        "statistics of many MB": _with_footer(whole, _statistics(8 << 20)),
        "statistics within the footer's bound": _with_footer(whole, _statistics(60_000)),
        "a footer of many MB": _with_footer(whole, bytes(16 << 20)),
        "a footer of structures without end": _with_footer(whole, b"\x1c" * 60_000),
        "a footer of fields without end": _with_footer(whole, b"\x15\x02" * 30_000 + b"\0"),
        "a footer of a list without end": _with_footer(whole, b"\x29\xfc\xff\xff\xff\xff\x07"),
        "an encrypted footer": whole[:-4] + b"PARE",
        "pages that state fewer values": _understated(many, values, in_pages=True),
        "a footer that states fewer values": _understated(many, values, in_footer=True),
        "headers that all state fewer values": _understated(
            many, values, in_pages=True, in_footer=True
        ),
    }


def odd_files() -> dict[str, bytes]:
    """Return honest rows as other writers, or our own with other settings, write them."""
    honest = _table()
    return {
        "without compression": _written(honest, compression="none"),
        "snappy": _written(honest, compression="snappy"),
        "without dictionaries": _written(honest, use_dictionary=False),
        "small pages": _written(honest, data_page_size=64, write_batch_size=8),
        "pages of the second version": _written(honest, data_page_version="2.0"),
        "with a page index": _written(honest, write_page_index=True),
        "with checksums": _written(honest, write_page_checksum=True),
        "without statistics": _written(honest, write_statistics=False),
        "row groups": _written(honest, row_group_size=3),
    }


@dataclass(frozen=True, slots=True)
class Served:
    """Cost of the corpus for a validator."""

    files: int
    """Number of files, given one after the other."""
    refused: int
    """Number of files refused as malformed."""
    worst_s: float
    """Seconds of the slowest file."""
    stall_s: float
    """Longest time for which the validator's event loop was blocked."""
    most_bytes: int
    """Peak main memory of a decoding process."""


async def give(files: Iterable[bytes]) -> Served:
    """Give files to a validator's decoder, with the bounds that the files exceed."""
    bounds = Bounds(ROWS, 1024, 2 * LIMIT + 256, 2 * LIMIT // CHUNK_TOKENS * (2 + 2 * TOPK))
    seconds, refused = [], 0
    others = set(psutil.Process().children())
    async with FileDecoder() as decoder:
        await decoder.start()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_longest_stall())
            for data in files:
                started = time.perf_counter()
                try:
                    await decoder.decode(data, bounds)
                except EncodingError:
                    refused += 1
                seconds.append(time.perf_counter() - started)
            own = set(psutil.Process().children()) - others
            most = max(map(_most_memory, own))
            watching.cancel()
    stall_s = 0.0 if watching.cancelled() else watching.result()
    return Served(len(seconds), refused, max(seconds), stall_s, most)


async def _longest_stall() -> float:
    longest, last = 0.0, time.perf_counter()
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
    return longest


def _most_memory(process: psutil.Process) -> int:
    """Return the peak main memory of a process; 0 if it has ended."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10
    return 0


def _table(*, rows: int = ROWS, **columns: Any) -> pa.Table:
    """Return honest rows with some columns replaced, each given whole or as one row to repeat."""
    row = {
        "problem_id": "p", "group": 0, "sample": 0, "sampling_seed": 1, "target_length": -1,
        "policy_version": 8, "prompt_tokens": list(range(40)), "completion_tokens": [5] * LIMIT,
        "proofs": bytes(LIMIT // CHUNK_TOKENS * (2 + 2 * TOPK)), "task_reward": 0.5,
        "replies": [1, 2],
    }  # fmt: skip
    schema = SCHEMA_WITH_REPLIES if "replies" in columns else SCHEMA
    made = []
    for field in schema:
        given = columns.get(field.name)
        if isinstance(given, pa.Array):
            made.append(given)
            continue
        whole = [row[field.name]] if given is None else given
        made.append(pa.array(whole * (rows // len(whole)), field.type))
    return pa.Table.from_arrays(made, schema=schema)


def _constant(values: int) -> pa.Array:
    """Return a list column of one token, `values` times in every row."""
    offsets = pa.array([i * values for i in range(ROWS + 1)], pa.int32())
    tokens = pa.repeat(pa.scalar(5, pa.int32()), ROWS * values)
    kind = SCHEMA.field("completion_tokens").type
    return pa.ListArray.from_arrays(offsets, tokens, type=kind)


def _nested(depth: int) -> pa.Array:
    kind: Any = pa.int32()
    value: Any = 1
    for _ in range(depth):
        kind, value = pa.list_(kind), [value]
    return pa.array([value], kind)


def _written(table: pa.Table, **options: Any) -> bytes:
    buffer = io.BytesIO()
    options = {"compression": "zstd", "row_group_size": 1 << 24, **options}
    pq.write_table(table, buffer, **options)
    return buffer.getvalue()


def _with_footer(data: bytes, footer: bytes) -> bytes:
    """Return a file with its footer replaced."""
    (size,) = struct.unpack("<I", data[-8:-4])
    return data[: -8 - size] + footer + struct.pack("<I", len(footer)) + b"PAR1"


def _statistics(size: int) -> bytes:
    """Return a footer whose only field is a byte string of `size` zeros."""
    return b"\x68" + _varint(size, 5) + bytes(size) + b"\0"


def _varint(number: int, width: int) -> bytes:
    """Return a number as a varint of `width` bytes, padded with empty ones if necessary."""
    parts = [(number >> 7 * place) & 127 for place in range(width)]
    return bytes([part | 128 for part in parts[:-1]] + parts[-1:])


def _understated(
    data: bytes, values: int, *, in_pages: bool = False, in_footer: bool = False
) -> bytes:
    """Return a file whose headers state one value a row instead of `values`."""
    (size,) = struct.unpack("<I", data[-8:-4])
    pages, footer = data[: -8 - size], data[-8 - size :]
    width = -(-(2 * ROWS * values).bit_length() // 7)
    wide, narrow = _varint(2 * ROWS * values, width), _varint(2 * ROWS, width)
    assert wide in pages
    assert wide in footer
    pages = pages.replace(wide, narrow) if in_pages else pages
    return pages + (footer.replace(wide, narrow) if in_footer else footer)
