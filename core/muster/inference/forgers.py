"""Forgers that computed nothing, as pure functions of what they may know.

They make proofs without running the policy over the sample at hand; they may know everything about
other samples. Axes: B chunks of one shape, R rows of a chunk, H hidden units, K points.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from muster.protocol.recipe import ProofRecipe
from muster.toploc import build_proofs_many
from muster.toploc.field import PRIME, interpolate

Patterns = npt.NDArray[np.uint16]

_SIGN_BIT = np.uint16(0x8000)
_CONSTANT_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True, slots=True)
class RecomputedChunks:
    """Chunks of one shape, as a validator recomputes them."""

    patterns_BRH: Patterns
    """Hidden states, bfloat16 patterns."""
    tokens_BR: npt.NDArray[np.int64]
    """The completion tokens they predict."""
    prompts_B: npt.NDArray[np.int64]
    """Which prompt each belongs to."""
    proof: ProofRecipe
    """The proofs asked for."""

    @property
    def points(self) -> int:
        """Points of each chunk's proof."""
        return min(self.proof.topk, int(np.prod(self.patterns_BRH.shape[1:])))


Forger = Callable[[RecomputedChunks, np.random.Generator], list[list[bytes]]]
"""Returns attempts, each with one proof per chunk. A chunk is forged if any attempt passes."""


def constants(chunks: RecomputedChunks, _random: np.random.Generator) -> list[list[bytes]]:
    """Polynomials that are constant: zero, and the commonest and typical committed values."""
    values = _largest_values(chunks)
    typical = np.quantile(values & ~_SIGN_BIT, _CONSTANT_QUANTILES, method="nearest")
    commonest = np.bincount(values.ravel()).argmax()
    chosen = {0, int(commonest)} | {int(v) | sign for v in typical for sign in (0, 0x8000)}
    return [[_polynomial([value], chunks.points)] * len(values) for value in sorted(chosen)]


def random_polynomials(chunks: RecomputedChunks, random: np.random.Generator) -> list[list[bytes]]:
    """Polynomials with random coefficients."""
    drawn = random.integers(0, PRIME, (len(chunks.patterns_BRH), chunks.points))
    return [[_polynomial(row, chunks.points) for row in drawn.tolist()]]


def position_template(chunks: RecomputedChunks, _random: np.random.Generator) -> list[list[bytes]]:
    """Proofs of the mean hidden state at each position, over samples of other prompts."""
    return [_template(chunks, np.broadcast_to(np.arange(_rows(chunks)), chunks.tokens_BR.shape))]


def token_template(chunks: RecomputedChunks, _random: np.random.Generator) -> list[list[bytes]]:
    """Proofs of the mean hidden state that predicts each token, over samples of other prompts."""
    return [_template(chunks, chunks.tokens_BR)]


def channel_template(chunks: RecomputedChunks, _random: np.random.Generator) -> list[list[bytes]]:
    """Proofs of the mean hidden state, under a modulus that maps all positions of a channel to one.

    It needs no guess of where the largest entries are, only of their channels.
    """
    hidden = chunks.patterns_BRH.shape[2]
    modulus = hidden * -(-chunks.points // hidden)
    values = (chunks.patterns_BRH.astype(np.uint32) << 16).view(np.float32)
    mean_M = np.resize(values.mean(axis=(0, 1)), modulus).astype(np.float32)
    chosen = np.sort(np.argsort(-np.abs(mean_M), kind="stable")[: chunks.points])
    patterns = (mean_M[chosen].view(np.uint32) >> 16).astype(np.uint32)
    coefficients = interpolate(chosen[None].astype(np.uint32), patterns[None] % np.uint32(PRIME))
    proof = _polynomial(coefficients[0].tolist(), chunks.points, modulus=min(modulus, PRIME))
    return [[proof] * len(chunks.patterns_BRH)]


def transplants(chunks: RecomputedChunks, random: np.random.Generator) -> list[list[bytes]]:
    """True proofs of another prompt's sample."""
    honest = np.array(_build(chunks, chunks.patterns_BRH), dtype=object)
    donors = [
        random.choice(np.flatnonzero(chunks.prompts_B != prompt)) for prompt in chunks.prompts_B
    ]
    return [honest[donors].tolist()]


def negated(chunks: RecomputedChunks, _random: np.random.Generator) -> list[list[bytes]]:
    """True proofs with every sign flipped."""
    return [_build(chunks, chunks.patterns_BRH ^ _SIGN_BIT)]


NOTHING: dict[str, Forger] = {
    "constant": constants,
    "random polynomial": random_polynomials,
    "mean hidden state per position": position_template,
    "mean hidden state per token": token_template,
    "mean per channel, small modulus": channel_template,
    "another prompt's proof": transplants,
}
"""Forgers that computed nothing, by name."""


def _rows(chunks: RecomputedChunks) -> int:
    return int(chunks.patterns_BRH.shape[1])


def _build(chunks: RecomputedChunks, hidden_BRH: npt.NDArray[Any]) -> list[bytes]:
    built = build_proofs_many(
        list(hidden_BRH), chunk_tokens=chunks.proof.chunk_tokens, topk=chunks.proof.topk
    )
    return [proofs[0] for proofs in built]


def _largest_values(chunks: RecomputedChunks) -> Patterns:
    flat = chunks.patterns_BRH.reshape(len(chunks.patterns_BRH), -1)
    order = np.argsort(flat & ~_SIGN_BIT, axis=1)[:, -chunks.points :]
    return np.take_along_axis(flat, order, axis=1)


def _polynomial(coefficients: list[int], points: int, *, modulus: int = PRIME) -> bytes:
    words = np.zeros(1 + points, ">u2")
    words[0] = modulus
    words[1 : 1 + len(coefficients)] = coefficients
    return words.tobytes()


def _template(chunks: RecomputedChunks, keys_BR: npt.NDArray[np.int64]) -> list[bytes]:
    """Return proofs of mean rows per key; each half of the prompts uses the other half's means."""
    values = (chunks.patterns_BRH.astype(np.uint32) << 16).view(np.float32)
    forged = np.empty_like(values)
    half_B = chunks.prompts_B % 2
    for half in (0, 1):
        known, target = values[half_B != half], values[half_B == half]
        filled = np.broadcast_to(known.mean(axis=(0, 1)), target.shape).copy()
        for key in np.unique(keys_BR):
            seen = keys_BR[half_B != half] == key
            if seen.any():
                filled[keys_BR[half_B == half] == key] = known[seen].mean(axis=0)
        forged[half_B == half] = filled
    return _build(chunks, forged)
