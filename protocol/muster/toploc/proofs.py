"""Building TOPLOC proofs of hidden states and measuring how far hidden states are from them.

A proof commits to the largest entries of a chunk; the verifier recomputes the chunk by one prefill
and compares. No limit is applied here: `muster.toploc.calibration` judges. Byte-identical to the
`toploc` library (arXiv 2501.16007) wherever that succeeds without ties at the cut; differs from
it in choosing among ties by index, in proving chunks with fewer than `topk` elements, in comparing
signs, and in refusing NaN, infinity and every malformed proof.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import ProofError
from muster.toploc import wire
from muster.toploc.field import PRIME, evaluate, interpolate
from muster.toploc.selection import (
    EXPONENT_BITS,
    MANTISSA_BITS,
    SIGN_BIT,
    HiddenRows,
    Patterns,
    find_moduli,
    join_patterns,
    select_top,
)

NO_MATCH = 2.0**64
"""Mantissa error of a chunk where no exponent matches, as in the `toploc` library."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """How far a chunk of recomputed hidden states is from its proof."""

    exponent_mismatches: int
    """Points whose 8-bit exponent differs."""
    mantissa_error_mean: float
    """Mean difference of the 7-bit mantissas where exponents match; 2^64 where none does."""
    mantissa_error_median: float
    """Median of the same differences."""
    sign_mismatches: int
    """Points whose exponent matches and whose sign differs."""
    points: int
    """Points compared: min(topk, elements)."""


def build_proofs(hidden_TH: HiddenRows, *, chunk_tokens: int = 32, topk: int = 128) -> list[bytes]:
    """Return the proofs of one sample's hidden states, one per chunk.

    Raises ProofError on NaN, infinity, and anything that is not [tokens, hidden].
    """
    return build_proofs_many([hidden_TH], chunk_tokens=chunk_tokens, topk=topk)[0]


def build_proofs_many(
    samples: Sequence[HiddenRows], *, chunk_tokens: int = 32, topk: int = 128
) -> list[list[bytes]]:
    """Return the proofs of many samples of one width: the same bytes, many times faster."""
    proofs: list[list[bytes]] = [[] for _ in samples]
    placed: dict[tuple[int, int], bytes] = {}
    for group in _groups(samples, chunk_tokens, topk):
        indices, values = _points(group)
        moduli = find_moduli(indices)
        x_BK = (indices % moduli[:, None]).astype(np.uint32)
        coefficients = interpolate(x_BK, values % np.uint32(PRIME))
        placed.update(zip(group.places, wire.encode(moduli, coefficients), strict=True))
    for sample, chunk in sorted(placed):
        proofs[sample].append(placed[sample, chunk])
    return proofs


def verify_proofs(
    hidden_TH: HiddenRows, proofs: Sequence[bytes], *, chunk_tokens: int = 32, topk: int = 128
) -> list[ChunkResult]:
    """Return per chunk how far recomputed hidden states are from a sample's proofs.

    Raises ProofError when proofs are missing, left over or malformed.
    """
    return verify_proofs_many([hidden_TH], [proofs], chunk_tokens=chunk_tokens, topk=topk)[0]


def verify_proofs_many(
    samples: Sequence[HiddenRows],
    proofs: Sequence[Sequence[bytes]],
    *,
    chunk_tokens: int = 32,
    topk: int = 128,
) -> list[list[ChunkResult]]:
    """Return `verify_proofs` of many samples of one width."""
    groups = list(_groups(samples, chunk_tokens, topk))
    _require_one_proof_per_chunk(groups, proofs)
    placed: dict[tuple[int, int], ChunkResult] = {}
    for group in groups:
        indices, values = _points(group)
        claimed = [proofs[sample][chunk] for sample, chunk in group.places]
        moduli, coefficients = wire.decode(claimed, group.points)
        x_BK = (indices % moduli[:, None]).astype(np.uint32)
        results = _compare(evaluate(coefficients, x_BK), values)
        placed.update(zip(group.places, results, strict=True))
    found: list[list[ChunkResult]] = [[] for _ in samples]
    for sample, chunk in sorted(placed):
        found[sample].append(placed[sample, chunk])
    return found


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks with equally many elements."""

    places: list[tuple[int, int]]
    """(sample, chunk) of each."""
    patterns_BE: Patterns
    """Their flattened hidden states."""
    points: int
    """Entries that a proof commits to."""


def _groups(samples: Sequence[HiddenRows], chunk_tokens: int, topk: int) -> Iterator[_Group]:
    if not samples:
        return
    rows_NH, lengths = join_patterns(samples)
    hidden_size = rows_NH.shape[1]
    by_shape: defaultdict[wire.ChunkShape, list[tuple[int, int, int]]] = defaultdict(list)
    start = 0
    for sample, tokens in enumerate(lengths):
        shapes = wire.chunk_shapes(tokens, hidden_size, chunk_tokens=chunk_tokens, topk=topk)
        for chunk, shape in enumerate(shapes):
            by_shape[shape].append((sample, chunk, start))
            start += shape.rows
    for shape, members in by_shape.items():
        starts = np.array([start for *_, start in members])
        rows_BRH = rows_NH[starts[:, None] + np.arange(shape.rows)]
        places = [(sample, chunk) for sample, chunk, _ in members]
        yield _Group(places, rows_BRH.reshape(len(members), -1), shape.points)


def _points(group: _Group) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    indices = select_top(group.patterns_BE, group.points)
    values = np.take_along_axis(group.patterns_BE, indices, axis=1)
    return indices, values.astype(np.uint32)


def _require_one_proof_per_chunk(
    groups: Sequence[_Group], proofs: Sequence[Sequence[bytes]]
) -> None:
    chunks = [0] * len(proofs)
    for group in groups:
        for sample, _ in group.places:
            chunks[sample] += 1
    for sample, (expected, given) in enumerate(zip(chunks, proofs, strict=True)):
        if len(given) != expected:
            raise ProofError(
                f"sample {sample} has {len(given)} proofs for {expected} chunks", reason="count"
            )


def _compare(
    claimed_BK: npt.NDArray[np.uint32], actual_BK: npt.NDArray[np.uint32]
) -> list[ChunkResult]:
    differing = claimed_BK ^ actual_BK
    matches = (differing & EXPONENT_BITS) == 0
    signs = (matches & ((differing & SIGN_BIT) != 0)).sum(axis=1)
    mantissas = (claimed_BK & MANTISSA_BITS).astype(np.int64) - (actual_BK & MANTISSA_BITS)
    errors = np.abs(mantissas)
    means, medians = _mean_and_median(errors, matches)
    points = claimed_BK.shape[1]
    mismatches = points - matches.sum(axis=1)
    columns = (mismatches.tolist(), means.tolist(), medians.tolist(), signs.tolist())
    return [ChunkResult(*row, points) for row in zip(*columns, strict=True)]


def _mean_and_median(
    errors_BK: npt.NDArray[np.int64], matches_BK: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    counts = matches_BK.sum(axis=1)
    divisors = np.maximum(counts, 1)
    means = (errors_BK * matches_BK).sum(axis=1) / divisors
    # Entries that do not count sort behind those that do.
    ordered = np.sort(np.where(matches_BK, errors_BK, MANTISSA_BITS + 1), axis=1)
    rows = np.arange(len(ordered))
    medians = (ordered[rows, (divisors - 1) // 2] + ordered[rows, divisors // 2]) / 2
    is_empty = counts == 0
    return np.where(is_empty, NO_MATCH, means), np.where(is_empty, NO_MATCH, medians)
