"""Random projections of hidden states: a few numbers that only a holder of the states can compute.

A value is `sum_t s_t sum_c q_c h_tc / sqrt(T H)` over the T tokens of a block and the H channels,
with signs s and q from a seed. The signs of the tokens add up to zero, so the states' common part
cancels: knowing a model's mean state does not help. Values of independent states are uncorrelated,
so the best guess is zero, with a relative error of 1. Honest machines differ only by their rounding
(Johnson and Lindenstrauss: projections keep relative distances). The worker's top-k proofs do not
help a guess either, because every entry of every token counts.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.protocol.compiled import shake256
from muster.protocol.ids import Hash32
from muster.toploc.chunks import Patterns

VALUES = 8
"""Projections per block."""
FINGERPRINT_BYTES = 4 * VALUES
"""Bytes of one block's fingerprint: little-endian float32."""
SAME = 0.1
"""Largest relative distance between fingerprints of the same states: honest machines differed by at
most 0.02 (float32 against bfloat16), the best guess from a table of mean states by 0.26.
"""

_ROWS = 1024
"""Rows converted to float64 at a time."""

BLOCKS_AT_HAND = 8
"""Blocks whose token signs are cached: all samples of a submission need the signs of the same few
blocks. A block of 131,072 tokens has 1 MB of signs."""

Values = npt.NDArray[np.float64]


def project(patterns_TH: Patterns, seed: Hash32) -> bytes:
    """Return the fingerprint of a block's hidden states, bfloat16 patterns in token order."""
    tokens, width = patterns_TH.shape
    return fingerprint(project_rows(patterns_TH, seed, 0, tokens), tokens, width)


def project_rows(patterns_TH: Patterns, seed: Hash32, first: int, tokens: int) -> Values:
    """Return the contributions [VALUES] of some rows to their block's projections, before scaling.

    The rows are those from `first` on of a block of `tokens` rows.
    """
    width = patterns_TH.shape[1]
    signs_VT = balanced_signs(seed, tokens)[:, first : first + len(patterns_TH)].astype(np.float64)
    sums_VH = np.zeros((VALUES, width))
    for start in range(0, len(patterns_TH), _ROWS):
        rows = slice(start, start + _ROWS)
        hidden_RH = (patterns_TH[rows].astype(np.uint32) << 16).view(np.float32)
        sums_VH += signs_VT[:, rows] @ hidden_RH.astype(np.float64)
    sums: Values = (sums_VH * channel_signs(seed, width)).sum(axis=1)
    return sums


def fingerprint(sums_V: Values, tokens: int, width: int) -> bytes:
    """Return the fingerprint of a block from the sum of its rows' contributions."""
    scaled: bytes = (sums_V / math.sqrt(tokens * width)).astype("<f4").tobytes()
    return scaled


@lru_cache(maxsize=BLOCKS_AT_HAND)
def balanced_signs(seed: Hash32, tokens: int) -> npt.NDArray[np.int8]:
    """Return signs [VALUES, tokens], as many +1 as -1 in each row; with an odd number one is 0.

    Token i has the key `SHAKE-256(seed ‖ "tokens")[8 i .. 8 i + 8]`, big-endian, of its row; the
    half with the smaller keys is +1. A single token is +1.
    """
    if tokens == 1:
        return _fixed(np.ones((VALUES, 1), np.int8))
    stream = shake256(seed + b"tokens", 8 * VALUES * tokens)
    keys_VT = np.frombuffer(stream, dtype=">u8").reshape(VALUES, tokens).astype(np.uint64)
    return _fixed(_by_halves(keys_VT))


def _by_halves(keys_VT: npt.NDArray[np.uint64]) -> npt.NDArray[np.int8]:
    """Return +1 for the half with the smaller keys; of equal keys the first counts as smaller."""
    rows, tokens = keys_VT.shape
    half = tokens // 2
    # Sorting would take most of the time of an examination on a GPU.
    last_V1 = np.partition(keys_VT, half - 1, axis=1)[:, half - 1 : half]
    below_VT, equal_VT = keys_VT < last_V1, keys_VT == last_V1
    left_V1 = half - below_VT.sum(axis=1, keepdims=True)
    is_plus_VT = below_VT | (equal_VT & (equal_VT.cumsum(axis=1) <= left_V1))
    signs = np.where(is_plus_VT, np.int8(1), np.int8(-1))
    if tokens % 2:
        largest_V = tokens - 1 - keys_VT[:, ::-1].argmax(axis=1)
        signs[np.arange(rows), largest_V] = 0
    return signs


def _fixed(signs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    signs.flags.writeable = False
    return signs


@lru_cache(maxsize=BLOCKS_AT_HAND)
def channel_signs(seed: Hash32, width: int) -> Values:
    """Return signs [VALUES, width]: the bits of `SHAKE-256(seed ‖ "channels")`, most significant
    first; a bit of 1 is -1.
    """
    bits = VALUES * width
    stream = shake256(seed + b"channels", -(-bits // 8))
    ones = np.unpackbits(np.frombuffer(stream, dtype=np.uint8))[:bits].reshape(VALUES, width)
    return _fixed(np.where(ones == 1, -1.0, 1.0))


def distance(claimed: bytes, recomputed: bytes) -> float:
    """Return the distance of a claimed fingerprint from a recomputed one, relative to the latter.

    It is infinite when the claim is no fingerprint, has another number of blocks, or holds a NaN or
    an infinity.
    """
    if len(claimed) != len(recomputed) or len(claimed) % 4:
        return math.inf
    mine = np.frombuffer(recomputed, dtype="<f4").astype(np.float64)
    with np.errstate(invalid="ignore"):
        # A signalling NaN is treated like any other NaN.
        theirs = np.frombuffer(claimed, dtype="<f4").astype(np.float64)
    if not np.isfinite(theirs).all():
        return math.inf
    size = float(np.linalg.norm(mine))
    apart = float(np.linalg.norm(theirs - mine))
    return apart / size if size > 0 else (0.0 if apart == 0 else math.inf)


def failed_blocks(claimed: bytes, recomputed: bytes) -> int:
    """Return how many of a submission's blocks have a fingerprint that differs.

    All of them when the claim has another number of blocks.
    """
    size = FINGERPRINT_BYTES
    blocks = len(recomputed) // size
    if len(claimed) != len(recomputed):
        return blocks
    places = (slice(size * i, size * (i + 1)) for i in range(blocks))
    return sum(distance(claimed[at], recomputed[at]) > SAME for at in places)
