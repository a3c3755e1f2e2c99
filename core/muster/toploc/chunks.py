"""Hidden states as bfloat16 patterns, cut into chunks, one per proof.

Owns the rounding to bfloat16, and the measures of a chunk's distance from its proof. Does not know
how a proof chooses entries. Axes: T completion tokens, H hidden units.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import ProofError
from muster.toploc.wire import chunk_shapes

if TYPE_CHECKING:
    import torch

Patterns = npt.NDArray[np.uint16]
"""bfloat16 values as their 16-bit patterns."""

HiddenRows: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
"""[T, H] hidden states: numpy uint16 patterns or floats, or a torch float tensor on any device."""

SIGN_BIT = 0x8000
EXPONENT_BITS = 0x7F80
MANTISSA_BITS = 0x007F

NO_MATCH = 2.0**64
"""Mantissa error of a chunk in which no exponent matches, as in the `toploc` library."""
DECOYS = 32
"""Small entries of a chunk at which a proof must claim nothing, see `muster.toploc.portable`."""
POOL = 4 * DECOYS
"""Evenly spaced entries. The smallest of every four is a decoy, so no decoy is among the
largest."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of some samples of one width, in order."""

    samples: list[Patterns]
    """[T, H] each, contiguous."""
    chunk_tokens: int
    """Rows of a chunk; a sample's last chunk may have fewer."""
    counts: list[int]
    """Chunks of each sample."""
    sizes: npt.NDArray[np.uintp]
    """Elements of each chunk."""
    points: npt.NDArray[np.uintp]
    """Entries that each chunk's proof commits to."""

    @property
    def compared(self) -> npt.NDArray[np.uintp]:
        """Entries of each chunk that are compared with its proof, see `ChunkShape.compared`."""
        return np.minimum(self.points, np.maximum(1, self.sizes // 2))

    @property
    def proof_sizes(self) -> list[int]:
        """Bytes of each chunk's proof."""
        sizes: list[int] = (2 + 2 * self.points).tolist()
        return sizes

    @property
    def addresses(self) -> npt.NDArray[np.uintp]:
        """Memory address of each chunk's first element, valid while `samples` exists."""
        row_bytes = self.samples[0][0].nbytes
        starts = [np.arange(count) * self.chunk_tokens * row_bytes for count in self.counts]
        bases = [sample.ctypes.data for sample in self.samples]
        moved = [base + start for base, start in zip(bases, starts, strict=True)]
        return np.concatenate(moved).astype(np.uintp)

    def __iter__(self) -> Iterator[Patterns]:
        """Yield every chunk's elements, flat."""
        for sample in self.samples:
            for start in range(0, len(sample), self.chunk_tokens):
                yield sample[start : start + self.chunk_tokens].reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """The entries that proofs need of B chunks of one size, chosen from their E elements."""

    elements: int
    """E."""
    points: int
    """K, the number of entries chosen of each chunk."""
    packed_BN: npt.NDArray[np.int32]
    """[B, 2K + POOL + 1], contiguous: places of the largest magnitudes (of equal ones the first),
    the patterns there, the patterns at `pool_places`, and whether all elements are finite."""

    @property
    def indices_BK(self) -> npt.NDArray[np.int64]:
        """Places of the largest magnitudes."""
        return self.packed_BN[:, : self.points].astype(np.int64)

    @property
    def values_BK(self) -> npt.NDArray[np.uint32]:
        """Patterns there."""
        return self.packed_BN[:, self.points : 2 * self.points].astype(np.uint32)

    @property
    def pool_BP(self) -> Patterns:
        """Patterns at `pool_places`."""
        return self.packed_BN[:, 2 * self.points : -1].astype(np.uint16)

    @property
    def is_finite(self) -> bool:
        """Whether all elements of all chunks are finite."""
        return bool(self.packed_BN[:, -1].all())


def pool_places(elements: int) -> npt.NDArray[np.int64]:
    """Return the places [POOL] in a chunk that decoys are chosen from."""
    return np.arange(POOL) * (elements - 1) // (POOL - 1)


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """The distance of a chunk of recomputed hidden states from its proof."""

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
    """Decoys at which the proof claims a large entry, see `muster.toploc.portable`."""


def cut(samples: Sequence[HiddenRows], *, chunk_tokens: int, topk: int) -> Chunks:
    """Return the chunks of at least one sample.

    Raises ProofError unless every sample is [tokens, hidden], not empty, and all have one width.
    """
    patterns = [to_patterns(hidden) for hidden in samples]
    shapes = {sample.shape[1:] for sample in patterns}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1 or not all(p.size for p in patterns):
        raise ProofError(f"hidden states must be [tokens, hidden], got {sorted(shapes)}")
    (width,) = next(iter(shapes))
    shaped = [
        chunk_shapes(len(sample), width, chunk_tokens=chunk_tokens, topk=topk)
        for sample in patterns
    ]
    flat = [shape for shapes in shaped for shape in shapes]
    return Chunks(
        patterns,
        chunk_tokens,
        [len(shapes) for shapes in shaped],
        np.array([shape.elements for shape in flat], np.uintp),
        np.array([shape.points for shape in flat], np.uintp),
    )


def to_patterns(hidden: HiddenRows) -> Patterns:
    """Return contiguous bfloat16 patterns of any shape; floats are rounded to nearest even.

    Raises ProofError for numpy arrays of neither floats nor uint16.
    """
    if not isinstance(hidden, np.ndarray):
        # Only a caller that has imported torch can hold one of its tensors.
        torch = sys.modules["torch"]
        narrow = hidden.detach().to(torch.bfloat16)
        integers: npt.NDArray[np.int16] = narrow.contiguous().view(torch.int16).cpu().numpy()
        return integers.view(np.uint16)
    if hidden.dtype == np.uint16:
        return np.require(hidden, requirements=["C", "A"])
    if hidden.dtype.kind != "f":
        raise ProofError(f"hidden states must be floats or uint16 patterns, got {hidden.dtype}")
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(hidden, np.float32).view(np.uint32)
    kept = (bits >> np.uint32(16)) & np.uint32(1)
    kept += bits
    kept += np.uint32(0x7FFF)
    kept >>= np.uint32(16)
    rounded = kept.astype(np.uint16)
    is_nan = np.isnan(hidden)
    if is_nan.any():
        # Rounding may carry a NaN's mantissa into the sign bit, which makes it a number.
        rounded[is_nan] = 0x7FC0
    return rounded
