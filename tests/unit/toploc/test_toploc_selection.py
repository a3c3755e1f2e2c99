"""Which entries a proof commits to, and under which modulus."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.protocol.errors import ProofError
from muster.toploc import selection
from muster.toploc.field import PRIME
from muster.toploc.selection import find_moduli, join_patterns, select_top

patterns = st.lists(st.integers(0, 0xFF7F), min_size=1, max_size=60)


def ranked(values: list[int], count: int) -> set[int]:
    order = sorted(range(len(values)), key=lambda i: (-(values[i] & 0x7FFF), i))
    return set(order[:count])


@given(patterns, st.integers(1, 70))
def test_largest_magnitudes_are_chosen_and_ties_by_index(values: list[int], count: int) -> None:
    row = np.array([values], np.uint16)
    assert set(select_top(row, count)[0].tolist()) == ranked(values, count)


@given(st.lists(st.integers(0x3F80, 0x3F84), min_size=1, max_size=60), st.integers(1, 60))
def test_large_chunks_are_ranked_like_small_ones(values: list[int], count: int) -> None:
    row = np.array([values], np.uint16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "_SMALL_CHUNK", 0)
        chosen = select_top(row, count)[0].tolist()
    assert len(chosen) == min(count, len(values))
    assert set(chosen) == ranked(values, count)


def test_indices_below_the_field_keep_the_largest_modulus() -> None:
    indices = np.array([[0, 1, PRIME - 1], [5, 6, 7]])
    assert find_moduli(indices).tolist() == [PRIME, PRIME]


def test_each_chunk_gets_its_own_modulus() -> None:
    indices = np.array([[0, 1, 2], [5, 5 + PRIME, 9], [5, 5 + PRIME, 5 + PRIME - 1]])
    assert find_moduli(indices).tolist() == [PRIME, PRIME - 1, PRIME - 2]


@given(st.lists(st.integers(0, 5 * PRIME), min_size=2, max_size=40, unique=True))
def test_modulus_is_the_largest_that_keeps_indices_apart(indices: list[int]) -> None:
    (modulus,) = find_moduli(np.array([indices])).tolist()
    assert len({i % modulus for i in indices}) == len(indices)
    assert all(len({i % m for i in indices}) < len(indices) for m in range(modulus + 1, PRIME + 1))


def test_equal_indices_have_no_modulus() -> None:
    with pytest.raises(ProofError, match="no modulus"):
        find_moduli(np.array([[PRIME + 7, PRIME + 7]]))


def test_patterns_pass_through_unchanged() -> None:
    rows = np.array([[0x3F80, 0x8000, 0x0001]], np.uint16)
    joined, lengths = join_patterns([rows, rows[:, ::-1]])
    assert joined.tolist() == [[0x3F80, 0x8000, 0x0001], [0x0001, 0x8000, 0x3F80]]
    assert lengths == [1, 1]


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
    ],
)
def test_floats_round_to_nearest_even(value: float, pattern: int) -> None:
    joined, _ = join_patterns([np.array([[value]], np.float32)])
    assert joined.tolist() == [[pattern]]


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
def test_patterns_of_nan_and_infinity_are_refused(bits: int) -> None:
    with pytest.raises(ProofError, match="NaN or infinity"):
        join_patterns([np.array([[0x3F80, bits]], np.uint16)])


@given(st.integers(0x7F800001, 0x7FFFFFFF), st.booleans())
def test_every_float_nan_is_refused(bits: int, is_negative: bool) -> None:
    value = np.array([[bits | is_negative << 31]], np.uint32).view(np.float32)
    with pytest.raises(ProofError, match="NaN or infinity"):
        join_patterns([value])
