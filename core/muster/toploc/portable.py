"""The numpy backend: builds and compares proofs where the kernel was not compiled.

The kernel is tested against it. Batches chunks of one size, because numpy is slow on single chunks.
Axes: B chunks of E elements, K points.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import ProofError
from muster.toploc import wire
from muster.toploc.chunks import (
    DECOYS,
    EXPONENT_BITS,
    MANTISSA_BITS,
    NO_MATCH,
    POOL,
    SIGN_BIT,
    Chosen,
    ChunkResult,
    Chunks,
    Patterns,
    pool_places,
)
from muster.toploc.field import PRIME, Residues, evaluate, interpolate

_SMALL_CHUNK = 8192
"""Chunks of up to this many elements are ranked whole, many in one call."""

_MAGNITUDE = np.uint16(0xFFFF ^ SIGN_BIT)


class Portable:
    """Backend of `muster.toploc.proofs` in numpy."""

    def build(self, chunks: Chunks) -> list[bytes]:
        """Return every chunk's proof; raises ProofError."""
        placed: dict[int, bytes] = {}
        for places, patterns_BE, points in _groups(chunks):
            built = self.build_chosen(choose(patterns_BE, points))
            placed.update(zip(places, built, strict=True))
        return [placed[i] for i in range(len(placed))]

    def verify(self, chunks: Chunks, proofs: Sequence[bytes]) -> list[ChunkResult]:
        """Return the distances of chunks from their proofs, which must have the right lengths."""
        placed: dict[int, ChunkResult] = {}
        for places, patterns_BE, points in _groups(chunks):
            shape = wire.ChunkShape(elements=patterns_BE.shape[1], points=points)
            claimed = [proofs[place] for place in places]
            found = self.verify_chosen(choose(patterns_BE, shape.compared), claimed, points)
            placed.update(zip(places, found, strict=True))
        return [placed[i] for i in range(len(placed))]

    def build_chosen(self, chosen: Chosen) -> list[bytes]:
        """Return the proofs of chunks; raises ProofError."""
        _require_finite(chosen)
        indices_BK = chosen.indices_BK
        moduli = find_moduli(indices_BK)
        x_BK = (indices_BK % moduli[:, None]).astype(np.uint32)
        return wire.encode(moduli, interpolate(x_BK, chosen.values_BK % np.uint32(PRIME)))

    def verify_chosen(
        self, chosen: Chosen, proofs: Sequence[bytes], points: int
    ) -> list[ChunkResult]:
        """Return the distances of chunks from their proofs of so many points; raises ProofError."""
        shape = wire.ChunkShape(chosen.elements, points)
        moduli, coefficients = wire.decode(proofs, shape)
        _require_finite(chosen)
        x_BK = (chosen.indices_BK % moduli[:, None]).astype(np.uint32)
        results = _compare(evaluate(coefficients, x_BK), chosen.values_BK)
        matches = decoy_matches(chosen, moduli, coefficients)
        return [replace(r, decoy_matches=m) for r, m in zip(results, matches.tolist(), strict=True)]


def choose(patterns_BE: Patterns, points: int) -> Chosen:
    """Return the entries that proofs with `points` points need of chunks."""
    indices = select_top(patterns_BE, points)
    is_number = (patterns_BE & EXPONENT_BITS) != EXPONENT_BITS
    parts = (
        indices,
        np.take_along_axis(patterns_BE, indices, axis=1),
        patterns_BE[:, pool_places(patterns_BE.shape[1])],
        is_number.all(axis=1, keepdims=True),
    )
    packed = np.concatenate([part.astype(np.int32) for part in parts], axis=1)
    return Chosen(patterns_BE.shape[1], points, packed)


def _require_finite(chosen: Chosen) -> None:
    if not chosen.is_finite:
        raise ProofError(
            "hidden states hold NaN or infinity",
            hint="the policy's weights or the engine's arithmetic are broken",
        )


def _groups(chunks: Chunks) -> Iterator[tuple[list[int], Patterns, int]]:
    """Yield chunks of equal size: their places, patterns [B, E], and points."""
    members: defaultdict[int, list[tuple[int, Patterns]]] = defaultdict(list)
    for place, elements in enumerate(chunks):
        members[len(elements)].append((place, elements))
    for group in members.values():
        places = [place for place, _ in group]
        yield places, np.stack([e for _, e in group]), int(chunks.points[places[0]])


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


# What a proof commits to: the largest entries of chunks, and the index modulus. The choice among
# ties is canonical.


def select_top(patterns_BE: Patterns, count: int) -> npt.NDArray[np.int64]:
    """Return the flat indices [B, K] of each chunk's `count` largest magnitudes.

    Among equal magnitudes the smaller index is chosen. The order within a row is unspecified: the
    polynomial through the points does not depend on it.
    """
    magnitudes = patterns_BE & np.uint16(0xFFFF ^ SIGN_BIT)
    elements = patterns_BE.shape[1]
    if count >= elements:
        return np.broadcast_to(np.arange(elements), patterns_BE.shape)
    if elements <= _SMALL_CHUNK:
        descending = np.uint16(0xFFFF) - magnitudes
        return np.argsort(descending, axis=1, kind="stable")[:, :count]
    return np.stack([_select_large(row, count) for row in magnitudes])


def _select_large(magnitudes_E: Patterns, count: int) -> npt.NDArray[np.int64]:
    cut = np.partition(magnitudes_E, len(magnitudes_E) - count)[-count]
    above = np.flatnonzero(magnitudes_E > cut)
    at_cut = np.flatnonzero(magnitudes_E == cut)
    return np.concatenate([above, at_cut[: count - len(above)]])


def find_moduli(indices_BK: npt.NDArray[np.int64]) -> Residues:
    """Return per chunk [B] the largest modulus up to PRIME that keeps its indices distinct.

    Raises ProofError when there is none, which does not happen with indices of hidden states.
    """
    moduli = np.full(len(indices_BK), PRIME, np.uint32)
    pending = np.flatnonzero((indices_BK >= PRIME).any(axis=1))
    for modulus in range(PRIME, indices_BK.shape[1] - 1, -1):
        moduli[pending] = modulus
        residues = np.sort(indices_BK[pending] % modulus, axis=1)
        pending = pending[(residues[:, 1:] == residues[:, :-1]).any(axis=1)]
        if not len(pending):
            return moduli
    raise ProofError("no modulus keeps the chosen indices distinct")


# The comparison alone misses polynomials with the same value everywhere. It looks only at the
# largest entries, and these are similar: their magnitudes cluster just above the cut. So a constant
# polynomial fits without knowing their places (87 % of chunks of Gaussian hidden states of width
# 5120 under the customary limits). Therefore proofs are also evaluated at *decoys*, entries far
# below the largest. An honest polynomial is pseudo-random there; a polynomial that claims large
# entries there too was not built from entries. Because the encoding fixes the modulus, a forger can
# only guess at most K places and their values.
#
# Axes: P entries of the pool, D decoys, G entries that one decoy is chosen from.


def has_decoys(elements: int, points: int) -> bool:
    """Return whether a chunk has decoys: not if a proof covers more than half of it."""
    return elements >= max(2 * points, POOL)


def decoy_matches(
    chosen: Chosen, moduli_B: Residues, coefficients_BK: Residues
) -> npt.NDArray[np.int64]:
    """Return [B] the decoys at which a proof claims an entry as large as the chunk's larger ones.

    That is: above the decoy's own magnitude and not above the chunk's largest. An honest proof
    matches a decoy with the probability that a random 16-bit pattern lies in that range, about 1 to
    5 %.
    """
    pool_BP, elements = chosen.pool_BP, chosen.elements
    chunks = len(pool_BP)
    if not has_decoys(elements, coefficients_BK.shape[1]):
        return np.zeros(chunks, np.int64)
    pool_P = pool_places(elements)
    magnitudes_BDG = (pool_BP & _MAGNITUDE).reshape(chunks, DECOYS, 4)
    chosen_BD1 = magnitudes_BDG.argmin(axis=2)[:, :, None]
    own_BD = np.take_along_axis(magnitudes_BDG, chosen_BD1, axis=2)[:, :, 0]
    places_BD = pool_P.reshape(DECOYS, 4)[np.arange(DECOYS), chosen_BD1[:, :, 0]]
    x_BD = (places_BD % moduli_B[:, None]).astype(np.uint32)
    claims_BD = evaluate(coefficients_BK, x_BD).astype(np.uint16) & _MAGNITUDE
    largest_B = (chosen.values_BK & _MAGNITUDE).max(axis=1)
    is_match_BD = (claims_BD > own_BD) & (claims_BD <= largest_B[:, None])
    matches: npt.NDArray[np.int64] = is_match_BD.sum(axis=1).astype(np.int64)
    return matches
