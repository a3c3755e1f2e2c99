"""The replay of verifiable sampling: how far each delivered token is from what sampling yields.

Needs the logits of one prefill and nothing else. The margin of a token is how much its
`logit / T + g` misses the maximum by: 0 for the token that sampling yields under these logits,
small where other arithmetic turned a close choice, large for a token that was chosen otherwise.
Axes: T completion tokens of one sample, N of all samples, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muster.inference import sampling

Margins = npt.NDArray[np.float32]
Logits = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class ReplayResult:
    """The replay of some samples, in the order given."""

    margins: tuple[Margins, ...]
    """Per sample [T]: `max - chosen` in units of `logit / T`; inf for an id outside the vocabulary
    and for scores that are not finite."""
    expected: tuple[TokenIds, ...]
    """Per sample [T]: the token that sampling yields."""

    def outside(self, margin: float) -> list[int]:
        """Return per sample the number of tokens whose margin exceeds `margin`."""
        return [int((~(margins_T <= margin)).sum()) for margins_T in self.margins]


def replay(
    logits: Sequence[Logits],
    tokens: Sequence[Sequence[int]],
    seeds: Sequence[int],
    temperature: float,
) -> ReplayResult:
    """Return how far the tokens of samples are from what their seeds and logits yield.

    Takes per sample [T, V] float32 logits before temperature. Cost grows with tokens x vocabulary;
    memory beyond the logits is bounded by one block of `sampling.BLOCK_ELEMENTS` scores. Never
    raises on what a peer may claim: tokens may be any integers.
    """
    lengths = [len(t) for t in tokens]
    total = sum(lengths)
    margins_N, expected_N = np.empty(total, np.float32), np.empty(total, np.int64)
    if total:
        seeds_N = np.repeat(np.array(seeds, np.uint64), lengths)
        positions_N = np.concatenate([np.arange(n, dtype=np.uint64) for n in lengths])
        tokens_N = np.concatenate([np.asarray(t, np.int64) for t in tokens])
        for at, logits_BV in _blocks(logits):
            margins_N[at], expected_N[at] = _replay_block(
                logits_BV, tokens_N[at], seeds_N[at], positions_N[at], temperature
            )
    cuts = np.cumsum(lengths)[: len(lengths) - 1]
    margins, expected = np.split(margins_N, cuts), np.split(expected_N, cuts)
    return ReplayResult(tuple(margins[: len(lengths)]), tuple(expected[: len(lengths)]))


def _blocks(logits: Sequence[Logits]) -> Iterator[tuple[slice, Logits]]:
    """Yield all samples' rows in order, joined or cut to blocks, with their places among all."""
    held: list[Logits] = []
    rows = start = 0
    for logits_TV in logits:
        size = max(1, sampling.BLOCK_ELEMENTS // logits_TV.shape[1])
        for first in range(0, len(logits_TV), size):
            part = logits_TV[first : first + size]
            if rows + len(part) > size:
                yield slice(start, start + rows), _join(held)
                held, start, rows = [], start + rows, 0
            held.append(part)
            rows += len(part)
    if held:
        yield slice(start, start + rows), _join(held)


def _join(parts: list[Logits]) -> Logits:
    return np.asarray(parts[0] if len(parts) == 1 else np.concatenate(parts), np.float32)


def _replay_block(
    logits_BV: Logits,
    tokens_B: TokenIds,
    seeds_B: npt.NDArray[np.uint64],
    positions_B: npt.NDArray[np.uint64],
    temperature: float,
) -> tuple[Margins, TokenIds]:
    rows, vocab = logits_BV.shape
    temperature_B = np.full(rows, temperature, np.float32)
    expected_B, best_B = sampling.winners(logits_BV, seeds_B, positions_B, temperature_B)
    is_known = (tokens_B >= 0) & (tokens_B < vocab)
    known_B = np.where(is_known, tokens_B, 0)
    claimed_B = sampling.scaled(logits_BV[np.arange(rows), known_B][:, None], temperature_B)[:, 0]
    with np.errstate(invalid="ignore"):
        claimed_B = claimed_B + sampling.token_noise(seeds_B, positions_B, known_B)
        margins_B = best_B - claimed_B
    is_finite = is_known & np.isfinite(margins_B)
    return np.where(is_finite, margins_B, np.float32(np.inf)), expected_B
