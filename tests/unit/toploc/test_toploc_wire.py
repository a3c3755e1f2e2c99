"""Parsing of proofs: strict, and total."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from muster.protocol.errors import ProofError
from muster.toploc import split_proofs, wire

PARAMETERS = {"hidden_size": 4, "chunk_tokens": 2, "topk": 3}
LARGE = wire.ChunkShape(elements=1 << 17, points=3)


def proof(points: int = 3, modulus: int = 65497, coefficient: int = 7) -> bytes:
    words = [modulus] + [coefficient] * points
    return b"".join(word.to_bytes(2, "big") for word in words)


def split(joined: bytes, tokens: int = 3, **changes: int) -> list[bytes]:
    return split_proofs(joined, tokens=tokens, **{**PARAMETERS, **changes})


def test_joined_proofs_split_at_chunk_boundaries() -> None:
    assert split(proof() + proof()) == [proof(), proof()]


def test_last_proof_is_shorter_when_its_chunk_has_fewer_elements() -> None:
    joined = proof(points=8) + proof(points=4)
    assert split(joined, topk=128) == [proof(points=8), proof(points=4)]


@pytest.mark.parametrize(
    ("joined", "reason"),
    [
        (b"", "count"),
        (proof(), "count"),
        (proof() * 3, "count"),
        (proof() * 2 + b"\0", "count"),
        ((proof() * 2)[:-1], "length"),
        (proof() + bytes(8), "modulus"),
        (proof(modulus=65496) + proof(), "modulus"),
        (proof() + proof(modulus=65498), "modulus"),
        (proof() + proof(coefficient=65497), "coefficient"),
        (proof(coefficient=0xFFFF) + proof(), "coefficient"),
    ],
)
def test_proofs_are_refused_for_the_named_reason(joined: bytes, reason: str) -> None:
    with pytest.raises(ProofError) as caught:
        split(joined)
    assert caught.value.reason == reason


def wide(modulus: int) -> bytes:
    """A proof of a chunk of 65498 elements, one more than the field has."""
    return proof(modulus=modulus)


@pytest.mark.parametrize("modulus", [64473, 65496, 65497])
def test_modulus_of_a_chunk_larger_than_the_field_may_be_smaller(modulus: int) -> None:
    assert split(wide(modulus), tokens=2, hidden_size=32749) == [wide(modulus)]


@pytest.mark.parametrize("modulus", [0, 3, 64472, 65498, 65535])
def test_modulus_is_refused_beyond_its_bounds(modulus: int) -> None:
    with pytest.raises(ProofError, match=r"outside \[64473, 65497\]"):
        split(wide(modulus), tokens=2, hidden_size=32749)


@pytest.mark.parametrize(("points", "least"), [(512, 64473), (513, 513), (1024, 1024)])
def test_many_points_of_a_large_chunk_may_need_a_smaller_modulus(points: int, least: int) -> None:
    assert wire.ChunkShape(elements=65498, points=points).smallest_modulus == least


def test_chunk_with_more_elements_than_indices_is_refused() -> None:
    with pytest.raises(ProofError, match="too large"):
        split(proof(), tokens=2, hidden_size=2**31)


@pytest.mark.parametrize("change", ["tokens", "hidden_size", "chunk_tokens", "topk"])
def test_parameters_are_refused_when_not_positive(change: str) -> None:
    with pytest.raises(ProofError, match="no chunks"):
        split(proof(), **{change: 0})


@given(st.binary(max_size=80), st.integers(1, 9), st.integers(1, 4), st.integers(1, 9))
def test_any_bytes_parse_or_are_refused(
    joined: bytes, tokens: int, chunk_tokens: int, topk: int
) -> None:
    outcome = attempt(joined, tokens, chunk_tokens, topk)
    if isinstance(outcome, str):
        assert outcome in {"count", "length", "modulus", "coefficient"}
    else:
        assert b"".join(outcome) == joined
        assert len(outcome) == -(-tokens // chunk_tokens)


def attempt(joined: bytes, tokens: int, chunk_tokens: int, topk: int) -> list[bytes] | str:
    try:
        return split(joined, tokens, chunk_tokens=chunk_tokens, topk=topk)
    except ProofError as error:
        return error.reason


@given(st.integers(0, 15), st.integers(0, 0xFFFF))
def test_every_accepted_change_of_a_word_is_canonical(place: int, word: int) -> None:
    joined = bytearray(proof() * 4)
    joined[2 * place : 2 * place + 2] = word.to_bytes(2, "big")
    is_valid = word == 65497 if place % 4 == 0 else word < 65497
    if is_valid:
        assert b"".join(split(bytes(joined), tokens=8)) == joined
    else:
        with pytest.raises(ProofError):
            split(bytes(joined), tokens=8)


@pytest.mark.parametrize("size", [0, 7, 9, 258])
def test_proof_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(ProofError, match=f"proof of {size} bytes, expected 8") as caught:
        wire.decode([proof(), bytes(size)], LARGE)
    assert caught.value.reason == "length"


@given(
    st.lists(
        st.tuples(
            st.integers(64473, 65497), st.lists(st.integers(0, 65496), min_size=3, max_size=3)
        ),
        min_size=1,
        max_size=5,
    )
)
def test_encoded_proofs_decode_to_the_same_numbers(rows: list[tuple[int, list[int]]]) -> None:
    moduli = np.array([modulus for modulus, _ in rows], np.uint32)
    coefficients = np.array([c for _, c in rows], np.uint32)
    decoded = wire.decode(wire.encode(moduli, coefficients), LARGE)
    assert decoded[0].tolist() == moduli.tolist()
    assert decoded[1].tolist() == coefficients.tolist()
