"""Verifiable sampling: the noise, the choice, the replay."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.inference import device_sampling, sampling
from muster.inference.sampling import gumbel_noise, noise_block, replay, replay_many, token_hashes

Logits = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

MASK = 0xFFFFFFFF
seeds_64 = st.integers(0, 2**64 - 1)
positions_32 = st.integers(0, 2**32 - 1)


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def specified_hash(seed: int, position: int, token: int) -> int:
    """docs/protocol.md section 5, word by word."""
    high, low = seed >> 32, seed & MASK
    a = mix(mix(low) ^ high)
    b = mix(mix(high ^ 0x9E3779B9) ^ low)
    k0 = mix(a ^ position)
    k1 = mix((b + position * 0x85EBCA6B) & MASK)
    return mix((mix(token ^ k0) + k1) & MASK)


@given(seeds_64, positions_32, st.integers(1, 40))
def test_hashes_are_the_specified_ones(seed: int, position: int, vocab: int) -> None:
    expected = [specified_hash(seed, position, token) for token in range(vocab)]
    assert token_hashes([seed], [position], vocab)[0].tolist() == expected
    on_device = device_sampling.token_hashes([seed], [position], vocab, device="cpu")
    assert on_device[0].tolist() == expected


def test_golden_hashes_never_change() -> None:
    assert token_hashes([0x0123456789ABCDEF], [5], 2).tolist() == [[1605467395, 2759489117]]


def test_noise_is_the_double_logarithm_of_the_hash() -> None:
    hashes = token_hashes([3, 4], [0, 9], 50)
    expected = [
        [np.float32(-math.log(-math.log((h + 0.5) / 2**32))) for h in row]
        for row in hashes.tolist()
    ]
    assert gumbel_noise([3, 4], [0, 9], 50) == pytest.approx(np.array(expected), rel=1e-6)


def test_noise_in_torch_agrees_to_the_last_bit_or_one_beside_it() -> None:
    seeds, positions = list(range(64)), list(range(64))
    ours = gumbel_noise(seeds, positions, 500)
    theirs = device_sampling.gumbel_noise(seeds, positions, 500, device="cpu").numpy()
    assert np.abs(ours.view(np.int32) - theirs.view(np.int32)).max() <= 1
    assert (ours == theirs).mean() > 0.999


def test_noise_of_a_row_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gumbel_noise(range(10), range(10), 33)
    monkeypatch.setattr(sampling, "_BLOCK_ELEMENTS", 100)
    assert (gumbel_noise(range(10), range(10), 33) == whole).all()
    assert (gumbel_noise([7], [7], 33)[0] == whole[7]).all()


def test_noise_block_holds_every_seed_at_every_position() -> None:
    block = noise_block([5, 2**63], range(3), 7)
    assert block.shape == (2, 3, 7)
    assert (block[1, 2] == gumbel_noise([2**63], [2], 7)[0]).all()


def test_noise_has_the_moments_of_a_gumbel_distribution() -> None:
    noise = gumbel_noise(range(200), range(200), 1000)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_choices_follow_the_softmax(temperature: float) -> None:
    logits = np.array([0.0, 1.0, -1.0, 0.5, 2.0, -3.0], np.float32)
    draws = 20_000
    noise = gumbel_noise(range(draws), [11] * draws, len(logits))
    temperatures = np.full(draws, temperature, np.float32)
    chosen = sampling.choose(np.tile(logits, (draws, 1)), noise, temperatures)
    weights = np.exp(logits / temperature)
    expected = draws * weights / weights.sum()
    counts = np.bincount(chosen, minlength=len(logits))
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 99.9 % quantile at 5 degrees of freedom


def test_choices_at_neighbouring_positions_are_independent() -> None:
    draws = 20_000
    first, second = (gumbel_noise(range(draws), [p] * draws, 2).argmax(axis=1) for p in (0, 1))
    agreement = (first == second).mean()
    assert agreement == pytest.approx(0.5, abs=0.015)


def test_smallest_id_wins_a_tie_in_numpy_and_torch() -> None:
    scores = np.array([[1, 3, 3, 3], [2, 2, 0, 2]], np.float32)
    none = np.zeros_like(scores)
    ones = np.ones(2, np.float32)
    assert sampling.choose(scores, none, ones).tolist() == [1, 0]
    on_device = device_sampling.choose(*(torch.from_numpy(a) for a in (scores, none, ones)))
    assert on_device.tolist() == [1, 0]


def sampled(seed: int, tokens: int = 12, vocab: int = 19) -> tuple[Logits, list[int]]:
    logits = np.random.default_rng(0).standard_normal((tokens, vocab)).astype(np.float32)
    noise = gumbel_noise([seed] * tokens, range(tokens), vocab)
    return logits, sampling.choose(logits, noise, np.full(tokens, 0.7, np.float32)).tolist()


@given(seeds_64)
def test_replay_of_the_right_seed_has_no_margin(seed: int) -> None:
    logits, tokens = sampled(seed)
    assert replay(logits, tokens, seed, 0.7).tolist() == [0.0] * len(tokens)


@given(seeds_64)
def test_replay_of_another_seed_shows(seed: int) -> None:
    logits, tokens = sampled(seed)
    assert replay(logits, tokens, seed ^ 1, 0.7).max() > 0.1


def test_replay_of_a_changed_token_shows_where_it_was_changed() -> None:
    logits, tokens = sampled(5)
    tokens[3] = (tokens[3] + 1) % 19
    margins = replay(logits, tokens, 5, 0.7)
    assert margins[3] > 0
    assert np.flatnonzero(margins).tolist() == [3]


def test_margin_is_the_distance_in_scaled_logits() -> None:
    logits, tokens = sampled(5)
    scores = logits[2] / np.float32(0.7) + gumbel_noise([5], [2], 19)[0]
    tokens[2] = int(scores.argmin())
    expected = scores.max() - scores.min()
    assert replay(logits, tokens, 5, 0.7)[2] == pytest.approx(expected)


@pytest.mark.parametrize("token", [-1, 19, 2**31 - 1])
def test_replay_of_an_unknown_token_is_infinitely_far(token: int) -> None:
    logits, tokens = sampled(5)
    tokens[0] = token
    assert replay(logits, tokens, 5, 0.7)[0] == np.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_replay_of_broken_logits_is_infinitely_far(bad: float) -> None:
    logits, tokens = sampled(5)
    logits[4, 1] = bad
    margins = replay(logits, tokens, 5, 0.7)
    assert margins[4] == np.inf
    assert margins[:4].tolist() == [0, 0, 0, 0]


def test_replay_of_many_equals_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [(*sampled(seed, tokens=seed + 1), seed) for seed in range(5)]
    monkeypatch.setattr(sampling, "_BLOCK_ELEMENTS", 50)
    together = replay_many(*(list(column) for column in zip(*samples, strict=True)), 0.7)
    for margins, (logits, tokens, seed) in zip(together, samples, strict=True):
        assert margins.tolist() == replay(logits, tokens, seed, 0.7).tolist()


def test_replay_of_no_samples_is_empty() -> None:
    assert replay_many([], [], [], 1.0) == []
