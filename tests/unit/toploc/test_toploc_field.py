"""Arithmetic over GF(65497)."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from muster.toploc.field import PRIME, evaluate, interpolate

residues = st.integers(0, PRIME - 1)
point_sets = st.lists(
    st.tuples(residues, residues), min_size=1, max_size=24, unique_by=lambda point: point[0]
)


def as_row(values: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]]:
    return np.array([values], np.uint32)


@given(point_sets)
def test_polynomial_passes_through_its_points(points: list[tuple[int, int]]) -> None:
    x, y = (as_row(list(column)) for column in zip(*points, strict=True))
    assert evaluate(interpolate(x, y), x).tolist() == y.tolist()


@given(st.lists(residues, min_size=1, max_size=24), residues)
def test_evaluation_equals_plain_arithmetic(coefficients: list[int], x: int) -> None:
    expected = sum(c * pow(x, power, PRIME) for power, c in enumerate(coefficients)) % PRIME
    assert evaluate(as_row(coefficients), as_row([x])).tolist() == [[expected]]


@given(point_sets)
def test_polynomial_does_not_depend_on_the_order_of_points(points: list[tuple[int, int]]) -> None:
    swapped = points[::-1]
    first = interpolate(*(as_row(list(c)) for c in zip(*points, strict=True)))
    second = interpolate(*(as_row(list(c)) for c in zip(*swapped, strict=True)))
    assert first.tolist() == second.tolist()


def test_line_through_two_points_has_the_expected_coefficients() -> None:
    # y = 7 + 3 x at x = 2 and 5
    assert interpolate(as_row([2, 5]), as_row([13, 22])).tolist() == [[7, 3]]


def test_constant_has_no_higher_terms() -> None:
    assert interpolate(as_row([4, 9, 1]), as_row([6, 6, 6])).tolist() == [[6, 0, 0]]


@pytest.mark.parametrize("batch", [1, 3, 513])
def test_batches_equal_single_polynomials(batch: int) -> None:
    random = np.random.default_rng(batch)
    x = np.stack([random.choice(PRIME, 40, replace=False) for _ in range(batch)]).astype(np.uint32)
    y = random.integers(0, PRIME, (batch, 40)).astype(np.uint32)
    together = interpolate(x, y)
    for row in {0, batch // 2, batch - 1}:
        assert together[row].tolist() == interpolate(x[row : row + 1], y[row : row + 1])[0].tolist()


def test_largest_residues_do_not_overflow() -> None:
    coefficients = np.full((1, 1024), PRIME - 1, np.uint32)
    x = as_row([PRIME - 1, 1])
    # -1 times the alternating sum of 1024 ones, and -1 times 1024.
    assert evaluate(coefficients, x).tolist() == [[0, (-1024) % PRIME]]
