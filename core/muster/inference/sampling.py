"""Verifiable sampling: the noise of every token, the choice that follows, and the replay.

A token is the argmax of `logit / T + g`, with Gumbel noise g a pure function of (sample seed,
position, token id): exact sampling from the softmax that anyone can repeat. Specified in
docs/protocol.md section 5. `tools/build_kernel.py` compiles native/choices.c when the package is
installed. That kernel finds the few tokens of a row that can have its highest score, and numpy
computes only their scores. Without the kernel numpy computes the scores of all tokens; the results
are the same bytes. `muster.inference.sampler` holds the same arithmetic for accelerators.

The replay needs the logits of one prefill and nothing else. The margin of a token is the distance
of its `logit / T + g` from the row's maximum: 0 for the token that sampling yields under these
logits, small where different rounding decided a close choice, large for a token that was chosen in
another way. Axes: R rows, B rows of a replay, V vocabulary, C candidates.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from muster.protocol.compiled import load_library

Noise = npt.NDArray[np.float32]
Integers: TypeAlias = "Sequence[int] | npt.NDArray[Any]"
TokenIds = npt.NDArray[np.int64]

_Words = npt.NDArray[np.uint32]
_Longs = npt.NDArray[np.uint64]

FOLDER = Path(__file__).parent / "native"

BLOCK_ELEMENTS = 1 << 16
"""Noise values computed per pass (at least one row): intermediates of 2 MiB stay in a core's cache,
which halves the time."""

_MOST = 8
_FOUND = np.dtype(
    [("id", "i8", _MOST), ("hash", "u4", _MOST), ("scaled", "f4", _MOST), ("found", "i8")]
)
_TILE = 1024
"""As in native/choices.c: the most candidates that it returns per row, and the ids of one tile."""


def gumbel_noise(seeds: Integers, positions: Integers, vocab: int) -> Noise:
    """Return [R, V] noise: row r is for completion position `positions[r]` of seed `seeds[r]`."""
    k0_R, k1_R = row_keys(seeds, positions)
    noise = np.empty((len(k0_R), vocab), np.float32)
    for rows in blocks(len(k0_R), vocab):
        noise[rows] = _to_gumbel(_hash(k0_R[rows], k1_R[rows], vocab))
    return noise


def token_hashes(seeds: Integers, positions: Integers, vocab: int) -> _Words:
    """Return the 32-bit integers [R, V] that the noise is computed from."""
    return _hash(*row_keys(seeds, positions), vocab)


def token_noise(seeds: Integers, positions: Integers, tokens: Integers) -> Noise:
    """Return [R] the noise of one token per row; ids are taken modulo 2^32."""
    k0_R, k1_R = row_keys(seeds, positions)
    ids_R = np.array(tokens, np.int64).astype(np.uint32)
    return _to_gumbel(_mix(_mix(ids_R ^ k0_R) + k1_R))


def winners(
    logits_RV: Noise, seeds: Integers, positions: Integers, temperature_R: Noise
) -> tuple[TokenIds, Noise]:
    """Return per row the smallest id that maximises `logit / T + g` in float32, and its score.

    Takes float32 logits and temperatures. The score of a row with NaN is NaN. Allocates one block
    of scores. Releases the GIL. Raises ValueError unless every row has its own seed, position and
    temperature.
    """
    seeds_R, positions_R = np.array(seeds, np.uint64), np.array(positions, np.uint64)
    if not len(logits_RV) == len(seeds_R) == len(positions_R) == len(temperature_R):
        counts = f"{len(seeds_R)} seeds, {len(positions_R)} positions, {len(temperature_R)}"
        raise ValueError(f"{len(logits_RV)} rows of logits, {counts} temperatures")
    kernel = load_kernel()
    if kernel is None:
        return _winners_of_all(logits_RV, seeds_R, positions_R, temperature_R)
    logits_RV = np.ascontiguousarray(logits_RV, np.float32)
    found_R = _find(kernel, logits_RV, seeds_R, positions_R, temperature_R)
    most = found_R["found"].max(initial=1)
    scores_RC = _to_gumbel(found_R["hash"][:, :most])
    scores_RC += found_R["scaled"][:, :most]
    ids_R, scores_R = found_R["id"][:, 0].copy(), scores_RC[:, 0]
    if most > 1:
        scores_R = scores_RC.max(axis=1)
        is_best_RC = scores_RC == scores_R[:, None]
        ids_R = np.where(is_best_RC, found_R["id"][:, :most], logits_RV.shape[1]).min(axis=1)
    untold = np.flatnonzero(found_R["found"] == 0)
    for part in blocks(len(untold), logits_RV.shape[1]):
        rows = untold[part]
        ids_R[rows], scores_R[rows] = _winners_of_all(
            logits_RV[rows], seeds_R[rows], positions_R[rows], temperature_R[rows]
        )
    return ids_R, scores_R


def _find(
    kernel: ctypes.CDLL,
    logits_RV: Noise,
    seeds_R: _Longs,
    positions_R: _Longs,
    temperature_R: Noise,
) -> npt.NDArray[np.void]:
    """Return per row, as _FOUND, the tokens that can have its highest score; none where the kernel
    cannot tell.
    """
    rows, vocab = logits_RV.shape
    found_R = np.zeros(rows, _FOUND)
    largest = np.empty(vocab // _TILE + 1, np.float32)
    temperature_R = np.ascontiguousarray(temperature_R, np.float32)
    arrays = (seeds_R, positions_R, temperature_R, largest, found_R)
    kernel.muster_choices_find(
        logits_RV.ctypes.data, rows, vocab, *(array.ctypes.data for array in arrays)
    )
    return found_R


def _winners_of_all(
    logits_RV: Noise, seeds_R: _Longs, positions_R: _Longs, temperature_R: Noise
) -> tuple[TokenIds, Noise]:
    k0_R, k1_R = row_keys(seeds_R, positions_R)
    ids_R, scores_R = np.empty(len(k0_R), np.int64), np.empty(len(k0_R), np.float32)
    for rows in blocks(*logits_RV.shape):
        scores = _to_gumbel(_hash(k0_R[rows], k1_R[rows], logits_RV.shape[1]))
        scores += scaled(logits_RV[rows], temperature_R[rows])
        ids_R[rows] = scores.argmax(axis=1)
        scores_R[rows] = scores[np.arange(len(scores)), ids_R[rows]]
    return ids_R, scores_R


@cache
def load_kernel(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Return the kernel in a folder, or None: not compiled, or not from the sources there."""
    library = load_library(folder / "choices.so", "muster_choices_source", what="choices of tokens")
    if library is None or sys.byteorder != "little":
        return None
    address, size = ctypes.c_void_p, ctypes.c_size_t
    library.muster_choices_find.argtypes = [address, size, size, *[address] * 5]
    library.muster_choices_find.restype = None
    return library


def scaled(logits_RV: Noise, temperature_R: Noise) -> Noise:
    """Return `logit / T` in float32."""
    return logits_RV if (temperature_R == 1).all() else logits_RV / temperature_R[:, None]


def blocks(rows: int, vocab: int, elements: int | None = None) -> Iterator[slice]:
    """Yield slices of rows; the rows of a slice hold at most `elements` values, or are one row."""
    size = max(1, (elements or BLOCK_ELEMENTS) // vocab)
    for start in range(0, rows, size):
        yield slice(start, start + size)


def row_keys(seeds: Integers, positions: Integers) -> tuple[_Words, _Words]:
    """Return per row the two words that are hashed together with a token id."""
    seeds_R, positions_R = np.array(seeds, np.uint64), np.array(positions, np.uint64)
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


def replay_block(
    logits_BV: Noise,
    tokens_B: TokenIds,
    seeds_B: _Longs,
    positions_B: _Longs,
    temperature: float,
) -> tuple[Noise, TokenIds]:
    """Return per row the token's margin and the id that sampling yields.

    Takes [B, V] float32 logits before temperature, of any samples' rows; `positions_B` count from
    0 within each completion. A margin is `max - chosen` in units of `logit / T`, inf for an id
    outside the vocabulary and for scores that are not finite. Never raises on a peer's claims:
    tokens may be any integers.
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
