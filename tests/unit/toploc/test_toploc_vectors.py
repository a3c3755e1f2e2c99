"""Byte equality with the reference library, and with Lagrange's formula in plain Python."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toploc_cases import CASES, Case

from muster.toploc import build_proofs, split_proofs, verify_proofs

PRIME = 65497
VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text())["vectors"]


def by_label(case: Case) -> dict[str, Any]:
    found: dict[str, Any] = next(v for v in VECTORS if v["label"] == case.label)
    return found


def parameters(case: Case) -> dict[str, int]:
    return {"chunk_tokens": case.chunk_tokens, "topk": case.topk}


def lagrange_proof(values: list[int], topk: int) -> bytes:
    """A proof the slow way: sort, count down the modulus, add up Lagrange's basis polynomials."""
    ranked = sorted(range(len(values)), key=lambda i: (-(values[i] & 0x7FFF), i))
    chosen = ranked[: min(topk, len(values))]
    modulus = PRIME
    while len({i % modulus for i in chosen}) < len(chosen):
        modulus -= 1
    points = [(i % modulus, values[i] % PRIME) for i in chosen]
    total = [0] * len(points)
    for at, value in points:
        basis, scale = [1], value
        for other, _ in points:
            if other != at:
                shifted = [0, *basis]
                basis = [(s - other * b) % PRIME for s, b in zip(shifted, [*basis, 0], strict=True)]
                scale = scale * pow(at - other, -1, PRIME) % PRIME
        total = [(t + scale * b) % PRIME for t, b in zip(total, basis, strict=True)]
    return b"".join(word.to_bytes(2, "big") for word in [modulus, *total])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_proofs_equal_the_reference_library(case: Case) -> None:
    proofs = build_proofs(case.patterns(), **parameters(case))
    assert [proof.hex() for proof in proofs] == by_label(case)["proofs"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_verification_equals_the_reference_library(case: Case) -> None:
    proofs = [bytes.fromhex(proof) for proof in by_label(case)["proofs"]]
    results = verify_proofs(case.perturbed(), proofs, **parameters(case))
    measured = [
        [r.exponent_mismatches, r.mantissa_error_mean, r.mantissa_error_median] for r in results
    ]
    assert measured == [[e, pytest.approx(mean), m] for e, mean, m in by_label(case)["perturbed"]]
    assert [r.sign_mismatches for r in results] == [0] * len(results)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_reference_proofs_split_into_their_chunks(case: Case) -> None:
    proofs = [bytes.fromhex(proof) for proof in by_label(case)["proofs"]]
    split = split_proofs(
        b"".join(proofs), tokens=case.tokens, hidden_size=case.hidden_size, **parameters(case)
    )
    assert split == proofs


def test_some_vector_needs_a_smaller_modulus() -> None:
    moduli = {int(proof[:4], 16) for v in VECTORS for proof in v["proofs"]}
    assert min(moduli) < PRIME
    assert max(moduli) == PRIME


@pytest.mark.parametrize(("rows", "width", "topk"), [(1, 8, 16), (3, 7, 5), (5, 64, 128)])
@pytest.mark.parametrize("seed", range(3))
def test_proofs_equal_lagrange_when_values_tie(rows: int, width: int, topk: int, seed: int) -> None:
    # Eight magnitudes only: ties at the cut, which the canonical order decides.
    drawn = np.random.default_rng(seed).integers(0x3F80, 0x3F88, (rows, width))
    signs = np.random.default_rng(seed + 9).integers(0, 2, (rows, width)) << 15
    patterns = (drawn | signs).astype(np.uint16)
    expected = lagrange_proof(patterns.ravel().tolist(), topk)
    assert build_proofs(patterns, topk=topk) == [expected]


def test_large_chunk_equals_lagrange_when_values_tie() -> None:
    drawn = np.random.default_rng(0).integers(0x3F80, 0x3FA0, (32, 512)).astype(np.uint16)
    assert build_proofs(drawn, topk=48) == [lagrange_proof(drawn.ravel().tolist(), 48)]


def test_indices_beyond_the_field_get_a_smaller_modulus() -> None:
    patterns = np.zeros((1, 3 * PRIME), np.uint16)
    patterns[0, [5, 5 + PRIME, 5 + PRIME - 1]] = [0x4000, 0x4001, 0x4002]
    (proof,) = build_proofs(patterns, topk=3)
    # 65497 folds 5 and 5 + 65497 together, 65496 folds 5 and 5 + 65496; 65495 keeps all apart.
    assert int.from_bytes(proof[:2], "big") == PRIME - 2
    (result,) = verify_proofs(patterns, [proof], topk=3)
    assert (result.exponent_mismatches, result.mantissa_error_mean) == (0, 0)
