"""Verifiable sampling: the noise and the choice."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from muster.inference import sampler, sampling
from muster.inference.sampling import gumbel_noise, token_hashes

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
    on_device = sampler._hash(sampler.keys_on([seed], [position], "cpu"), vocab)
    assert on_device.numpy().view(np.uint32)[0].tolist() == expected


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
    theirs = sampler._to_gumbel(
        sampler._hash(sampler.keys_on(seeds, positions, "cpu"), 500)
    ).numpy()
    assert np.abs(ours.view(np.int32) - theirs.view(np.int32)).max() <= 1
    assert (ours == theirs).mean() > 0.999


def test_noise_of_a_row_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gumbel_noise(range(10), range(10), 33)
    monkeypatch.setattr(sampling, "BLOCK_ELEMENTS", 100)
    assert (gumbel_noise(range(10), range(10), 33) == whole).all()
    assert (gumbel_noise([7], [7], 33)[0] == whole[7]).all()


def test_smallest_id_wins_a_tie_in_numpy_and_torch() -> None:
    # Such logits outweigh any noise.
    logits = np.array([[1, 3, 3, 3], [2, 2, 0, 2]], np.float32) * np.float32(1e30)
    asked = [1, 2], [0, 0], np.ones(2, np.float32)
    assert sampling.winners(logits, *asked)[0].tolist() == [1, 0]
    assert sampler.device_winners(torch.from_numpy(logits), *asked)[0].tolist() == [1, 0]


def test_noise_of_single_tokens_is_that_of_the_row() -> None:
    rows = gumbel_noise([8, 9], [0, 3], 50)
    assert sampling.token_noise([8, 9], [0, 3], [7, 49]).tolist() == [rows[0, 7], rows[1, 49]]
