"""Builds TOPLOC proofs of hidden states, and measures the distance of hidden states from them.

A proof commits to the largest entries of a chunk; the verifier recomputes the chunk by one prefill
and compares. No limit is applied here: `muster.toploc.calibration` judges. Proofs are
byte-identical to those of the `toploc` library (arXiv 2501.16007) wherever it succeeds without ties
at the cut. Differences: ties are broken by index, chunks with fewer than `topk` elements can be
proven, signs are compared, and NaN, infinity and every malformed proof are refused.

The compiled kernel computes, or numpy without one: the bytes and figures are the same.
"""

from collections.abc import Sequence
from functools import cache
from itertools import islice
from typing import Protocol, TypeVar

from muster.protocol.errors import ProofError
from muster.toploc import kernel, wire
from muster.toploc.chunks import Chosen, ChunkResult, Chunks, HiddenRows, cut
from muster.toploc.portable import Portable

_Item = TypeVar("_Item")


class Backend(Protocol):
    """Computes proofs of chunks; raises ProofError."""

    def build(self, chunks: Chunks) -> list[bytes]:
        """Return every chunk's proof."""

    def verify(self, chunks: Chunks, proofs: Sequence[bytes]) -> list[ChunkResult]:
        """Return the distances of chunks from their proofs, which must have the right lengths."""

    def build_chosen(self, chosen: Chosen) -> list[bytes]:
        """Return the proofs of chunks."""

    def verify_chosen(
        self, chosen: Chosen, proofs: Sequence[bytes], points: int
    ) -> list[ChunkResult]:
        """Return the distances of chunks from their proofs of `points` points, which must have the
        right lengths.
        """


def build_proofs(hidden_TH: HiddenRows, *, chunk_tokens: int = 32, topk: int = 128) -> list[bytes]:
    """Return the proofs of one sample's hidden states, one per chunk.

    Raises ProofError on NaN, infinity, and anything that is not [tokens, hidden].
    """
    return build_proofs_many([hidden_TH], chunk_tokens=chunk_tokens, topk=topk)[0]


def build_proofs_many(
    samples: Sequence[HiddenRows], *, chunk_tokens: int = 32, topk: int = 128
) -> list[list[bytes]]:
    """Return the proofs of many samples of one width in one call."""
    if not samples:
        return []
    chunks = cut(samples, chunk_tokens=chunk_tokens, topk=topk)
    return _by_sample(chunks, _backend().build(chunks))


def verify_proofs(
    hidden_TH: HiddenRows, proofs: Sequence[bytes], *, chunk_tokens: int = 32, topk: int = 128
) -> list[ChunkResult]:
    """Return per chunk the distance of recomputed hidden states from a sample's proofs.

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
    """Return the results of `verify_proofs` for many samples of one width in one call."""
    if not samples:
        return []
    chunks = cut(samples, chunk_tokens=chunk_tokens, topk=topk)
    for sample, (expected, given) in enumerate(zip(chunks.counts, proofs, strict=True)):
        if len(given) != expected:
            raise ProofError(
                f"sample {sample} has {len(given)} proofs for {expected} chunks", reason="count"
            )
    flat = [proof for of_sample in proofs for proof in of_sample]
    wire.require_lengths(flat, chunks.proof_sizes)
    return _by_sample(chunks, _backend().verify(chunks, flat))


def prove_chosen(chosen: Chosen) -> list[bytes]:
    """Return the proofs of chunks whose entries were chosen already; raises ProofError."""
    return _backend().build_chosen(chosen)


def verify_chosen(
    chosen: Chosen, proofs: Sequence[bytes], shape: wire.ChunkShape
) -> list[ChunkResult]:
    """Return the distances of chunks of one shape from their proofs, given the `shape.compared`
    entries chosen of each chunk; raises ProofError.
    """
    if (chosen.elements, chosen.points) != (shape.elements, shape.compared):
        # With other sizes the kernel would read beyond the rows.
        raise ProofError(
            f"{chosen.points} entries of chunks of {chosen.elements} were chosen, proofs of "
            f"{shape.elements} are compared at {shape.compared}"
        )
    wire.require_lengths(proofs, [shape.proof_bytes] * len(chosen.packed_BN))
    return _backend().verify_chosen(chosen, proofs, shape.points)


@cache
def _backend() -> Backend:
    return kernel.load() or Portable()


def _by_sample(chunks: Chunks, items: list[_Item]) -> list[list[_Item]]:
    remaining = iter(items)
    return [list(islice(remaining, count)) for count in chunks.counts]
