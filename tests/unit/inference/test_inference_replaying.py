"""The replay of verifiable sampling: its measurements, on every path, in bounded memory."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from worlds.replays import replay_sample

from muster.inference import sampler, sampling
from muster.inference.sampling import gumbel_noise, replay_block

Logits = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

VOCAB, T = 19, 0.7
seeds_64 = st.integers(0, 2**64 - 1)


def sampled(seed: int, tokens: int = 12, vocab: int = VOCAB) -> tuple[Logits, list[int]]:
    logits = np.random.default_rng(0).standard_normal((tokens, vocab)).astype(np.float32)
    noise = gumbel_noise([seed] * tokens, range(tokens), vocab)
    return logits, (logits / np.float32(T) + noise).argmax(axis=1).tolist()


def margins_of(logits: Logits, tokens: list[int], seed: int) -> Logits:
    return replay_sample(logits, tokens, seed, T)[0]


@given(seeds_64)
def test_right_seed_has_no_margin(seed: int) -> None:
    logits, tokens = sampled(seed)
    margins, expected = replay_sample(logits, tokens, seed, T)
    assert margins.tolist() == [0.0] * len(tokens)
    assert expected.tolist() == tokens


@given(seeds_64)
def test_another_seed_shows(seed: int) -> None:
    logits, tokens = sampled(seed)
    assert margins_of(logits, tokens, seed ^ 1).max() > 0.1


def test_changed_token_shows_where_it_was_changed() -> None:
    logits, tokens = sampled(5)
    honest, tokens[3] = tokens[3], (tokens[3] + 1) % VOCAB
    margins, expected = replay_sample(logits, tokens, 5, T)
    assert np.flatnonzero(margins).tolist() == [3]
    assert expected[3] == honest


def test_margin_is_the_distance_in_scaled_logits() -> None:
    logits, tokens = sampled(5)
    scores = logits[2] / np.float32(T) + gumbel_noise([5], [2], VOCAB)[0]
    tokens[2] = int(scores.argmin())
    expected = scores.max() - scores.min()
    assert margins_of(logits, tokens, 5)[2] == pytest.approx(expected)


@pytest.mark.parametrize("token", [-1, 19, 2**31 - 1, -(2**63)])
def test_unknown_token_is_infinitely_far(token: int) -> None:
    logits, tokens = sampled(5)
    tokens[0] = token
    assert margins_of(logits, tokens, 5)[0] == np.inf


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_infinitely_far(bad: float) -> None:
    logits, tokens = sampled(5)
    logits[4, 1] = bad
    margins = margins_of(logits, tokens, 5)
    assert margins[4] == np.inf
    assert margins[:4].tolist() == [0, 0, 0, 0]


def test_impossible_token_is_infinitely_far_and_excludes_no_other() -> None:
    logits, tokens = sampled(5)
    logits[4, tokens[4]] = -np.inf
    margins = margins_of(logits, tokens, 5)
    assert margins[4] == np.inf
    tokens[4] = int(replay_sample(logits, tokens, 5, T)[1][4])
    assert margins_of(logits, tokens, 5)[4] == 0


def test_rows_of_many_samples_are_replayed_as_one_by_one() -> None:
    samples = [(*sampled(seed, tokens=seed + 1), seed ^ (seed & 1)) for seed in range(9)]
    alone = [replay_sample(logits, tokens, seed, T) for logits, tokens, seed in samples]
    lengths = [len(tokens) for _, tokens, _ in samples]
    together = replay_block(
        np.concatenate([logits for logits, _, _ in samples]),
        np.concatenate([tokens for _, tokens, _ in samples]),
        np.repeat(np.array([seed for _, _, seed in samples], np.uint64), lengths),
        np.concatenate([np.arange(length, dtype=np.uint64) for length in lengths]),
        T,
    )
    for joined, apart in zip(together, zip(*alone, strict=True), strict=True):
        assert joined.tolist() == np.concatenate(apart).tolist()
    assert together[0].any()


def test_memory_beyond_the_logits_is_bounded_at_a_vocabulary_of_151936() -> None:
    tokens = 48
    logits = np.zeros((tokens, 151_936), np.float32)
    chosen = np.zeros(tokens, np.int64)
    tracemalloc.start()
    try:
        margins, _ = replay_sample(logits, chosen.tolist(), 1, 1.0)
        peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    assert margins.min() > 0
    # One pass over all 48 rows would hold 28 MiB of float32 logits and 56 MiB of float64 noise.
    assert peak_mib < 28


@given(seed=seeds_64, temperature=st.sampled_from([0.3, 1.0, 1.7]), block=st.sampled_from([7, 999]))
def test_torch_chooses_the_same(seed: int, temperature: float, block: int) -> None:
    logits, _ = sampled(seed, tokens=8)
    temperatures = np.full(8, temperature, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "DEVICE_ELEMENTS", block)
        ids, _ = sampler.device_winners(
            torch.from_numpy(logits), [seed] * 8, range(8), temperatures
        )
    ours, _ = sampling.winners(logits, [seed] * 8, range(8), temperatures)
    assert ids.tolist() == ours.tolist()
