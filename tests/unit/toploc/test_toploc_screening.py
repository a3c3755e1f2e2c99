"""Decoys: the claims of an honest proof, and of one that claims the same everywhere."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from muster.toploc import build_proofs_many, verify_proofs, verify_proofs_many
from muster.toploc.chunks import DECOYS, Patterns
from muster.toploc.field import PRIME, Residues, evaluate, interpolate
from muster.toploc.portable import choose, decoy_matches, has_decoys
from muster.toploc.wire import ChunkShape, decode

ROWS, HIDDEN, TOPK = 16, 64, 32


def states(count: int, seed: int = 0, *, hidden: int = HIDDEN) -> Patterns:
    """Gaussian hidden states, on which constants fit best."""
    values = np.random.default_rng(seed).standard_normal((count, ROWS, hidden), np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def constant(value: int, points: int = TOPK) -> bytes:
    return np.array([PRIME, value, *[0] * (points - 1)], ">u2").tobytes()


def decoys(patterns_BE: Patterns, moduli: Residues, coefficients: Residues) -> Any:
    return decoy_matches(choose(patterns_BE, coefficients.shape[1]), moduli, coefficients)


def matches(patterns_BTH: Patterns, proofs: list[bytes]) -> list[int]:
    found = verify_proofs_many(list(patterns_BTH), [[p] for p in proofs], topk=TOPK)
    return [results[0].decoy_matches for results in found]


def test_honest_proofs_match_decoys_by_chance_only() -> None:
    given_states = states(400)
    proofs = [built[0] for built in build_proofs_many(list(given_states), topk=TOPK)]
    found = matches(given_states, proofs)
    assert max(found) <= DECOYS // 4
    assert sum(found) / len(found) < 0.06 * DECOYS


def test_constant_that_fits_the_largest_entries_matches_every_decoy() -> None:
    given_states = states(50)
    typical = int(np.median(np.sort((given_states & 0x7FFF).reshape(50, -1))[:, -TOPK:]))
    assert min(matches(given_states, [constant(typical)] * 50)) >= DECOYS - 1


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_sign_of_a_claim_does_not_matter(sign: int) -> None:
    given_states = states(1)
    assert matches(given_states, [constant(0x4000 | sign)]) == [DECOYS]


@pytest.mark.parametrize("value", [0, 0x7F00])
def test_claims_below_a_decoy_and_above_the_largest_entry_are_no_matches(value: int) -> None:
    assert matches(states(1), [constant(value)]) == [0]


def test_line_through_two_large_entries_matches_no_more_than_chance() -> None:
    """A polynomial of low degree is pseudo-random outside its own points, unless it is constant."""
    given_states = states(20)
    x, y = np.array([[3, 700]], np.uint32), np.array([[0x4000, 0x4010]], np.uint32)
    coefficients = np.zeros((20, TOPK), np.uint32)
    coefficients[:, :2] = interpolate(x, y)
    moduli = np.full(20, PRIME, np.uint32)
    assert decoys(given_states.reshape(20, -1), moduli, coefficients).max() <= DECOYS // 4


@given(st.integers(0, 2**32 - 1))
def test_matches_are_what_the_definition_says(seed: int) -> None:
    patterns = states(1, seed).reshape(1, -1)
    random = np.random.default_rng(seed)
    coefficients = random.integers(0, PRIME, (1, TOPK)).astype(np.uint32)
    expected, largest = 0, int((patterns & 0x7FFF).max())
    for group in range(DECOYS):
        pool = [i * (patterns.size - 1) // 127 for i in range(4 * group, 4 * group + 4)]
        place = min(pool, key=lambda i: int(patterns[0, i]) & 0x7FFF)
        claim = int(evaluate(coefficients, np.array([[place]], np.uint32))[0, 0]) & 0x7FFF
        expected += (int(patterns[0, place]) & 0x7FFF) < claim <= largest
    moduli = np.full(1, PRIME, np.uint32)
    assert decoys(patterns, moduli, coefficients).tolist() == [expected]


def test_modulus_of_a_proof_applies_to_decoys() -> None:
    wide = states(1, hidden=4200)
    proof = build_proofs_many(list(wide), topk=TOPK)[0][0]
    shape = ChunkShape(elements=ROWS * 4200, points=TOPK)
    moduli, coefficients = decode([proof], shape)
    assert verify_proofs(wide[0], [proof], topk=TOPK)[0].decoy_matches == int(
        decoys(wide.reshape(1, -1), moduli, coefficients)[0]
    )


@pytest.mark.parametrize(
    ("elements", "points", "expected"),
    [(127, 1, False), (128, 1, True), (255, 128, False), (256, 128, True), (64, 64, False)],
)
def test_small_chunks_have_no_decoys(elements: int, points: int, expected: bool) -> None:
    assert has_decoys(elements, points) is expected
    patterns = np.full((1, elements), 0x3F80, np.uint16)
    coefficients = np.full((1, points), 0, np.uint32)
    moduli = np.full(1, PRIME, np.uint32)
    coefficients[0, 0] = 0x3F80
    assert decoys(patterns, moduli, coefficients).tolist() == [0]
