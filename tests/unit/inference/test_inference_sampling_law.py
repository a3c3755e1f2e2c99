"""The law of verifiable sampling: tokens follow the softmax, and samples are independent.

Chi-square tests at fixed seeds; each limit is the 99.9 % quantile of its degrees of freedom, by
Wilson and Hilferty's approximation.
"""

import math

import numpy as np
import pytest

from muster.inference.sampling import gumbel_noise, token_hashes, winners
from muster.protocol.encoding import abi_words, keccak

Counts = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

LOGITS = np.array([0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 2.0, -0.2], np.float32)


def quantile(freedom: int) -> float:
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def ticket_seeds(count: int, stream: int = 0) -> list[int]:
    return [int.from_bytes(keccak(abi_words(stream, i))[:8], "big") for i in range(count)]


def draws(seeds: list[int], position: int, temperature: float = 1.0) -> Counts:
    rows = np.tile(LOGITS, (len(seeds), 1))
    temperatures = np.full(len(seeds), temperature, np.float32)
    return winners(rows, seeds, [position] * len(seeds), temperatures)[0]


def chi_square(counts: Counts, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def independence(first: Counts, second: Counts) -> tuple[float, int]:
    table = np.zeros((len(LOGITS), len(LOGITS)))
    np.add.at(table, (first, second), 1)
    table = table[table.sum(axis=1) > 0][:, table.sum(axis=0) > 0]
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    return chi_square(table, expected), (table.shape[0] - 1) * (table.shape[1] - 1)


@pytest.mark.parametrize("temperature", [0.25, 0.5, 0.8, 1.0, 1.5, 4.0])
@pytest.mark.parametrize(
    ("seeds", "position"),
    [(list(range(40_000)), 0), (ticket_seeds(40_000), 7), ([s << 32 for s in range(40_000)], 3)],
    ids=["counting seeds", "ticket seeds", "seeds in the high word"],
)
def test_tokens_follow_the_softmax(seeds: list[int], position: int, temperature: float) -> None:
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    expected = len(seeds) * weights / weights.sum()
    counts = np.bincount(draws(seeds, position, temperature), minlength=len(LOGITS))
    pooled = expected >= 5
    observed = np.append(counts[pooled], counts[~pooled].sum())
    wanted = np.append(expected[pooled], max(expected[~pooled].sum(), 1e-9))
    keep = wanted > 1e-6
    assert chi_square(observed[keep], wanted[keep]) < quantile(int(keep.sum()) - 1)


def test_one_seed_follows_the_softmax_over_its_positions() -> None:
    positions = 40_000
    rows = np.tile(LOGITS, (positions, 1))
    ones = np.ones(positions, np.float32)
    chosen, _ = winners(rows, [0xDEADBEEF] * positions, range(positions), ones)
    weights = np.exp(LOGITS.astype(np.float64))
    expected = positions * weights / weights.sum()
    counts = np.bincount(chosen, minlength=len(LOGITS))
    assert chi_square(counts, expected) < quantile(len(LOGITS) - 1)


@pytest.mark.parametrize("shift", [1, 2, 1 << 31, 1 << 32, 1 << 63])
def test_samples_whose_seeds_differ_in_one_bit_are_independent(shift: int) -> None:
    seeds = [s * 4 for s in range(20_000)]
    distance, freedom = independence(draws(seeds, 5), draws([s ^ shift for s in seeds], 5))
    assert distance < quantile(freedom)


@pytest.mark.parametrize("later", [1, 2, 32, 1 << 16])
def test_positions_of_a_sample_are_independent(later: int) -> None:
    seeds = ticket_seeds(20_000, stream=1)
    distance, freedom = independence(draws(seeds, 0), draws(seeds, later))
    assert distance < quantile(freedom)


def test_seed_and_position_do_not_trade_places() -> None:
    """No sample's noise is another sample's noise at shifted positions."""
    near = {int(h) for h in token_hashes(range(300), [1] * 300, 1).ravel()}
    far = {int(h) for h in token_hashes([1] * 300, range(300), 1).ravel()}
    assert len(near & far) <= 1


def test_hashes_fill_their_range_evenly() -> None:
    words = token_hashes(range(2000), [9] * 2000, 500).ravel()
    counts = np.bincount(words >> 24, minlength=256)
    assert chi_square(counts, np.full(256, words.size / 256)) < quantile(255)


def test_noise_is_gumbel_by_kolmogorov_and_smirnov() -> None:
    noise = np.sort(gumbel_noise(range(400), [2] * 400, 500).ravel().astype(np.float64))
    law = np.exp(-np.exp(-noise))
    places = np.arange(1, noise.size + 1) / noise.size
    # 1.95 / sqrt(n) is the statistic's 99.9 % quantile.
    assert np.abs(law - places).max() < 1.95 / math.sqrt(noise.size)
