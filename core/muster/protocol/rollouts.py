"""The submission file: one Parquet row per sample, groups in ticket order, samples in order.

`decode_rollouts` checks sizes before it decodes (`muster.protocol.parquet`), then schema and
ranges. The Parquet library below it aborts the process on some damaged files. So files that nobody
has judged yet are decoded in a child process (`muster.client.validator.decoding`).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from muster.protocol.bounds import (
    ANY as ANY,
    MAX_FILE_BYTES as MAX_FILE_BYTES,
    MAX_PROBLEM_ID_BYTES as MAX_PROBLEM_ID_BYTES,
    MAX_ROWS as MAX_ROWS,
    MAX_UNCOMPRESSED_BYTES as MAX_UNCOMPRESSED_BYTES,
    Bounds as Bounds,
)
from muster.protocol.errors import EncodingError
from muster.protocol.parquet import MAX_FOOTER_BYTES, Column, measure

_PAGES_BYTES = 1 << 16
"""Allowance in bytes for levels and lengths in a column's pages, beside values."""

_TOKENS = pa.list_(pa.field("item", pa.int32(), nullable=False))
_KINDS = {
    "problem_id": pa.string(),
    "group": pa.int32(),
    "sample": pa.int32(),
    "sampling_seed": pa.uint64(),
    "target_length": pa.int32(),
    "policy_version": pa.uint32(),
    "prompt_tokens": _TOKENS,
    "completion_tokens": _TOKENS,
    "proofs": pa.binary(),
    "task_reward": pa.float64(),
}
SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _KINDS.items()])
"""Column names, types and order; checked for equality."""

# The only optional column: `require_bounds` takes a column after those of SCHEMA for it.
SCHEMA_WITH_REPLIES = SCHEMA.append(pa.field("replies", _TOKENS, nullable=False))
"""The schema of files with environment replies: with a flat list of the replies' bounds."""

_LISTS = ("prompt_tokens", "completion_tokens")

Spans = tuple[tuple[int, int], ...]
"""Half-open ranges of places in a completion, in order and not adjacent."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A sample with its proof and reward: one row."""

    problem_id: str
    """The problem's name in the task set."""
    group: int
    """Position of the problem in the ticket, from 0."""
    sample: int
    """Position of the sample in its group, from 0."""
    sampling_seed: int
    """The 64-bit seed of the Gumbel noise."""
    target_length: int
    """Length budget in tokens, -1 without one."""
    policy_version: int
    """The policy that generated the sample."""
    prompt_tokens: tuple[int, ...]
    """Prompt token ids."""
    completion_tokens: tuple[int, ...]
    """Completion token ids, with the EOS that ended it, if one did."""
    proofs: bytes
    """TOPLOC proofs of the chunks, one after the other."""
    task_reward: float
    """Score of the task's verifier, in [0, 1]."""
    replies: Spans = ()
    """Where in the completion an environment replied; the model sampled all other tokens."""

    @property
    def sampled(self) -> int:
        """How many of the completion's tokens the model sampled."""
        return len(self.completion_tokens) - sum(end - start for start, end in self.replies)


def sampled_places(length: int, replies: Spans) -> list[int]:
    """Return the places of a completion that the model sampled, in order."""
    ends = (0, *(end for _, end in replies))
    starts = (*(start for start, _ in replies), length)
    return [place for a, b in zip(ends, starts, strict=True) for place in range(a, b)]


def count_units(rollouts: Sequence[Rollout], max_new_tokens: int) -> int:
    """Return the units of rollouts: the tokens that the model sampled, capped per sample."""
    return sum(min(rollout.sampled, max_new_tokens) for rollout in rollouts)


def encode_rollouts(rollouts: list[Rollout]) -> bytes:
    """Return the Parquet bytes of a submission (zstd, one row group)."""
    columns: dict[str, list[Any]] = {n: [getattr(r, n) for r in rollouts] for n in SCHEMA.names}
    replies = [[place for span in rollout.replies for place in span] for rollout in rollouts]
    schema = SCHEMA_WITH_REPLIES if any(replies) else SCHEMA
    table = pa.Table.from_pydict(columns | {"replies": replies}, schema=schema)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", row_group_size=max(1, len(rollouts)))
    return buffer.getvalue()


def decode_rollouts(data: bytes, bounds: Bounds = ANY) -> list[Rollout]:
    """Parse a submission file.

    Raises EncodingError when the file is too large, exceeds the bounds, is not Parquet, has another
    schema, nulls, negative positions or token ids, an empty prompt or completion, a reward outside
    [0, 1], replies that are no places within their completion, or a column of replies without any.
    Raises MemoryError when the machine has less memory than the bounds allow: the file is not at
    fault.
    """
    require_bounds(data, bounds)
    return to_rollouts(read_table(data))


def require_bounds(data: bytes, bounds: Bounds) -> int:
    """Return the decoded bytes of a file's columns, by its headers alone.

    Raises EncodingError when this or any other number in the headers exceeds the bounds.
    """
    if len(data) > MAX_FILE_BYTES:
        raise EncodingError(f"file of {len(data)} bytes exceeds the limit of {MAX_FILE_BYTES}")
    measured = measure(data)
    rows, columns = measured.rows, measured.columns
    if rows > bounds.rows:
        raise EncodingError(f"file has {rows} rows, allowed are 1 to {bounds.rows}")
    lists = {
        "prompt_tokens": bounds.prompt_tokens,
        "completion_tokens": bounds.completion_tokens,
        "replies": bounds.completion_tokens,
    }
    strings = {"problem_id": MAX_PROBLEM_ID_BYTES, "proofs": bounds.proof_bytes}
    names, decoded = SCHEMA_WITH_REPLIES.names[: len(columns)], 0
    if [name in strings for name in names] != [column.width == 0 for column in columns]:
        raise EncodingError("file schema differs from docs/protocol.md section 7")
    for name, column in zip(names, columns, strict=True):
        values = rows * lists.get(name, 1)
        size = rows * strings[name] if name in strings else values * column.width
        if column.values > values or column.page_bytes > 2 * size + _PAGES_BYTES:
            raise EncodingError(
                f"file has {column.values} values of {name} in {column.page_bytes} bytes, "
                f"allowed are {values} in {size}"
            )
        decoded += column.values * column.width if column.width else column.page_bytes
        decoded += _longest(column, rows, strings.get(name, 0)) * column.values
    if decoded > MAX_UNCOMPRESSED_BYTES:
        raise EncodingError(f"file decodes to {decoded} bytes, limit {MAX_UNCOMPRESSED_BYTES}")
    return decoded


def _longest(column: Column, rows: int, most: int) -> int:
    """Return the bytes of the longest value in a column's dictionaries: any row may repeat it."""
    if sum(page.values for page in column.dictionaries) > rows:
        raise EncodingError("file has dictionaries of more values than rows")
    try:
        longest = max((page.longest() for page in column.dictionaries), default=0)
    except (OSError, ValueError) as error:
        raise EncodingError(f"not a readable Parquet file: {error}") from error
    if longest > most:
        raise EncodingError(f"file has a value of {longest} bytes, allowed are {most}")
    return longest


def read_table(data: bytes) -> pa.Table:
    """Return the rows of a file within bounds, for `to_rollouts`; raises as `decode_rollouts`."""
    try:
        file = pq.ParquetFile(
            pa.BufferReader(data),
            thrift_string_size_limit=MAX_FOOTER_BYTES,
            thrift_container_size_limit=MAX_FOOTER_BYTES,
        )
        if not any(file.schema_arrow.equals(known) for known in (SCHEMA, SCHEMA_WITH_REPLIES)):
            raise EncodingError("file schema differs from docs/protocol.md section 7")
        table = file.read(use_threads=False)
        table.validate(full=True)
        if table.num_rows != file.metadata.num_rows or any(c.null_count for c in table.columns):
            raise EncodingError("file has nulls or fewer rows than it states")
        table = table.replace_schema_metadata(None).combine_chunks()
        _require_in_range(table)
    except (pa.ArrowMemoryError, EncodingError):
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        raise EncodingError(f"not a readable Parquet file: {type(error).__name__}") from error
    return table


def _require_in_range(table: pa.Table) -> None:
    """Raise EncodingError for values that no rollout has; replies are checked row by row."""
    for name in ("prompt_tokens", "completion_tokens"):
        values, ends = _list_parts(table[name])
        if not (np.diff(ends) > 0).all():
            raise EncodingError("a row has an empty prompt or completion")
        if (values < 0).any():
            raise EncodingError("a row has a negative or null token id")
    least = {"group": 0, "sample": 0, "target_length": -1}
    if any((_numbers(table[name].chunk(0)) < bound).any() for name, bound in least.items()):
        raise EncodingError("a row has a negative position or target length")
    rewards = _numbers(table["task_reward"].chunk(0))
    if not ((rewards >= 0) & (rewards <= 1)).all():
        wrong = rewards[~((rewards >= 0) & (rewards <= 1))][0]
        raise EncodingError(f"a row has a reward outside [0, 1]: {float(wrong)!r}")
    if "replies" in table.column_names and not len(_list_parts(table["replies"])[0]):
        raise EncodingError("file has a column of replies and no reply")


def to_rollouts(table: pa.Table) -> list[Rollout]:
    """Return a table's rows; raises EncodingError for invalid replies."""
    names = [name for name in SCHEMA.names if name not in _LISTS]
    columns: list[list[Any]] = [table[name].to_pylist() for name in names]
    tokens = [_list_rows(table[name]) for name in _LISTS]
    replies = (
        _list_rows(table["replies"]) if "replies" in table.column_names else repeat((), len(table))
    )
    return [
        Rollout(
            **dict(zip(names, scalars, strict=True)),
            prompt_tokens=prompt,
            completion_tokens=completion,
            replies=_to_spans(places, len(completion)),
        )
        for *scalars, prompt, completion, places in zip(*columns, *tokens, replies, strict=True)
    ]


def _numbers(array: pa.Array) -> npt.NDArray[Any]:
    # Not `array.to_numpy`, which imports pandas, 45 MB.
    numbers: npt.NDArray[Any] = np.from_dlpack(array)
    return numbers


def _list_parts(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the values of all rows, and the bounds of each row's values among them."""
    chunk = column.chunk(0)
    ends = _numbers(chunk.offsets)
    return _numbers(chunk.flatten()), ends - ends[0]


def _list_rows(column: pa.ChunkedArray) -> Iterator[tuple[int, ...]]:
    # Row by row, so that other threads wait for the GIL for one row at most.
    values, ends = _list_parts(column)
    return (tuple(values[a:b].tolist()) for a, b in pairwise(ends.tolist()))


def _to_spans(places: tuple[int, ...], length: int) -> Spans:
    """Return replies as spans: each must stand between two tokens of the model."""
    bounds = [0, *places, length]
    if len(places) % 2 or (places and any(a >= b for a, b in pairwise(bounds))):
        raise EncodingError("a row has replies that are not within its completion")
    return tuple(zip(places[::2], places[1::2], strict=True))
