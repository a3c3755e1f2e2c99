"""Verifiable sampling: the noise that decides every token, the choice it leads to, the replay.

A token is the argmax of `logit / T + g`, with Gumbel noise g a pure function of (sample seed,
position, token id): exact sampling from the softmax that anyone can repeat. Specified in
docs/protocol.md section 5. Numpy only; `muster.inference.sampler` holds the same arithmetic for
accelerators.

The replay needs the logits of one prefill and nothing else. The margin of a token is how much its
`logit / T + g` misses the maximum by: 0 for the token that sampling yields under these logits,
small where other arithmetic turned a close choice, large for a token that was chosen otherwise.
Axes: R rows, P positions, T completion tokens of one sample, N of all samples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Noise = npt.NDArray[np.float32]
Integers: TypeAlias = "Sequence[int] | npt.NDArray[Any]"
TokenIds = npt.NDArray[np.int64]

_Words = npt.NDArray[np.uint32]

BLOCK_ELEMENTS = 1 << 16
"""Noise values computed per pass, one row at least: intermediates of 2 MiB stay in a core's cache,
which halves the time."""


def gumbel_noise(seeds: Integers, positions: Integers, vocab: int) -> Noise:
    """Return [R, V] noise: row r is for completion position `positions[r]` of seed `seeds[r]`."""
    k0_R, k1_R = _keys(np.array(seeds, np.uint64), np.array(positions, np.uint64))
    noise = np.empty((len(k0_R), vocab), np.float32)
    for rows in blocks(len(k0_R), vocab):
        noise[rows] = _to_gumbel(_hash(k0_R[rows], k1_R[rows], vocab))
    return noise


def noise_block(seeds: Integers, firsts: Integers, count: int, vocab: int) -> Noise:
    """Return [R, P, V] noise of `count` positions of every seed, from its first one on."""
    positions_RP = np.array(firsts, np.uint64)[:, None] + np.arange(count, dtype=np.uint64)
    every_seed = np.repeat(np.array(seeds, np.uint64), count)
    rows = gumbel_noise(every_seed, positions_RP.ravel(), vocab)
    return rows.reshape(len(positions_RP), count, vocab)


def token_hashes(seeds: Integers, positions: Integers, vocab: int) -> _Words:
    """Return [R, V] the 32-bit integers that the noise is made of."""
    return _hash(*_keys(np.array(seeds, np.uint64), np.array(positions, np.uint64)), vocab)


def token_noise(seeds: Integers, positions: Integers, tokens: Integers) -> Noise:
    """Return [R] the noise of one token per row; ids are taken modulo 2^32."""
    k0_R, k1_R = _keys(np.array(seeds, np.uint64), np.array(positions, np.uint64))
    ids_R = np.array(tokens, np.int64).astype(np.uint32)
    return _to_gumbel(_mix(_mix(ids_R ^ k0_R) + k1_R))


def choose(logits_RV: Noise, noise_RV: Noise, temperature_R: Noise) -> TokenIds:
    """Return per row the smallest id that maximises `logit / T + g` in float32."""
    choice: TokenIds = (scaled(logits_RV, temperature_R) + noise_RV).argmax(axis=1)
    return choice


def winners(
    logits_RV: Noise, seeds: Integers, positions: Integers, temperature_R: Noise
) -> tuple[TokenIds, Noise]:
    """Return `choose` under the rows' own noise, and the score of each choice.

    Holds the noise of one block at a time. The score of a row with NaN is NaN.
    """
    k0_R, k1_R = _keys(np.array(seeds, np.uint64), np.array(positions, np.uint64))
    ids_R = np.empty(len(k0_R), np.int64)
    scores_R = np.empty(len(k0_R), np.float32)
    for rows in blocks(*logits_RV.shape):
        scores = _to_gumbel(_hash(k0_R[rows], k1_R[rows], logits_RV.shape[1]))
        scores += scaled(logits_RV[rows], temperature_R[rows])
        ids_R[rows] = scores.argmax(axis=1)
        scores_R[rows] = scores[np.arange(len(scores)), ids_R[rows]]
    return ids_R, scores_R


def scaled(logits_RV: Noise, temperature_R: Noise) -> Noise:
    """Return `logit / T` in float32."""
    return logits_RV if (temperature_R == 1).all() else logits_RV / temperature_R[:, None]


def blocks(rows: int, vocab: int, elements: int | None = None) -> Iterator[slice]:
    """Yield slices of the rows that together hold at most so many values (or one row)."""
    size = max(1, (elements or BLOCK_ELEMENTS) // vocab)
    for start in range(0, rows, size):
        yield slice(start, start + size)


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
    words = ids_V ^ k0_R[:, None]
    _mix_in_place(words)
    words += k1_R[:, None]
    _mix_in_place(words)
    return words


def _mix(x: _Words) -> _Words:
    """Return the 32-bit hash of every word; numpy's uint32 arithmetic wraps at 2^32."""
    x = x.copy()
    _mix_in_place(x)
    return x


def _mix_in_place(x: _Words) -> None:
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)


def _to_gumbel(hashes: _Words) -> Noise:
    uniform = hashes.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-32
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    return uniform.astype(np.float32)


# ------------------------------------------------------------------------------------- replay


@dataclass(frozen=True, slots=True, eq=False)
class ReplayResult:
    """The replay of some samples, in the order given."""

    margins: tuple[Noise, ...]
    """Per sample [T]: `max - chosen` in units of `logit / T`; inf for an id outside the vocabulary
    and for scores that are not finite."""
    expected: tuple[TokenIds, ...]
    """Per sample [T]: the token that sampling yields."""

    def outside(self, margin: float) -> list[int]:
        """Return per sample the number of tokens whose margin exceeds `margin`."""
        return [int((~(margins_T <= margin)).sum()) for margins_T in self.margins]


def replay(
    logits: Sequence[Noise],
    tokens: Sequence[Sequence[int]],
    seeds: Sequence[int],
    temperature: float,
) -> ReplayResult:
    """Return how far the tokens of samples are from what their seeds and logits yield.

    Takes per sample [T, V] float32 logits before temperature. Cost grows with tokens x vocabulary;
    memory beyond the logits is bounded by one block of `BLOCK_ELEMENTS` scores. Never
    raises on what a peer may claim: tokens may be any integers.
    """
    lengths = [len(t) for t in tokens]
    total = sum(lengths)
    margins_N, expected_N = np.empty(total, np.float32), np.empty(total, np.int64)
    if total:
        seeds_N = np.repeat(np.array(seeds, np.uint64), lengths)
        positions_N = np.concatenate([np.arange(n, dtype=np.uint64) for n in lengths])
        tokens_N = np.concatenate([np.asarray(t, np.int64) for t in tokens])
        for at, logits_BV in _joined_blocks(logits):
            margins_N[at], expected_N[at] = replay_block(
                logits_BV, tokens_N[at], seeds_N[at], positions_N[at], temperature
            )
    cuts = np.cumsum(lengths)[: len(lengths) - 1]
    margins, expected = np.split(margins_N, cuts), np.split(expected_N, cuts)
    return ReplayResult(tuple(margins[: len(lengths)]), tuple(expected[: len(lengths)]))


def _joined_blocks(logits: Sequence[Noise]) -> Iterator[tuple[slice, Noise]]:
    """Yield all samples' rows in order, joined or cut to blocks, with their places among all."""
    held: list[Noise] = []
    rows = start = 0
    for logits_TV in logits:
        size = max(1, BLOCK_ELEMENTS // logits_TV.shape[1])
        for first in range(0, len(logits_TV), size):
            part = logits_TV[first : first + size]
            if rows + len(part) > size:
                yield slice(start, start + rows), _join(held)
                held, start, rows = [], start + rows, 0
            held.append(part)
            rows += len(part)
    if held:
        yield slice(start, start + rows), _join(held)


def _join(parts: list[Noise]) -> Noise:
    return np.asarray(parts[0] if len(parts) == 1 else np.concatenate(parts), np.float32)


def replay_block(
    logits_BV: Noise,
    tokens_B: TokenIds,
    seeds_B: npt.NDArray[np.uint64],
    positions_B: npt.NDArray[np.uint64],
    temperature: float,
) -> tuple[Noise, TokenIds]:
    """Return per row the token's margin and the id that sampling yields.

    Takes [B, V] float32 logits before temperature, of any samples' rows; `positions_B` count from
    0 within each completion. Margins are those of `ReplayResult`; tokens may be any integers.
    """
    rows, vocab = logits_BV.shape
    temperature_B = np.full(rows, temperature, np.float32)
    expected_B, best_B = winners(logits_BV, seeds_B, positions_B, temperature_B)
    is_known = (tokens_B >= 0) & (tokens_B < vocab)
    known_B = np.where(is_known, tokens_B, 0)
    claimed_B = scaled(logits_BV[np.arange(rows), known_B][:, None], temperature_B)[:, 0]
    with np.errstate(invalid="ignore"):
        claimed_B = claimed_B + token_noise(seeds_B, positions_B, known_B)
        margins_B = best_B - claimed_B
    is_finite = is_known & np.isfinite(margins_B)
    return np.where(is_finite, margins_B, np.float32(np.inf)), expected_B
