"""The submission file: one Parquet row per sample, groups in ticket order, samples in order.

`decode_rollouts` checks schema, ranges and sizes. The Parquet library below it aborts the process
on some damaged files, so files nobody has judged are decoded in a child process
(`muster.client.validator.decoding`).
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from muster.protocol.errors import EncodingError

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Files above this are refused unread."""
MAX_ROWS = 65_535
"""Rows above this are refused: the outcome record counts them in 16 bits."""
MAX_UNCOMPRESSED_BYTES = 256 * 1024 * 1024
"""Decoded size above which a file is refused: a guard against zip bombs."""

SCHEMA = pa.schema(
    [
        pa.field("problem_id", pa.string(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("sampling_seed", pa.uint64(), nullable=False),
        pa.field("target_length", pa.int32(), nullable=False),
        pa.field("policy_version", pa.uint32(), nullable=False),
        pa.field(
            "prompt_tokens", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False
        ),
        pa.field(
            "completion_tokens",
            pa.list_(pa.field("item", pa.int32(), nullable=False)),
            nullable=False,
        ),
        pa.field("proofs", pa.binary(), nullable=False),
        pa.field("task_reward", pa.float64(), nullable=False),
    ]
)
"""Column names, types and order; checked for equality."""

SCHEMA_WITH_REPLIES = SCHEMA.append(
    pa.field("replies", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False)
)
"""Of files in which a completion was replied to: the replies' first and last places, flat."""

Spans = tuple[tuple[int, int], ...]
"""Places in a completion, half-open, in order, none next to another."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A sample with its proof and reward: one row."""

    problem_id: str
    """The problem, as the task set names it."""
    group: int
    """Position of the problem in the ticket, from 0."""
    sample: int
    """Position of the sample in its group, from 0."""
    sampling_seed: int
    """The 64-bit seed of the Gumbel noise."""
    target_length: int
    """Length budget in tokens, -1 without one."""
    policy_version: int
    """The policy that generated."""
    prompt_tokens: tuple[int, ...]
    """Prompt token ids."""
    completion_tokens: tuple[int, ...]
    """Completion token ids, with the EOS that ended it, if one did."""
    proofs: bytes
    """TOPLOC proofs of the chunks, one after the other."""
    task_reward: float
    """Score of the task's verifier, in [0, 1]."""
    replies: Spans = ()
    """Where in the completion an environment replied; the model sampled all else."""

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
    """Return what rollouts are paid for: the tokens that the model sampled, capped per sample."""
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


def decode_rollouts(data: bytes, *, max_rows: int = MAX_ROWS) -> list[Rollout]:
    """Parse a submission file of at most `max_rows` rows.

    Raises EncodingError when the file is too large, is not Parquet, has another schema, nulls,
    negative positions or token ids, an empty prompt or completion, a reward outside [0, 1], replies
    that are no places within their completion, or a column of replies without any.
    """
    if len(data) > MAX_FILE_BYTES:
        raise EncodingError(f"file of {len(data)} bytes exceeds the limit of {MAX_FILE_BYTES}")
    try:
        rows = _read_rows(data, max_rows)
    except (pa.ArrowException, OSError, ValueError, TypeError, MemoryError, OverflowError) as error:
        if isinstance(error, EncodingError):
            raise
        raise EncodingError(f"not a readable Parquet file: {type(error).__name__}") from error
    return [_to_rollout(row) for row in rows]


def _read_rows(data: bytes, max_rows: int) -> list[dict[str, Any]]:
    file = pq.ParquetFile(
        pa.BufferReader(data),
        thrift_string_size_limit=1 << 20,
        thrift_container_size_limit=1 << 16,
    )
    meta = file.metadata
    if not 1 <= meta.num_rows <= max_rows:
        raise EncodingError(f"file has {meta.num_rows} rows, allowed are 1 to {max_rows}")
    sizes = [
        meta.row_group(g).column(c).total_uncompressed_size
        for g in range(meta.num_row_groups)
        for c in range(meta.num_columns)
    ]
    if min(sizes, default=0) < 0 or sum(sizes) > MAX_UNCOMPRESSED_BYTES:
        raise EncodingError(f"file decodes to {sum(sizes)} bytes, limit {MAX_UNCOMPRESSED_BYTES}")
    if not any(file.schema_arrow.equals(known) for known in (SCHEMA, SCHEMA_WITH_REPLIES)):
        raise EncodingError("file schema differs from docs/protocol.md section 7")
    table = file.read(use_threads=False)
    table.validate(full=True)
    if table.num_rows != meta.num_rows or any(c.null_count for c in table.columns):
        raise EncodingError("file has nulls or fewer rows than it states")
    rows: list[dict[str, Any]] = table.to_pylist()
    if "replies" in table.column_names and not any(row["replies"] for row in rows):
        raise EncodingError("file has a column of replies and no reply")
    return rows


def _to_rollout(row: dict[str, Any]) -> Rollout:
    prompt, completion = row["prompt_tokens"], row["completion_tokens"]
    if not prompt or not completion:
        raise EncodingError("a row has an empty prompt or completion")
    if any(t is None or t < 0 for t in prompt) or any(t is None or t < 0 for t in completion):
        raise EncodingError("a row has a negative or null token id")
    if row["group"] < 0 or row["sample"] < 0 or row["target_length"] < -1:
        raise EncodingError("a row has a negative position or target length")
    if not (math.isfinite(row["task_reward"]) and 0 <= row["task_reward"] <= 1):
        raise EncodingError(f"a row has a reward outside [0, 1]: {row['task_reward']!r}")
    replies = _to_spans(row.get("replies", []), len(completion))
    tokens = {"prompt_tokens": tuple(prompt), "completion_tokens": tuple(completion)}
    return Rollout(**{**row, **tokens, "replies": replies})


def _to_spans(places: list[int], length: int) -> Spans:
    """Return replies as spans: each after a token of the model's, and before one."""
    bounds = [0, *places, length]
    if len(places) % 2 or (places and any(a >= b for a, b in pairwise(bounds))):
        raise EncodingError("a row has replies that are not within its completion")
    return tuple(zip(places[::2], places[1::2], strict=True))
