"""Measuring a Parquet file by its headers: honest ones whole, hostile ones refused undecoded."""

import struct
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings, strategies as st

from muster.lab.redteam.hostile import bad_files
from muster.protocol import parquet, rollouts, rollouts as module
from muster.protocol.errors import EncodingError
from muster.protocol.parquet import measure
from muster.protocol.recipe import ProofRecipe, Recipe, SamplingRecipe, TrainingRecipe

RECIPE = Recipe(
    name="bad files",
    sampling=SamplingRecipe(
        problems_per_submission=bad_files.ROWS // 2,
        samples_per_problem=2,
        temperature=1.0,
        max_new_tokens=bad_files.LIMIT,
    ),
    proof=ProofRecipe(chunk_tokens=bad_files.CHUNK_TOKENS, topk=bad_files.TOPK),
    training=TrainingRecipe(submissions_per_step=1),
)
BOUNDS = rollouts.Bounds.of(RECIPE, prompt_tokens=1024)
BAD = bad_files.bad_files(200_000)
LYING = "headers that all state fewer values"
"""A file in which all that can be checked without decoding is in order."""
ROW = rollouts.Rollout("p", 0, 0, 7, -1, 3, (1, 2), (3, 4), b"proof", 1.0)
FILE = rollouts.encode_rollouts([ROW, ROW])


def test_the_bounds_of_a_recipe_have_room_for_twice_its_lengths() -> None:
    assert rollouts.Bounds(8, 1024, 1280, 40 * 258) == BOUNDS
    assert rollouts.Bounds.of(RECIPE).prompt_tokens == module.MAX_UNCOMPRESSED_BYTES


def longest_rows(bounds: rollouts.Bounds, completion: int, *, seed: int) -> list[rollouts.Rollout]:
    """Rows whose values nothing compresses, as long as they may be; one token in two is a reply."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, 1 << 31, count).tolist())

    proofs = bounds.proof_bytes * completion // bounds.completion_tokens
    return [
        replace(
            ROW,
            problem_id=rng.bytes(rollouts.MAX_PROBLEM_ID_BYTES // 2).hex(),
            sampling_seed=int(rng.integers(0, 1 << 63)),
            prompt_tokens=tokens(bounds.prompt_tokens),
            completion_tokens=tokens(completion),
            proofs=rng.bytes(proofs),
            task_reward=float(rng.random()),
            replies=tuple((place, place + 1) for place in range(1, completion - 1, 2)),
        )
        for _ in range(bounds.rows)
    ]


@given(
    rows=st.integers(2, 64),
    length=st.sampled_from([1, 2, 33, 512, 4000]),
    topk=st.sampled_from([1, 16, 128]),
    chunk_tokens=st.sampled_from([1, 32]),
    prompt_tokens=st.sampled_from([264, 2000]),
)
@settings(max_examples=20)
def test_no_honest_file_is_larger_than_those_of_its_recipe(
    rows: int, length: int, topk: int, chunk_tokens: int, prompt_tokens: int
) -> None:
    sampling = SamplingRecipe(
        problems_per_submission=1,
        samples_per_problem=rows,
        temperature=1.0,
        max_new_tokens=length,
    )
    proof = ProofRecipe(chunk_tokens=chunk_tokens, topk=topk)
    recipe = RECIPE.model_copy(update={"sampling": sampling, "proof": proof})
    bounds = rollouts.Bounds.of(recipe, prompt_tokens=prompt_tokens)
    # No run is created with a recipe whose files do not fit.
    assume(bounds.file_bytes < module.MAX_FILE_BYTES)
    for completion in (length, bounds.completion_tokens):
        size = len(rollouts.encode_rollouts(longest_rows(bounds, completion, seed=rows)))
        assert size <= bounds.file_bytes


def test_files_of_a_recipe_have_room_for_their_rows_as_plain_values() -> None:
    # 4 bytes for each of 1024 + 2 * 1280 tokens, the proofs, the name, the numbers; 1 MiB more.
    assert BOUNDS.file_bytes == 8 * (4 * 3584 + 40 * 258 + 4096 + 64) + (1 << 20)
    assert rollouts.Bounds.of(RECIPE).file_bytes == module.MAX_FILE_BYTES


@pytest.mark.parametrize("name", sorted(BAD.keys() - {LYING}))
def test_a_file_beyond_the_recipe_is_refused_before_it_is_decoded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[object] = []
    monkeypatch.setattr(pq, "ParquetFile", lambda data, **_: decoded.append(data))
    with pytest.raises(EncodingError):
        rollouts.decode_rollouts(BAD[name], BOUNDS)
    assert decoded == []


def test_a_file_whose_headers_all_lie_is_refused_when_it_is_decoded() -> None:
    rollouts.require_bounds(BAD[LYING], BOUNDS)
    with pytest.raises(EncodingError):
        rollouts.decode_rollouts(BAD[LYING], BOUNDS)


@pytest.mark.parametrize("name", bad_files.odd_files())
def test_honest_rows_are_read_however_they_are_written(name: str) -> None:
    rows = rollouts.decode_rollouts(bad_files.odd_files()[name], BOUNDS)
    assert [len(row.completion_tokens) for row in rows] == [bad_files.LIMIT] * bad_files.ROWS


def test_values_and_bytes_of_an_honest_file_are_found() -> None:
    measured = measure(FILE)
    assert measured.rows == 2
    assert [column.values for column in measured.columns] == [2, 2, 2, 2, 2, 2, 4, 4, 2, 2]
    assert [column.width for column in measured.columns] == [0, 4, 4, 8, 4, 4, 4, 4, 0, 8]
    assert [d.longest() for column in measured.columns for d in column.dictionaries] == [1, 5]


def test_a_dictionary_of_fewer_values_than_it_states_is_refused() -> None:
    (page,) = measure(FILE).columns[0].dictionaries
    more = parquet.DictionaryPage(page.values + 1, page.size_bytes, page.codec, page.stored)
    with pytest.raises(EncodingError, match="ends before its last value"):
        more.longest()


def test_a_file_of_more_bytes_than_any_may_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNCOMPRESSED_BYTES", 100)
    with pytest.raises(EncodingError, match="file decodes to"):
        rollouts.decode_rollouts(FILE)


def _with_footer(footer: bytes) -> bytes:
    (size,) = struct.unpack("<I", FILE[-8:-4])
    return FILE[: -8 - size] + footer + struct.pack("<I", len(footer)) + b"PAR1"


@pytest.mark.parametrize(
    ("footer", "message"),
    [
        (b"\x36\x02\x06\x06\x02\0", "field 3, again"),  # the number of rows, twice
        (b"\x36\x02\x06\x86\x80\x08\x02\0", "too large"),  # field 65539, 3 in 16 bits
        (b"\x06\x01\x02\0", "field -1"),
        (b"\x49\x15\x02\0", "list of another type"),  # row groups that are numbers
        (b"\x4a\x1c\0\0", "field of type 10"),  # row groups that are a set
        (b"\x4b\0\0", "field of type 11"),
        (b"\x35" + b"\xff" * 5 + b"\x01\0", "too large"),
        (b"\x35" + b"\x80" * 10 + b"\0\0", "too long"),
        (b"\x35\x02\x19\x0c\0", "without field 3"),  # rows in a field of another type
        (b"\x58\x7f\0", "ends too early"),
        (b"\x36\x02\x19\x0c\x41\0", "signed or encrypted"),
    ],
)
def test_what_two_readers_could_read_differently_is_refused(footer: bytes, message: str) -> None:
    with pytest.raises(EncodingError, match=message):
        measure(_with_footer(footer))


def test_headers_of_too_many_fields_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    measure(FILE)
    monkeypatch.setattr(parquet, "MAX_FIELDS", 100)
    with pytest.raises(EncodingError, match="headers without end"):
        measure(FILE)


@given(st.integers(0, len(FILE) - 1), st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(place: int, byte: int) -> None:
    changed = FILE[:place] + bytes([byte]) + FILE[place + 1 :]
    try:
        measured = measure(changed)
    except EncodingError:
        return
    assert all(column.values >= 0 for column in measured.columns)
