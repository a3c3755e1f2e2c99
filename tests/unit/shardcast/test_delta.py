"""Deltas of whole versions: the files come back bit by bit, or a named error does."""

import io
import random
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from delta_tensors import (
    Files,
    TensorBytes,
    applied,
    changed,
    delta_between,
    safetensors,
    sizes_of,
    states_of,
    tensors,
)
from hypothesis import given, settings, strategies as st
from shardcast_policies import write_files

from muster.protocol.errors import DeltaError
from muster.protocol.ids import Hash32
from muster.shardcast.delta import MAGIC, PART_BYTES, States, apply_delta, write_delta
from muster.shardcast.delta_block import BLOCK_FLOATS
from muster.shardcast.digests import state_hash

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """A folder that all examples of a property share."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[Files, Files]:
    """A version and the next one, of one or two weight files and a side file."""
    before = draw(tensors())
    after = draw(changed(before))
    metadata = draw(st.sampled_from(["pt", "np"]))
    old: Files = {WEIGHTS: safetensors(before), "config.json": b"{}"}
    new: Files = {WEIGHTS: safetensors(after, metadata), "config.json": draw(st.binary(max_size=9))}
    if draw(st.booleans()):
        half = dict(list(after.items())[::2])
        rest = {name: tensor for name, tensor in after.items() if name not in half}
        new |= {"a.safetensors": safetensors(half), WEIGHTS: safetensors(rest)}
    return old, new


@given(two_versions())
def test_version_is_rebuilt_bit_by_bit(scratch: Path, versions: tuple[Files, Files]) -> None:
    parent, fresh = versions
    delta = delta_between(scratch, parent, fresh)
    assert applied(scratch, parent, delta, sizes_of(fresh)) == fresh


@given(two_versions(), st.data())
@settings(max_examples=40)
def test_chain_makes_what_the_direct_delta_makes(
    scratch: Path, versions: tuple[Files, Files], data: st.DataObject
) -> None:
    first, second = versions
    third = {WEIGHTS: safetensors(data.draw(tensors())), "config.json": b"[]"}
    middle = applied(scratch, first, delta_between(scratch, first, second), sizes_of(second))
    chained = applied(scratch, middle, delta_between(scratch, middle, third), sizes_of(third))
    direct = applied(scratch, first, delta_between(scratch, first, third), sizes_of(third))
    assert chained == direct == third


@given(two_versions(), st.data())
def test_damaged_delta_is_a_delta_error_or_makes_files_of_the_same_sizes(
    scratch: Path, versions: tuple[Files, Files], data: st.DataObject
) -> None:
    parent, fresh = versions
    delta = bytearray(delta_between(scratch, parent, fresh))
    for _ in range(data.draw(st.integers(1, 3))):
        delta[data.draw(st.integers(0, len(delta) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        made = applied(scratch, parent, bytes(delta), sizes_of(fresh))
    except DeltaError:
        return
    assert sizes_of(made) == sizes_of(fresh)


def _weights(rng: random.Random, count: int) -> bytes:
    return b"".join((0x3C00 + rng.randrange(256)).to_bytes(2, "little") for _ in range(count))


def _example() -> tuple[Files, Files]:
    rng = random.Random(1)
    data = bytearray(_weights(rng, 2000))
    old = {WEIGHTS: safetensors({"w": TensorBytes("BF16", bytes(data))}), "config.json": b"{}"}
    data[::100] = bytes((byte + 1) % 256 for byte in data[::100])
    new = {WEIGHTS: safetensors({"w": TensorBytes("BF16", bytes(data))}), "config.json": b"{}"}
    return old, new


def test_small_change_makes_a_small_delta(tmp_path: Path) -> None:
    parent, fresh = _example()
    assert len(delta_between(tmp_path, parent, fresh)) < len(fresh[WEIGHTS]) / 20


def test_every_cut_is_refused(tmp_path: Path) -> None:
    parent, fresh = _example()
    delta = delta_between(tmp_path, parent, fresh)
    for length in range(72, len(delta)):
        with pytest.raises(DeltaError) as caught:
            applied(tmp_path, parent, delta[:length], sizes_of(fresh))
        assert caught.value.reason in {"truncated", "block", "target"}


def test_wrong_base_is_refused(tmp_path: Path) -> None:
    parent, fresh = _example()
    old, new = write_files(tmp_path / "old", parent), write_files(tmp_path / "new", fresh)
    states = states_of(old, new)
    delta = delta_between(tmp_path, parent, fresh)
    for wrong, reason in [
        (States(states.made, states.made), "base"),
        (States(states.parent, states.parent), "target"),
    ]:
        with pytest.raises(DeltaError) as caught:
            apply_delta(io.BytesIO(delta), old, tmp_path, sizes_of(fresh), states=wrong)
        assert caught.value.reason == reason


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


HEAD = MAGIC + bytes(64)
FILE = _varint(1) + b"f" + _varint(10)
"""Start of a delta, after HEAD, that makes the file f of ten bytes."""
LITERAL_TEN = bytes([2, 10]) + bytes(10)


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (b"MUSTERD2" + bytes(64) + FILE + LITERAL_TEN, "format"),
        (HEAD, "truncated"),
        (HEAD + _varint(1) + b"g" + _varint(10) + LITERAL_TEN, "target"),
        (HEAD + _varint(1) + b"f" + _varint(9) + LITERAL_TEN, "target"),
        (HEAD + FILE + bytes([0]), "format"),
        (HEAD + FILE + bytes([2, 0]), "bounds"),
        (HEAD + FILE + bytes([2, 11]) + bytes(11), "bounds"),
        (HEAD + FILE + bytes([2, 10]) + bytes(9), "truncated"),
        (HEAD + FILE + bytes([2]) + b"\xff" * 9 + b"\x01", "bounds"),
        (HEAD + FILE + bytes([1, 0, 0, 11]), "bounds"),
        (HEAD + FILE + bytes([1, 0, 5, 10]), "bounds"),
        (HEAD + FILE + bytes([1, 1, 0, 10]), "bounds"),
        (HEAD + FILE + bytes([1, 0]) + _varint((1 << 63) - 1) + bytes([10]), "bounds"),
        (HEAD + FILE + bytes([3, 0, 0, 6]), "bounds"),
        (HEAD + FILE + bytes([3, 0, 0, 0]), "bounds"),
        (HEAD + FILE + bytes([3, 0, 8, 5, 1, 0]), "bounds"),
        (HEAD + FILE + bytes([3, 0, 0, 5, 12]) + bytes(12), "bounds"),
        (HEAD + FILE + bytes([3, 0, 0, 5, 0]), "bounds"),
        (HEAD + FILE + bytes([3, 0, 0, 5, 1, 7]), "block"),
        (HEAD + FILE + LITERAL_TEN + bytes(1), "trailing"),
    ],
)
def test_malformed_delta_is_refused(tmp_path: Path, delta: bytes, reason: str) -> None:
    with pytest.raises(DeltaError) as caught:
        applied(tmp_path, {"base": bytes(12)}, delta, {"f": 10})
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "operations",
    [
        LITERAL_TEN,
        bytes([1, 0, 2, 10]),
        bytes([1, 0, 0, 4, 2, 6]) + bytes(6),
        bytes([3, 0, 1, 5, 1, 0]),
        bytes([5, 0, 0, 2, 1, 0, 2, 2]) + bytes(2),
    ],
)
def test_valid_twin_is_accepted(tmp_path: Path, operations: bytes) -> None:
    made = applied(tmp_path, {"base": bytes(12)}, HEAD + FILE + operations, {"f": 10})
    assert made == {"f": bytes(10)}


def test_delta_above_its_budget_is_given_up(tmp_path: Path) -> None:
    parent, fresh = _example()
    old, new = write_files(tmp_path / "old", parent), write_files(tmp_path / "new", fresh)
    states, size = states_of(old, new), len(delta_between(tmp_path, parent, fresh))
    assert write_delta(io.BytesIO(), new, old, states=states, max_bytes=size)
    assert not write_delta(io.BytesIO(), new, old, states=states, max_bytes=size - 1)


def test_tensor_that_moved_to_another_file_is_found(tmp_path: Path) -> None:
    data = _weights(random.Random(2), 5000)
    tensor = {"w": TensorBytes("BF16", data)}
    parent = {WEIGHTS: safetensors({"x": TensorBytes("U8", bytes(3)), **tensor})}
    fresh = {"part-1.safetensors": safetensors(tensor), "part-2.safetensors": safetensors({})}
    delta = delta_between(tmp_path, parent, fresh)
    assert applied(tmp_path, parent, delta, sizes_of(fresh)) == fresh
    assert len(delta) < 500


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"[" * 5000,
        b'{"w": 1}',
        b'{"w": {"dtype": "BF16", "data_offsets": [0, 8]}}',
        b'{"w": {"dtype": "BF16", "data_offsets": [-4, 4]}}',
        b'{"w": {"dtype": "BF16", "data_offsets": ["0", "x"]}}',
        b'{"v": {"dtype": "U8", "data_offsets": [0, 3]},'
        b' "w": {"dtype": "U8", "data_offsets": [2, 4]}}',
    ],
)
def test_broken_safetensors_is_treated_as_plain_bytes(tmp_path: Path, header: bytes) -> None:
    odd = len(header).to_bytes(8, "little") + header + b"data"
    parent, fresh = {WEIGHTS: odd}, {WEIGHTS: odd[:-1] + b"!"}
    delta = delta_between(tmp_path, parent, fresh)
    assert applied(tmp_path, parent, delta, sizes_of(fresh)) == fresh


def test_long_pieces_go_through_in_parts(tmp_path: Path) -> None:
    rng = random.Random(3)
    plain = rng.randbytes(PART_BYTES + 5)
    weights = bytearray(2 * (BLOCK_FLOATS + 3))
    parent = {"plain": plain, WEIGHTS: safetensors({"w": TensorBytes("BF16", bytes(weights))})}
    weights[-1] = 1
    fresh = {
        "plain": plain[:-1] + b"!",
        "other": plain,
        WEIGHTS: safetensors({"w": TensorBytes("BF16", bytes(weights))}),
    }
    delta = delta_between(tmp_path, parent, fresh)
    assert applied(tmp_path, parent, delta, sizes_of(fresh)) == fresh


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    rng = random.Random(4)
    data = bytearray(rng.randbytes(1 << 20) * 96)
    old = write_files(tmp_path / "old", {WEIGHTS: safetensors({"w": TensorBytes("BF16", data)})})
    data[:: 1 << 12] = bytes(len(data) >> 12)
    new = write_files(tmp_path / "new", {WEIGHTS: safetensors({"w": TensorBytes("BF16", data)})})
    sizes = {WEIGHTS: new[WEIGHTS].stat().st_size}
    del data
    states = States(Hash32(bytes(32)), Hash32(state_hash(new)))
    tracemalloc.start()
    with (tmp_path / "delta").open("w+b") as file:
        assert write_delta(file, new, old, states=states, max_bytes=1 << 30)
        file.seek(0)
        apply_delta(file, old, tmp_path, sizes, states=states)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert state_hash({WEIGHTS: tmp_path / WEIGHTS}) == states.made
    assert peak < 64 << 20
