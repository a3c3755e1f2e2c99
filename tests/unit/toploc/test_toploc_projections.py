"""Projections of hidden states: honest machines agree, and nobody else has a good guess.

Each prover knows as much as it can without computing this submission's states.
"""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from muster.protocol.encoding import keccak
from muster.toploc import projections
from muster.toploc.projections import (
    FINGERPRINT_BYTES,
    SAME,
    VALUES,
    balanced_signs,
    channel_signs,
    distance,
    failed_blocks,
    fingerprint,
    project,
    project_rows,
)

SEED, OTHER = keccak(b"mine"), keccak(b"another validator's")
TOKENS, WIDTH = 64, 48
Floats = npt.NDArray[np.float32]
Patterns = npt.NDArray[np.uint16]


def patterns(values: Floats) -> Patterns:
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def states(seed: int, tokens: int = TOKENS) -> Floats:
    """Hidden states like real ones: a strong common mean and some large channels."""
    random = np.random.default_rng(seed)
    loud = np.where(np.arange(WIDTH) % 16 == 0, 20.0, 1.0)
    mean = 3 * np.random.default_rng(99).normal(size=WIDTH) * loud
    return (mean + random.normal(size=(tokens, WIDTH)) * loud).astype(np.float32)


MINE = project(patterns(states(0)), SEED)


def test_fingerprint_is_what_the_sum_says() -> None:
    hidden = (patterns(states(0)).astype(np.uint32) << 16).view(np.float32).astype(float)
    rows, columns = balanced_signs(SEED, TOKENS), channel_signs(SEED, WIDTH)
    slow = [
        sum(rows[v, t] * columns[v, c] * hidden[t, c] for t in range(TOKENS) for c in range(WIDTH))
        / math.sqrt(TOKENS * WIDTH)
        for v in range(VALUES)
    ]
    assert np.allclose(np.frombuffer(MINE, "<f4"), slow, rtol=1e-5)
    assert len(MINE) == FINGERPRINT_BYTES


@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 65])
def test_signs_of_tokens_add_up_to_nothing_but_for_a_single_one(tokens: int) -> None:
    sums = balanced_signs(SEED, tokens).sum(axis=1)
    assert set(sums) == ({1.0} if tokens == 1 else {0.0})


@given(st.integers(2, 40), st.integers(1, 8), st.integers(0, 2**32))
def test_halves_are_those_of_sorted_keys(tokens: int, most: int, seed: int) -> None:
    keys = np.random.default_rng(seed).integers(0, most, (3, tokens)).astype(np.uint64)
    half, sorted_signs = tokens // 2, np.zeros((3, tokens), np.int8)
    order = np.argsort(keys, axis=1, kind="stable")
    np.put_along_axis(sorted_signs, order[:, :half], 1, axis=1)
    np.put_along_axis(sorted_signs, order[:, half : 2 * half], -1, axis=1)
    assert projections._by_halves(keys).tolist() == sorted_signs.tolist()


def test_signs_of_a_block_are_drawn_once_for_all_its_samples() -> None:
    parts, seed = np.split(patterns(states(0)), 4), keccak(b"drawn once")
    before = balanced_signs.cache_info().misses
    sums = sum(project_rows(part, seed, 16 * i, TOKENS) for i, part in enumerate(parts))
    assert balanced_signs.cache_info().misses == before + 1
    assert fingerprint(np.asarray(sums), TOKENS, WIDTH) == project(patterns(states(0)), seed)
    with pytest.raises(ValueError, match="read-only"):
        balanced_signs(seed, TOKENS)[0, 0] = 1


def test_rounding_of_another_number_format_is_within_the_tolerance() -> None:
    noisy = states(0) * (1 + np.random.default_rng(5).normal(size=(TOKENS, WIDTH)) * 0.01)
    assert 0 < distance(project(patterns(noisy), SEED), MINE) < SAME / 2


MEAN = np.repeat(states(1, 20_000).mean(axis=0)[None], TOKENS, axis=0)
GUESSES: dict[str, bytes] = {
    "zeros": bytes(FINGERPRINT_BYTES),
    "a constant": np.full(VALUES, 1.0, "<f4").tobytes(),
    "the model's mean state": project(patterns(MEAN), SEED),
    "another validator's fingerprint": project(patterns(states(0)), OTHER),
    "another submission's states": project(patterns(states(7)), SEED),
    "the states in another order": project(patterns(states(0)[::-1]), SEED),
    "the worker's largest entries": project(
        patterns(np.where(np.abs(states(0)) >= np.sort(np.abs(states(0)), None)[-128],
                          states(0), 0)), SEED
    ),
    "half of the tokens": project(
        patterns(np.concatenate([states(0)[:32], np.tile(states(0)[:32].mean(0), (32, 1))])), SEED
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GUESSES)
def test_guess_is_far_from_the_fingerprint(name: str) -> None:
    assert distance(GUESSES[name], MINE) > 3 * SAME


def test_best_constant_factor_of_a_wrong_guess_is_no_help() -> None:
    """Scaling does not make independent values fit, except by luck, which ends over many blocks."""
    seeds = [keccak(bytes([i])) for i in range(200)]
    real = [np.frombuffer(project(patterns(states(i)), s), "<f4") for i, s in enumerate(seeds)]
    other = [
        np.frombuffer(project(patterns(states(i + 500)), s), "<f4") for i, s in enumerate(seeds)
    ]
    best = [
        np.linalg.norm(a - (a @ b) / (b @ b) * b) / np.linalg.norm(a)
        for a, b in zip(real, other, strict=True)
    ]
    assert min(best) > SAME


@given(st.binary(max_size=2 * FINGERPRINT_BYTES))
def test_any_bytes_have_a_distance(claimed: bytes) -> None:
    assert distance(claimed, MINE) >= 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_infinitely_far(value: float) -> None:
    claimed = np.frombuffer(MINE, "<f4").copy()
    claimed[3] = value
    assert distance(claimed.tobytes(), MINE) == math.inf


def test_states_of_nothing_match_only_themselves() -> None:
    nothing = bytes(FINGERPRINT_BYTES)
    assert distance(nothing, nothing) == 0
    assert distance(MINE, nothing) == math.inf


def test_failed_blocks_are_counted_and_another_number_of_blocks_fails_all() -> None:
    whole = MINE * 3
    assert failed_blocks(whole, whole) == 0
    assert failed_blocks(MINE + bytes(FINGERPRINT_BYTES) + MINE, whole) == 1
    assert failed_blocks(MINE * 2, whole) == 3
    assert failed_blocks(b"", whole) == 3
    assert failed_blocks(whole, b"") == 0
