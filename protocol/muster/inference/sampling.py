"""Verifiable sampling: the noise that decides every token, and the replay that checks the choice.

A token is the argmax of `logit / T + g`, with Gumbel noise g a pure function of (sample seed,
position, token id): exact sampling from the softmax that anyone can repeat. Specified in
docs/protocol.md section 5. Numpy only; `muster.inference.device_sampling` holds the same arithmetic
for accelerators. Axes: R rows, P positions, T completion tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Noise = npt.NDArray[np.float32]
Integers: TypeAlias = "Sequence[int] | npt.NDArray[Any]"

_Words = npt.NDArray[np.uint32]

_BLOCK_ELEMENTS = 1 << 22
"""Noise values computed per pass: bounds the float64 intermediates to 32 MiB each."""


def gumbel_noise(seeds: Integers, positions: Integers, vocab: int) -> Noise:
    """Return [R, V] noise: row r is for completion position `positions[r]` of seed `seeds[r]`."""
    k0_R, k1_R = _keys(np.array(seeds, np.uint64), np.array(positions, np.uint64))
    noise = np.empty((len(k0_R), vocab), np.float32)
    block = max(1, _BLOCK_ELEMENTS // vocab)
    for start in range(0, len(k0_R), block):
        rows = slice(start, start + block)
        noise[rows] = _to_gumbel(_hash(k0_R[rows], k1_R[rows], vocab))
    return noise


def noise_block(seeds: Integers, positions: range, vocab: int) -> Noise:
    """Return [R, P, V] noise of every seed at every position."""
    every_seed = np.repeat(np.array(seeds, np.uint64), len(positions))
    every_position = np.tile(np.array(positions, np.uint64), len(seeds))
    rows = gumbel_noise(every_seed, every_position, vocab)
    return rows.reshape(len(seeds), len(positions), vocab)


def token_hashes(seeds: Integers, positions: Integers, vocab: int) -> _Words:
    """Return [R, V] the 32-bit integers that the noise is made of."""
    return _hash(*_keys(np.array(seeds, np.uint64), np.array(positions, np.uint64)), vocab)


def choose(logits_RV: Noise, noise_RV: Noise, temperature_R: Noise) -> npt.NDArray[np.int64]:
    """Return per row the smallest id that maximises `logit / T + g` in float32."""
    choice: npt.NDArray[np.int64] = _scores(logits_RV, noise_RV, temperature_R).argmax(axis=1)
    return choice


def replay(
    logits_TV: npt.NDArray[np.float32], tokens: Sequence[int], seed: int, temperature: float
) -> npt.NDArray[np.float32]:
    """Return [T] `max - chosen` of the scores; 0 where the chosen token is the maximum.

    Never raises on what a peer may claim: an id outside the vocabulary, or a score that is not
    finite, is infinitely far.
    """
    return replay_many([logits_TV], [tokens], [seed], temperature)[0]


def replay_many(
    logits: Sequence[npt.NDArray[np.float32]],
    tokens: Sequence[Sequence[int]],
    seeds: Sequence[int],
    temperature: float,
) -> list[npt.NDArray[np.float32]]:
    """Return `replay` of many samples: the same numbers, faster."""
    if not tokens:
        return []
    lengths = [len(t) for t in tokens]
    seeds_N = np.repeat(np.array(seeds, np.uint64), lengths)
    positions_N = np.concatenate([np.arange(n, dtype=np.uint64) for n in lengths])
    tokens_N = np.concatenate([np.asarray(t, np.int64) for t in tokens])
    logits_NV = np.concatenate([np.asarray(rows, np.float32) for rows in logits])
    margins = np.empty(len(tokens_N), np.float32)
    block = max(1, _BLOCK_ELEMENTS // logits_NV.shape[1])
    for start in range(0, len(tokens_N), block):
        at = slice(start, start + block)
        noise = gumbel_noise(seeds_N[at], positions_N[at], logits_NV.shape[1])
        temperatures = np.full(len(noise), temperature, np.float32)
        margins[at] = _margins(_scores(logits_NV[at], noise, temperatures), tokens_N[at])
    return np.split(margins, np.cumsum(lengths)[:-1])


def _margins(scores_NV: Noise, tokens_N: npt.NDArray[np.int64]) -> Noise:
    is_known = (tokens_N >= 0) & (tokens_N < scores_NV.shape[1])
    chosen = scores_NV[np.arange(len(scores_NV)), np.where(is_known, tokens_N, 0)]
    with np.errstate(invalid="ignore"):
        margins = scores_NV.max(axis=1) - chosen
    return np.where(is_known & np.isfinite(margins), margins, np.float32(np.inf))


def _scores(logits_RV: Noise, noise_RV: Noise, temperature_R: Noise) -> Noise:
    if (temperature_R == 1).all():
        return logits_RV + noise_RV
    return logits_RV / temperature_R[:, None] + noise_RV


def _keys(
    seeds_R: npt.NDArray[np.uint64], positions_R: npt.NDArray[np.uint64]
) -> tuple[_Words, _Words]:
    high = (seeds_R >> np.uint64(32)).astype(np.uint32)
    low = seeds_R.astype(np.uint32)
    position = positions_R.astype(np.uint32)
    first = _mix(_mix(low) ^ high)
    second = _mix(_mix(high ^ np.uint32(0x9E3779B9)) ^ low)
    return _mix(first ^ position), _mix(second + position * np.uint32(0x85EBCA6B))


def _hash(k0_R: _Words, k1_R: _Words, vocab: int) -> _Words:
    ids_V = np.arange(vocab, dtype=np.uint32)
    return _mix(_mix(ids_V ^ k0_R[:, None]) + k1_R[:, None])


def _mix(x: _Words) -> _Words:
    """Return the 32-bit hash of every word; numpy's uint32 arithmetic wraps at 2^32."""
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def _to_gumbel(hashes: _Words) -> Noise:
    uniform = hashes.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-32
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    return uniform.astype(np.float32)
