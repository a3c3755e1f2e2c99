"""What a proof commits to: the largest entries of a chunk of hidden states, as bfloat16 patterns.

Owns the rounding to bfloat16, the canonical choice among ties and the index modulus. Knows nothing
of polynomials. Axes: T completion tokens, N rows of several samples, H hidden units, B chunks,
E elements of a chunk, K chosen entries.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import ProofError
from muster.toploc.field import PRIME, Residues

if TYPE_CHECKING:
    import torch

Patterns = npt.NDArray[np.uint16]
"""bfloat16 values as their 16-bit patterns."""

HiddenRows: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
"""[T, H] hidden states: numpy uint16 patterns or floats, or a torch float tensor on any device."""

SIGN_BIT = 0x8000
EXPONENT_BITS = 0x7F80
MANTISSA_BITS = 0x007F

_SMALL_CHUNK = 8192
"""Elements up to which chunks are ranked whole, many in one call."""


def join_patterns(samples: Sequence[HiddenRows]) -> tuple[Patterns, list[int]]:
    """Return the bfloat16 patterns [N, H] of samples one below the other, and their row counts.

    Floats are rounded to nearest even. Raises ProofError unless every sample has rows, all have one
    width, and nothing but finite numbers.
    """
    rounded = [_round_to_bfloat16(hidden) for hidden in samples]
    shapes = {patterns.shape[1:] for patterns in rounded}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1 or not all(p.size for p in rounded):
        raise ProofError(f"hidden states must be [tokens, hidden], got {sorted(shapes)}")
    joined = rounded[0] if len(rounded) == 1 else np.concatenate(rounded)
    if ((joined & EXPONENT_BITS) == EXPONENT_BITS).any():
        raise ProofError(
            "hidden states hold NaN or infinity",
            hint="the policy's weights or the engine's arithmetic are broken",
        )
    return joined, [len(patterns) for patterns in rounded]


def _round_to_bfloat16(hidden: HiddenRows) -> Patterns:
    if not isinstance(hidden, np.ndarray):
        # Only a caller that has imported torch can hold one of its tensors.
        torch = sys.modules["torch"]
        narrow = hidden.detach().to(torch.bfloat16)
        integers: npt.NDArray[np.int16] = narrow.contiguous().view(torch.int16).cpu().numpy()
        return integers.view(np.uint16)
    if hidden.dtype == np.uint16:
        return hidden
    if hidden.dtype.kind != "f":
        raise ProofError(f"hidden states must be floats or uint16 patterns, got {hidden.dtype}")
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(hidden, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    # Rounding could carry a NaN's mantissa into the sign bit, out of the NaNs.
    kept = np.where(is_nan, bits | np.uint32(0x00400000), rounded)
    return (kept >> np.uint32(16)).astype(np.uint16)


def select_top(patterns_BE: Patterns, count: int) -> npt.NDArray[np.int64]:
    """Return [B, K]: flat indices of each chunk's `count` largest magnitudes.

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
    """Return [B]: per chunk the largest modulus up to PRIME that keeps its indices distinct.

    Raises ProofError when there is none, which takes indices that no hidden state has.
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
