"""Which entries a proof commits to, and under which modulus."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from muster.protocol.errors import ProofError
from muster.toploc import portable
from muster.toploc.field import PRIME
from muster.toploc.portable import find_moduli, select_top

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
        patch.setattr(portable, "_SMALL_CHUNK", 0)
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
