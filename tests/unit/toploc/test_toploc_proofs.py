"""Building and verifying proofs."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from muster.protocol.errors import ProofError
from muster.toploc import (
    ChunkResult,
    build_proofs,
    build_proofs_many,
    verify_proofs,
    verify_proofs_many,
)
from muster.toploc.chunks import NO_MATCH

Patterns = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]

finite = st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7F80 != 0x7F80)
hidden_states = st.tuples(st.integers(1, 9), st.integers(1, 12)).flatmap(
    lambda shape: arrays(np.uint16, shape, elements=finite)
)


def gaussian(
    tokens: int, width: int, seed: int = 0
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((tokens, width)).astype(np.float32)


@given(hidden_states, st.integers(1, 5), st.integers(1, 20))
def test_own_proofs_verify_without_error(hidden: Patterns, chunk_tokens: int, topk: int) -> None:
    proofs = build_proofs(hidden, chunk_tokens=chunk_tokens, topk=topk)
    results = verify_proofs(hidden, proofs, chunk_tokens=chunk_tokens, topk=topk)
    assert len(results) == -(-len(hidden) // chunk_tokens)
    for result in results:
        assert result.exponent_mismatches == result.sign_mismatches == 0
        assert result.mantissa_error_mean == result.mantissa_error_median == 0


@given(hidden_states, st.integers(1, 5))
def test_points_are_topk_or_all_elements(hidden: Patterns, chunk_tokens: int) -> None:
    proofs = build_proofs(hidden, chunk_tokens=chunk_tokens, topk=16)
    rows = [len(hidden[i : i + chunk_tokens]) for i in range(0, len(hidden), chunk_tokens)]
    sizes = [2 + 2 * min(16, r * hidden.shape[1]) for r in rows]
    assert [len(proof) for proof in proofs] == sizes


def test_proof_has_258_bytes_at_the_customary_parameters() -> None:
    assert [len(p) for p in build_proofs(gaussian(64, 64))] == [258, 258]


@pytest.mark.parametrize("tokens", [1, 31, 32, 33])
def test_changed_hidden_states_are_far_from_the_proof(tokens: int) -> None:
    proofs = build_proofs(gaussian(tokens, 64))
    results = verify_proofs(gaussian(tokens, 64, seed=1), proofs)
    assert all(r.exponent_mismatches > r.points // 4 for r in results)


def test_negated_hidden_states_mismatch_in_every_sign() -> None:
    hidden = gaussian(8, 64)
    (result,) = verify_proofs(-hidden, build_proofs(hidden))
    assert (result.exponent_mismatches, result.sign_mismatches) == (0, 128)


def test_mantissa_errors_are_counted_in_units_of_the_last_bit() -> None:
    hidden = np.array([[0x4000, 0x4010, 0x4020, 0xC030, 0, 0, 0, 0]], np.uint16)
    other = hidden + np.array([[1, 2, 3, 10, 0, 0, 0, 0]], np.uint16)
    (result,) = verify_proofs(other, build_proofs(hidden))
    assert result.mantissa_error_mean == 4
    assert result.mantissa_error_median == 2.5
    assert result.points == 4


@pytest.mark.parametrize(("width", "points"), [(1, 1), (2, 1), (3, 1), (8, 4), (16, 5), (64, 5)])
def test_only_the_larger_half_of_a_small_chunk_is_compared(width: int, points: int) -> None:
    hidden = gaussian(1, width)
    smallest = np.abs(hidden).argsort(axis=1)[:, : width // 2]
    other = hidden.copy()
    np.put_along_axis(other, smallest, 0.0, axis=1)
    (result,) = verify_proofs(other, build_proofs(hidden, topk=5), topk=5)
    assert result == ChunkResult(0, 0.0, 0.0, 0, points, result.decoy_matches)


def test_exponents_that_all_differ_give_the_largest_error() -> None:
    hidden = np.array([[0x4000, 0x4010, 0x3000, 0x3000]], np.uint16)
    (result,) = verify_proofs(hidden + np.uint16(0x0100), build_proofs(hidden))
    assert result.exponent_mismatches == 2
    assert result.mantissa_error_mean == result.mantissa_error_median == NO_MATCH


def test_proofs_need_no_torch() -> None:
    script = "import sys, muster.toploc; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_torch_and_numpy_of_any_float_type_give_the_same_proofs() -> None:
    hidden = torch.from_numpy(gaussian(5, 64))
    rounded = hidden.to(torch.bfloat16)
    patterns = rounded.view(torch.int16).numpy().view(np.uint16)
    expected = build_proofs(patterns)
    assert build_proofs(hidden) == expected
    assert build_proofs(rounded) == expected
    assert build_proofs(hidden.numpy()) == expected
    assert build_proofs(rounded.float().numpy().astype(np.float64)) == expected
    half = hidden.to(torch.float16)
    assert build_proofs(half) == build_proofs(half.numpy())


@given(arrays(np.float32, 32, elements=st.floats(width=32, allow_infinity=False, allow_nan=False)))
def test_rounding_to_bfloat16_equals_torch(
    values: np.ndarray[tuple[int], np.dtype[np.float32]],
) -> None:
    kept = np.where(np.abs(values) < 3e38, values, 1)
    assert build_proofs(kept[None]) == build_proofs(torch.from_numpy(kept[None]).to(torch.bfloat16))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
@pytest.mark.parametrize("kind", [np.float32, torch.tensor])
def test_hidden_states_are_refused_when_not_finite(bad: float, kind: object) -> None:
    hidden = gaussian(3, 8)
    hidden[1, 2] = bad
    given_hidden = torch.from_numpy(hidden) if kind is torch.tensor else hidden
    with pytest.raises(ProofError, match="NaN or infinity") as caught:
        build_proofs(given_hidden)
    assert caught.value.reason == "hidden"


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4,), (2, 2, 2)])
def test_hidden_states_are_refused_when_not_rows(shape: tuple[int, ...]) -> None:
    with pytest.raises(ProofError, match=r"must be \[tokens, hidden\]"):
        build_proofs(np.ones(shape, np.float32))


def test_hidden_states_are_refused_when_of_integers() -> None:
    with pytest.raises(ProofError, match="floats or uint16"):
        build_proofs(np.ones((2, 4), np.int32))


def test_batches_equal_single_samples_when_lengths_differ() -> None:
    samples = [gaussian(tokens, 16, seed=tokens) for tokens in (1, 5, 40, 5, 64, 33)]
    together = build_proofs_many(samples)
    assert together == [build_proofs(sample) for sample in samples]
    assert verify_proofs_many(samples, together) == [
        verify_proofs(sample, proofs) for sample, proofs in zip(samples, together, strict=True)
    ]


def test_empty_batch_has_no_proofs() -> None:
    assert build_proofs_many([]) == verify_proofs_many([], []) == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_verification_refuses_any_other_number_of_proofs(count: int) -> None:
    hidden = gaussian(33, 64)
    proofs = (build_proofs(hidden) * 2)[:count]
    with pytest.raises(ProofError, match=f"{count} proofs for 2 chunks") as caught:
        verify_proofs(hidden, proofs)
    assert caught.value.reason == "count"


def test_verification_refuses_a_malformed_proof() -> None:
    hidden = gaussian(5, 64)
    with pytest.raises(ProofError) as caught:
        verify_proofs(hidden, [bytes(258)])
    assert caught.value.reason == "modulus"


def test_proofs_do_not_depend_on_memory_layout() -> None:
    hidden = gaussian(8, 64)
    assert build_proofs(np.asfortranarray(hidden)) == build_proofs(hidden)
    assert build_proofs(torch.from_numpy(hidden.T.copy()).T) == build_proofs(hidden)
