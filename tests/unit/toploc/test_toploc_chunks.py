"""Hidden states as bfloat16 patterns, and where chunks begin and end."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from muster.protocol.errors import ProofError
from muster.toploc import build_proofs
from muster.toploc.chunks import Patterns, cut, to_patterns


def test_patterns_pass_through_unchanged() -> None:
    rows = np.array([[0x3F80, 0x8000, 0x0001]], np.uint16)
    assert to_patterns(rows) is rows
    assert to_patterns(rows[:, ::-1]).tolist() == [[0x0001, 0x8000, 0x3F80]]


def test_patterns_may_lie_anywhere_in_memory() -> None:
    odd = np.frombuffer(b"\0" + np.array([1, 2], np.uint16).tobytes(), np.uint16, offset=1)
    made = to_patterns(odd.reshape(1, 2))
    assert made.tolist() == [[1, 2]]
    assert made.flags.aligned


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (1.0, 0x3F80),
        (-0.0, 0x8000),
        (1.0 + 2**-8, 0x3F80),
        (1.0 + 3 * 2**-8, 0x3F82),
        (1.0 + 2**-8 + 2**-20, 0x3F81),
        (1e-45, 0x0000),
        (3.38e38, 0x7F7E),
        (3.4e38, 0x7F80),
    ],
)
def test_floats_round_to_nearest_even(value: float, pattern: int) -> None:
    rounded = np.array([[value]], np.float32)
    assert to_patterns(rounded).tolist() == [[pattern]]
    assert to_patterns(torch.from_numpy(rounded)).tolist() == [[pattern]]


@given(st.integers(0x7F800001, 0x7FFFFFFF), st.booleans())
def test_every_float_nan_stays_one(bits: int, is_negative: bool) -> None:
    value = np.array([[bits | is_negative << 31]], np.uint32).view(np.float32)
    assert to_patterns(value)[0, 0] & 0x7FFF > 0x7F80


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
@pytest.mark.parametrize("rows", [1, 40])
def test_patterns_of_nan_and_infinity_are_refused(bits: int, rows: int) -> None:
    hidden = np.full((rows, 300), 0x3F80, np.uint16)
    hidden[-1, 7] = bits
    with pytest.raises(ProofError, match="NaN or infinity") as caught:
        build_proofs(hidden, topk=1)
    assert caught.value.reason == "hidden"


def samples() -> list[Patterns]:
    return [np.arange(10, dtype=np.uint16).reshape(5, 2), np.arange(6, dtype=np.uint16)[:, None]]


def test_chunks_are_the_samples_rows_in_order() -> None:
    chunks = cut(samples()[:1] * 2, chunk_tokens=2, topk=3)
    flat = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [chunk.tolist() for chunk in chunks] == flat * 2
    assert chunks.counts == [3, 3]
    assert chunks.sizes.tolist() == [4, 4, 2] * 2
    assert chunks.points.tolist() == [3, 3, 2] * 2
    assert chunks.proof_sizes == [8, 8, 6] * 2


def test_addresses_are_where_chunks_begin() -> None:
    chunks = cut(samples()[:1] * 2, chunk_tokens=2, topk=3)
    assert chunks.addresses.tolist() == [chunk.ctypes.data for chunk in chunks]


def test_addresses_do_not_hang_on_the_stride_of_a_single_row() -> None:
    # numpy allows any stride for an axis of length one.
    odd = np.lib.stride_tricks.as_strided(np.zeros((1, 2), np.uint16), (1, 2), (1000, 2))
    chunks = cut([odd, samples()[0]], chunk_tokens=2, topk=3)
    assert chunks.samples[0].strides == (1000, 2)
    assert chunks.addresses.tolist() == [chunk.ctypes.data for chunk in chunks]


def test_samples_of_different_width_are_refused() -> None:
    with pytest.raises(ProofError, match="hidden"):
        cut(samples(), chunk_tokens=2, topk=3)
