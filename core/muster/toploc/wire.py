"""Bytes of TOPLOC proofs: `uint16 modulus || K * uint16 coefficient`, big-endian, and nothing else.

Parsing is strict and total: any byte string either is the canonical form of a proof or raises
ProofError with a reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import ProofError
from muster.toploc.field import PRIME, Residues

MAX_ELEMENTS = 2**31
"""Most entries of a chunk: indices are 32-bit integers."""

_MODULUS_SLACK = 1024
"""Moduli to try: each fails if K indices collide, with probability about K^2 / 2 PRIME."""
_MOST_POINTS_WITH_SLACK = 512
"""Most points for which all these tries fail in less than one of 10^50 chunks."""


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Size of one chunk and of its proof."""

    elements: int
    """Hidden-state entries in the chunk."""
    points: int
    """Coefficients in its proof: min(topk, elements)."""

    @property
    def compared(self) -> int:
        """Entries that are compared: only the larger half of a chunk if a proof covers more than
        half. Small entries are differences of large ones, and their relative errors have no bound.
        """
        return min(self.points, max(1, self.elements // 2))

    @property
    def proof_bytes(self) -> int:
        """Length of the chunk's proof."""
        return 2 + 2 * self.points

    @property
    def smallest_modulus(self) -> int:
        """Least modulus of its proof. If all indices are below the field's order, no modulus below
        it is needed; else few tries are enough. A small modulus would map all positions of a
        channel to one point, so a forger need not guess the positions of the largest entries.
        """
        if self.elements <= PRIME:
            return PRIME
        return PRIME - _MODULUS_SLACK if self.points <= _MOST_POINTS_WITH_SLACK else self.points


def chunk_shapes(
    tokens: int, hidden_size: int, *, chunk_tokens: int, topk: int
) -> list[ChunkShape]:
    """Return the chunks that `tokens` completion tokens make; the last may be shorter."""
    if min(tokens, hidden_size, chunk_tokens, topk) < 1:
        raise ProofError(
            f"no chunks of {chunk_tokens} from {tokens} tokens of width {hidden_size}, topk {topk}",
            reason="count",
        )
    if min(tokens, chunk_tokens) * hidden_size > MAX_ELEMENTS:
        raise ProofError(f"chunks of {chunk_tokens} rows of {hidden_size} are too large to prove")
    starts = range(0, tokens, chunk_tokens)
    sizes = [min(chunk_tokens, tokens - start) * hidden_size for start in starts]
    return [ChunkShape(elements, min(topk, elements)) for elements in sizes]


def split_proofs(
    joined: bytes, *, tokens: int, hidden_size: int, chunk_tokens: int = 32, topk: int = 128
) -> list[bytes]:
    """Return the proofs of a sample of `tokens` completion tokens from their joined bytes.

    Raises ProofError whose `reason` is "count" (whole proofs missing or left over), "length",
    "modulus" or "coefficient".
    """
    shapes = chunk_shapes(tokens, hidden_size, chunk_tokens=chunk_tokens, topk=topk)
    expected = sum(shape.proof_bytes for shape in shapes)
    if len(joined) != expected:
        whole = -(-len(joined) // shapes[0].proof_bytes)
        reason = "length" if whole == len(shapes) else "count"
        raise ProofError(
            f"{len(joined)} bytes of proofs where {len(shapes)} chunks need {expected}",
            reason=reason,
        )
    size = shapes[0].proof_bytes
    proofs = [joined[start : start + size] for start in range(0, expected, size)]
    decode(proofs[:-1], shapes[0])
    decode(proofs[-1:], shapes[-1])
    return proofs


def encode(moduli_B: Residues, coefficients_BK: Residues) -> list[bytes]:
    """Return one proof per row."""
    words = np.column_stack([moduli_B, coefficients_BK]).astype(">u2")
    return [row.tobytes() for row in words]


def require_lengths(proofs: Sequence[bytes], sizes: Sequence[int]) -> None:
    """Raise ProofError whose `reason` is "length" unless every proof has its size."""
    for proof, size in zip(proofs, sizes, strict=True):
        if len(proof) != size:
            raise ProofError(f"proof of {len(proof)} bytes, expected {size}", reason="length")


def decode(proofs: Sequence[bytes], shape: ChunkShape) -> tuple[Residues, Residues]:
    """Return moduli [B] and coefficients [B, points] of proofs of chunks of one shape.

    Raises ProofError as `split_proofs` does.
    """
    require_lengths(proofs, [shape.proof_bytes] * len(proofs))
    words: npt.NDArray[np.uint32] = np.frombuffer(b"".join(proofs), ">u2").astype(np.uint32)
    moduli, coefficients = np.split(words.reshape(-1, 1 + shape.points), [1], axis=1)
    least = shape.smallest_modulus
    if moduli.size and not least <= moduli.min() <= moduli.max() <= PRIME:
        raise ProofError(f"a modulus is outside [{least}, {PRIME}]", reason="modulus")
    if moduli.size and coefficients.max() >= PRIME:
        raise ProofError(f"a coefficient is not below {PRIME}", reason="coefficient")
    return moduli[:, 0], coefficients
