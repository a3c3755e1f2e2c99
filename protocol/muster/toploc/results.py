"""What a verification yields: how far hidden states are from a proof. No limit is applied here."""

from __future__ import annotations

from dataclasses import dataclass

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
    """Points compared: min(topk, half of the elements), at least 1."""
    decoy_matches: int = 0
    """Decoys at which the proof claims a large entry, see `muster.toploc.screening`."""
