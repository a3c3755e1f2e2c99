"""Submission files: round trips, caps, and total parsing of hostile bytes."""

import io
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies as st

from muster.protocol import rollouts, rollouts as module
from muster.protocol.errors import EncodingError

int31 = st.integers(0, 2**31 - 1)
rows = st.builds(
    rollouts.Rollout,
    problem_id=st.text(max_size=10),
    group=int31,
    sample=int31,
    sampling_seed=st.integers(0, 2**64 - 1),
    target_length=st.integers(-1, 2**31 - 1),
    policy_version=st.integers(0, 2**32 - 1),
    prompt_tokens=st.lists(int31, min_size=1, max_size=5).map(tuple),
    completion_tokens=st.lists(int31, min_size=1, max_size=5).map(tuple),
    proofs=st.binary(max_size=40),
    task_reward=st.floats(0, 1),
)
ROW = rollouts.Rollout("p", 0, 0, 7, -1, 3, (1, 2), (3, 4), b"proof", 1.0)
FILE = rollouts.encode_rollouts([ROW, replace(ROW, sample=1)])


@given(st.lists(rows, min_size=1, max_size=6))
def test_file_survives_a_round_trip(expected: list[rollouts.Rollout]) -> None:
    assert rollouts.decode_rollouts(rollouts.encode_rollouts(expected)) == expected


@st.composite
def dialogues(draw: st.DrawFn) -> rollouts.Rollout:
    row = draw(rows)
    tokens = draw(st.lists(int31, min_size=2, max_size=40))
    places = sorted(draw(st.sets(st.integers(1, len(tokens) - 1), max_size=8)))
    spans = tuple(zip(places[: len(places) // 2 * 2 : 2], places[1::2], strict=True))
    return replace(row, completion_tokens=tuple(tokens), replies=spans)


@given(st.lists(dialogues(), min_size=1, max_size=6))
def test_replies_survive_a_round_trip(expected: list[rollouts.Rollout]) -> None:
    data = rollouts.encode_rollouts(expected)
    assert rollouts.decode_rollouts(data) == expected
    has_column = "replies" in pq.ParquetFile(pa.BufferReader(data)).schema_arrow.names
    assert has_column == any(row.replies for row in expected)


@given(dialogues())
def test_sampled_places_are_those_outside_the_replies(row: rollouts.Rollout) -> None:
    length = len(row.completion_tokens)
    inside = {place for start, end in row.replies for place in range(start, end)}
    places = rollouts.sampled_places(length, row.replies)
    assert places == [place for place in range(length) if place not in inside]
    assert row.sampled == len(places)
    assert rollouts.count_units([row, row], 5) == 2 * min(5, len(places))


SIX = replace(ROW, completion_tokens=(1, 2, 3, 4, 5, 6))


@pytest.mark.parametrize(
    "replies", [((0, 2),), ((2, 6),), ((2, 2),), ((3, 2),), ((1, 3), (3, 5)), ((1, 9),), ((-1, 2),)]
)
def test_replies_outside_their_completion_are_refused(replies: rollouts.Spans) -> None:
    assert rollouts.decode_rollouts(
        rollouts.encode_rollouts([replace(SIX, replies=((1, 3), (4, 5)))])
    )
    with pytest.raises(EncodingError, match="not within its completion"):
        rollouts.decode_rollouts(rollouts.encode_rollouts([replace(SIX, replies=replies)]))


@pytest.mark.parametrize(("places", "message"), [([], "no reply"), ([1, 2, 4], "not within")])
def test_a_column_of_no_or_half_a_reply_is_refused(places: list[int], message: str) -> None:
    values = {name: getattr(SIX, name) for name in rollouts.SCHEMA.names} | {"replies": places}
    table = pa.Table.from_pylist([values], schema=rollouts.SCHEMA_WITH_REPLIES)
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    with pytest.raises(EncodingError, match=message):
        rollouts.decode_rollouts(buffer.getvalue())


@given(st.binary(max_size=300))
def test_decoding_is_total_over_bytes(data: bytes) -> None:
    with pytest.raises(EncodingError):
        rollouts.decode_rollouts(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": ()}, "empty prompt"),
        ({"completion_tokens": ()}, "empty prompt or completion"),
        ({"prompt_tokens": (-1,)}, "negative"),
        ({"completion_tokens": (1, -5)}, "negative"),
        ({"group": -1}, "negative position"),
        ({"sample": -1}, "negative position"),
        ({"target_length": -2}, "target length"),
        ({"task_reward": 1.5}, "reward outside"),
        ({"task_reward": -0.1}, "reward outside"),
        ({"task_reward": float("nan")}, "reward outside"),
    ],
)
def test_a_row_out_of_range_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EncodingError, match=message):
        rollouts.decode_rollouts(rollouts.encode_rollouts([replace(ROW, **change)]))


def test_more_rows_than_allowed_are_refused() -> None:
    with pytest.raises(EncodingError, match="2 rows, allowed are 1 to 1"):
        rollouts.decode_rollouts(FILE, rollouts.Bounds(rows=1))


def test_no_rows_are_refused() -> None:
    with pytest.raises(EncodingError, match="0 rows"):
        rollouts.decode_rollouts(rollouts.encode_rollouts([]))


def test_another_column_order_is_refused() -> None:
    table = pa.Table.from_pylist(
        [{n: getattr(ROW, n) for n in rollouts.SCHEMA.names}], schema=rollouts.SCHEMA
    )
    with pytest.raises(EncodingError, match="schema"):
        rollouts.decode_rollouts(_parquet(table.select(list(reversed(rollouts.SCHEMA.names)))))


def test_nulls_are_refused() -> None:
    nullable = pa.schema([field.with_nullable(True) for field in rollouts.SCHEMA])
    row = {n: getattr(ROW, n) for n in rollouts.SCHEMA.names} | {"task_reward": None}
    with pytest.raises(EncodingError):
        rollouts.decode_rollouts(_parquet(pa.Table.from_pylist([row], schema=nullable)))


def test_an_oversized_file_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10)
    with pytest.raises(EncodingError, match="exceeds the limit of 10"):
        rollouts.decode_rollouts(FILE)


def test_a_zip_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = rollouts.encode_rollouts([replace(ROW, proofs=bytes(4_000_000))])
    assert len(bomb) < 20_000
    monkeypatch.setattr(module, "MAX_UNCOMPRESSED_BYTES", 1_000_000)
    with pytest.raises(EncodingError, match="decodes to"):
        rollouts.decode_rollouts(bomb)


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()
