"""The cheats that a calibration must keep out, as pure functions of what they may know.

A computed-nothing forger makes proofs without running the policy over the sample at hand; it may
know everything about other samples. Weight changes stand for workers that run something else. Axes:
B chunks of one shape, R rows of a chunk, H hidden units, K points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from muster.protocol.recipe import ProofRecipe
from muster.toploc import build_proofs_many

Patterns = npt.NDArray[np.uint16]

_SIGN_BIT = np.uint16(0x8000)
_CONSTANT_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


@dataclass(frozen=True, slots=True)
class Chunks:
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


Forger = Callable[[Chunks, np.random.Generator], list[list[bytes]]]
"""Makes one proof per chunk, in one or several attempts; a chunk counts as forged if any passes."""


def constants(chunks: Chunks, _random: np.random.Generator) -> list[list[bytes]]:
    """Polynomials that are constant: zero, and the commonest and typical committed values."""
    values = _largest_values(chunks)
    typical = np.quantile(values & ~_SIGN_BIT, _CONSTANT_QUANTILES, method="nearest")
    commonest = np.bincount(values.ravel()).argmax()
    chosen = {0, int(commonest)} | {int(v) | sign for v in typical for sign in (0, 0x8000)}
    return [[_polynomial([value], chunks.points)] * len(values) for value in sorted(chosen)]


def random_polynomials(chunks: Chunks, random: np.random.Generator) -> list[list[bytes]]:
    """Polynomials with random coefficients."""
    drawn = random.integers(0, 65497, (len(chunks.patterns_BRH), chunks.points))
    return [[_polynomial(row, chunks.points) for row in drawn.tolist()]]


def position_template(chunks: Chunks, _random: np.random.Generator) -> list[list[bytes]]:
    """Proofs of the mean hidden state at each position, over samples of other prompts."""
    return [_template(chunks, np.broadcast_to(np.arange(_rows(chunks)), chunks.tokens_BR.shape))]


def token_template(chunks: Chunks, _random: np.random.Generator) -> list[list[bytes]]:
    """Proofs of the mean hidden state that predicts each token, over samples of other prompts."""
    return [_template(chunks, chunks.tokens_BR)]


def transplants(chunks: Chunks, random: np.random.Generator) -> list[list[bytes]]:
    """True proofs of another prompt's sample."""
    honest = np.array(_build(chunks, chunks.patterns_BRH), dtype=object)
    donors = [
        random.choice(np.flatnonzero(chunks.prompts_B != prompt)) for prompt in chunks.prompts_B
    ]
    return [honest[donors].tolist()]


def negated(chunks: Chunks, _random: np.random.Generator) -> list[list[bytes]]:
    """True proofs with every sign turned."""
    return [_build(chunks, chunks.patterns_BRH ^ _SIGN_BIT)]


NOTHING: dict[str, Forger] = {
    "constant": constants,
    "random polynomial": random_polynomials,
    "mean hidden state per position": position_template,
    "mean hidden state per token": token_template,
    "another prompt's proof": transplants,
}
"""Forgers that computed nothing, by name."""


def _rows(chunks: Chunks) -> int:
    return int(chunks.patterns_BRH.shape[1])


def _build(chunks: Chunks, patterns_BRH: Patterns) -> list[bytes]:
    built = build_proofs_many(
        list(patterns_BRH), chunk_tokens=chunks.proof.chunk_tokens, topk=chunks.proof.topk
    )
    return [proofs[0] for proofs in built]


def _largest_values(chunks: Chunks) -> Patterns:
    flat = chunks.patterns_BRH.reshape(len(chunks.patterns_BRH), -1)
    order = np.argsort(flat & ~_SIGN_BIT, axis=1)[:, -chunks.points :]
    return np.take_along_axis(flat, order, axis=1)


def _polynomial(coefficients: list[int], points: int) -> bytes:
    words = np.zeros(1 + points, ">u2")
    words[0] = 65497
    words[1 : 1 + len(coefficients)] = coefficients
    return words.tobytes()


def _template(chunks: Chunks, keys_BR: npt.NDArray[np.int64]) -> list[bytes]:
    """Return proofs of mean rows per key, each half of the prompts learning from the other."""
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
    built = build_proofs_many(
        list(forged), chunk_tokens=chunks.proof.chunk_tokens, topk=chunks.proof.topk
    )
    return [proofs[0] for proofs in built]


WeightChange = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
"""Returns what a cheat runs instead of a weight tensor."""


def one_step(learning_rate: float) -> WeightChange:
    """Every weight moved by the learning rate: the first step of Adam, in a random direction."""

    def change(weight: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        signs = torch.randint(0, 2, weight.shape, generator=random) * 2 - 1
        moved: torch.Tensor = weight + learning_rate * signs.to(weight)
        return moved

    return change


def noise(scale: float) -> WeightChange:
    """Gaussian noise, relative to the tensor's own spread."""

    def change(weight: torch.Tensor, random: torch.Generator) -> torch.Tensor:
        drawn = torch.randn(weight.shape, generator=random).to(weight)
        return weight + scale * weight.std(correction=0) * drawn

    return change


def quantised(bits: int) -> WeightChange:
    """Weights rounded to signed integers of `bits` bits, one scale per output row."""

    def change(weight: torch.Tensor, _random: torch.Generator) -> torch.Tensor:
        if weight.dim() < 2:
            return weight
        scale = weight.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / (2 ** (bits - 1) - 1)
        rounded: torch.Tensor = (weight / scale).round() * scale
        return rounded

    return change


def shuffled(weight: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Another model of the same make: the tensor's entries in another order."""
    order = torch.randperm(weight.numel(), generator=random).to(weight.device)
    return weight.flatten()[order].view_as(weight)


@contextmanager
def running(model: Any, change: WeightChange, *, seed: int) -> Iterator[None]:
    """Run the body with changed weights; afterwards the model has its own again."""
    random = torch.Generator().manual_seed(seed)
    own = [(weight, weight.detach().clone()) for weight in model.parameters()]
    try:
        with torch.no_grad():
            for weight, kept in own:
                weight.copy_(change(kept, random))
        yield
    finally:
        with torch.no_grad():
            for weight, kept in own:
                weight.copy_(kept)
