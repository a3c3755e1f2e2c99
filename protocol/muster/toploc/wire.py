"""Bytes of TOPLOC proofs: `uint16 modulus || K * uint16 coefficient`, big-endian, and nothing else.

Parsing is strict and total: any byte string either is the canonical form of a proof or raises
ProofError with a reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import ProofError
from muster.toploc.field import PRIME, Residues


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """Size of one chunk and of its proof."""

    rows: int
    """Completion tokens in the chunk."""
    points: int
    """Coefficients in its proof: min(topk, elements)."""

    @property
    def proof_bytes(self) -> int:
        """Length of the chunk's proof."""
        return 2 + 2 * self.points


def chunk_shapes(
    tokens: int, hidden_size: int, *, chunk_tokens: int, topk: int
) -> list[ChunkShape]:
    """Return the chunks that `tokens` completion tokens make; the last may be shorter."""
    if min(tokens, hidden_size, chunk_tokens, topk) < 1:
        raise ProofError(
            f"no chunks of {chunk_tokens} from {tokens} tokens of width {hidden_size}, topk {topk}",
            reason="count",
        )
    starts = range(0, tokens, chunk_tokens)
    rows = [min(chunk_tokens, tokens - start) for start in starts]
    return [ChunkShape(r, min(topk, r * hidden_size)) for r in rows]


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
    is_last_shorter = shapes[-1].points < shapes[0].points
    decode(proofs[: len(proofs) - is_last_shorter], shapes[0].points)
    decode(proofs[-1:], shapes[-1].points)
    return proofs


def encode(moduli_B: Residues, coefficients_BK: Residues) -> list[bytes]:
    """Return one proof per row."""
    words = np.column_stack([moduli_B, coefficients_BK]).astype(">u2")
    return [row.tobytes() for row in words]


def decode(proofs: list[bytes], points: int) -> tuple[Residues, Residues]:
    """Return moduli [B] and coefficients [B, points]; raises ProofError as `split_proofs` does."""
    size = 2 + 2 * points
    for proof in proofs:
        if len(proof) != size:
            raise ProofError(f"proof of {len(proof)} bytes, expected {size}", reason="length")
    words: npt.NDArray[np.uint32] = np.frombuffer(b"".join(proofs), ">u2").astype(np.uint32)
    moduli, coefficients = np.split(words.reshape(-1, 1 + points), [1], axis=1)
    if moduli.size and not points <= moduli.min() <= moduli.max() <= PRIME:
        raise ProofError(f"a modulus is outside [{points}, {PRIME}]", reason="modulus")
    if moduli.size and coefficients.max() >= PRIME:
        raise ProofError(f"a coefficient is not below {PRIME}", reason="coefficient")
    return moduli[:, 0], coefficients
