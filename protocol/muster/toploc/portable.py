"""The numpy backend: proofs built and compared where the kernel was not compiled.

It is also what the kernel is tested against. Batches chunks of one size, since numpy is slow at one
chunk. Axes: B chunks of E elements, K points.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import ProofError
from muster.toploc import wire
from muster.toploc.chunks import EXPONENT_BITS, MANTISSA_BITS, SIGN_BIT, Chunks, Patterns
from muster.toploc.field import PRIME, evaluate, interpolate
from muster.toploc.results import NO_MATCH, ChunkResult
from muster.toploc.screening import decoy_matches
from muster.toploc.selection import find_moduli, select_top


class Portable:
    """Backend of `muster.toploc.proofs` in numpy."""

    def build(self, chunks: Chunks) -> list[bytes]:
        """Return every chunk's proof; raises ProofError."""
        placed: dict[int, bytes] = {}
        for places, patterns_BE, points in _groups(chunks):
            indices, values = _points(patterns_BE, points)
            moduli = find_moduli(indices)
            x_BK = (indices % moduli[:, None]).astype(np.uint32)
            coefficients = interpolate(x_BK, values % np.uint32(PRIME))
            placed.update(zip(places, wire.encode(moduli, coefficients), strict=True))
        return [placed[i] for i in range(len(placed))]

    def verify(self, chunks: Chunks, proofs: list[bytes]) -> list[ChunkResult]:
        """Return how far chunks are from their proofs, whose lengths are right."""
        placed: dict[int, ChunkResult] = {}
        for places, patterns_BE, points in _groups(chunks):
            claimed = [proofs[place] for place in places]
            shape = wire.ChunkShape(elements=patterns_BE.shape[1], points=points)
            moduli, coefficients = wire.decode(claimed, shape)
            indices, values = _points(patterns_BE, shape.compared)
            x_BK = (indices % moduli[:, None]).astype(np.uint32)
            results = _compare(evaluate(coefficients, x_BK), values)
            matches = decoy_matches(patterns_BE, moduli, coefficients)
            for place, result, found in zip(places, results, matches.tolist(), strict=True):
                placed[place] = replace(result, decoy_matches=found)
        return [placed[i] for i in range(len(placed))]


def _groups(chunks: Chunks) -> Iterator[tuple[list[int], Patterns, int]]:
    """Yield chunks of equal size: their places, patterns [B, E], and points."""
    members: defaultdict[int, list[tuple[int, Patterns]]] = defaultdict(list)
    for place, elements in enumerate(chunks):
        members[len(elements)].append((place, elements))
    for group in members.values():
        places = [place for place, _ in group]
        yield places, np.stack([e for _, e in group]), int(chunks.points[places[0]])


def _points(
    patterns_BE: Patterns, points: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]:
    if ((patterns_BE & EXPONENT_BITS) == EXPONENT_BITS).any():
        raise ProofError(
            "hidden states hold NaN or infinity",
            hint="the policy's weights or the engine's arithmetic are broken",
        )
    indices = select_top(patterns_BE, points)
    return indices, np.take_along_axis(patterns_BE, indices, axis=1).astype(np.uint32)


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
