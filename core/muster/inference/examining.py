"""What a forward pass shows of samples, block of rows by block of rows.

An engine has the hidden states of some samples and can compute the logits of any few rows. Here the
rows of all samples are joined and cut into blocks. The logits of one block are small; they are
replayed and dropped, so no [T, V] array ever exists. Numpy only; `muster.inference.blocks` does the
same on a device. Axes: T completion tokens of a sample, N rows of all samples, B rows of a block, H
hidden units, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from muster.inference.engine import Examined, Replayed, Sample
from muster.inference.sampling import replay_block
from muster.protocol.recipe import ProofRecipe
from muster.toploc import ChunkResult, verify_proofs_many
from muster.toploc.chunks import Patterns
from muster.toploc.projections import VALUES, project_rows

BLOCK_BYTES = 64 << 20
"""Bytes of the float32 logits of one block, unless it is a single row."""

Floats = npt.NDArray[np.float32]
Odds = npt.NDArray[np.float64]


class Recomputed(NamedTuple):
    """All results of a forward pass for one completion; row t predicts token t.

    For calibration and small models only: at usual sizes it is half a megabyte per token.
    """

    hidden_TH: Patterns
    """Rows after the final norm, as bfloat16 patterns."""
    logits_TV: Floats
    """Logits, before temperature."""


class ClaimedTokens(NamedTuple):
    """Tokens that are claimed to follow from noise, one per row."""

    tokens_B: npt.NDArray[np.int64]
    seeds_B: npt.NDArray[np.uint64]
    positions_B: npt.NDArray[np.uint64]

    def at(self, rows: slice) -> ClaimedTokens:
        """Return the choices of some rows."""
        return ClaimedTokens(self.tokens_B[rows], self.seeds_B[rows], self.positions_B[rows])


class Block(Protocol):
    """The logits of some rows, on any device. Results of a device may still be on their way."""

    def replay(self, choices: Any, temperature: float) -> Replayed:
        """Return the rows' choices compared with those that the noise yields."""

    def ends(self, eos: Sequence[int], temperature: float) -> Odds:
        """Return the probability [B] of an EOS."""


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A Block in this process's memory."""

    logits_BV: Floats

    def replay(self, choices: ClaimedTokens, temperature: float) -> Replayed:
        """Return the rows' choices compared with those that the noise yields."""
        logits_BV = self.logits_BV
        margins_B, expected_B = replay_block(logits_BV, *choices, temperature)
        rows_B = np.arange(len(logits_BV))
        chosen_B = logits_BV[rows_B, choices.tokens_B]
        return Replayed(margins_B, expected_B, chosen_B > logits_BV[rows_B, expected_B])

    def ends(self, eos: Sequence[int], temperature: float) -> Odds:
        """Return the probability [B] of an EOS."""
        scaled_BV = self.logits_BV.astype(np.float64) / temperature
        weights_BV = np.exp(scaled_BV - scaled_BV.max(axis=1, keepdims=True))
        odds: Odds = weights_BV[:, list(eos)].sum(axis=1) / weights_BV.sum(axis=1)
        return odds


class ProofFindings(NamedTuple):
    """Findings about samples from their hidden states, which may be on any device."""

    chunks: Sequence[Sequence[ChunkResult]]
    """Per sample, each proof compared with them."""
    projections: Sequence[Odds]
    """Per sample [S, VALUES], see `Examined.projections`."""


def examine(
    samples: Sequence[Sample],
    prove: Callable[[], ProofFindings],
    block_of: Callable[[slice], Block],
    send: Callable[[ClaimedTokens], Any] | None = None,
    *,
    vocab_size: int,
    eos: Iterable[int],
    temperature: float,
    block_bytes: int | None = None,
) -> list[Examined]:
    """Return the findings about samples, which all have the same number of redraws.

    `block_of` computes the logits of some of the N rows, which are those of all samples in order,
    with at most `block_bytes` of float32, by default what suits a CPU; `send` brings choices to the
    blocks' device. `prove` is called once a device has been told to replay all blocks, and returns
    when the device has done so: its work on the host takes place meanwhile.
    """
    rows = max(1, (block_bytes or BLOCK_BYTES) // (4 * vocab_size))
    claimed = [send(choices) if send else choices for choices in _claimed(samples)]
    made, odds = _replayed(claimed, block_of, rows, sorted(eos), temperature)
    proven = prove()
    cuts = np.cumsum([len(sample.completion_tokens) for sample in samples])[:-1]
    ends = np.split(np.concatenate(odds), cuts)
    replays = [_by_sample(found, cuts) for found in made]
    return [
        Examined(
            replayed=own,
            chunks=tuple(found),
            projections=projections,
            redrawn=tuple(redrawn),
            ends_T=ends[i] if sample.redraws else None,
        )
        for i, (sample, found, projections, (own, *redrawn)) in enumerate(
            zip(samples, *proven, zip(*replays, strict=True), strict=True)
        )
    ]


def prove_host(
    samples: Sequence[Sample], hidden: Sequence[Patterns], proof: ProofRecipe
) -> ProofFindings:
    """Return the findings about samples from hidden states [T, H] in this process's memory.

    Raises ProofError for hidden states with NaN or infinity and for proofs that do not parse.
    """
    proofs = [sample.proofs for sample in samples]
    chunks = verify_proofs_many(hidden, proofs, chunk_tokens=proof.chunk_tokens, topk=proof.topk)
    sums = [
        [project_rows(hidden_TH, s.seed, s.first, s.tokens) for s in sample.shares]
        for sample, hidden_TH in zip(samples, hidden, strict=True)
    ]
    return ProofFindings(chunks, [np.array(each, np.float64).reshape(-1, VALUES) for each in sums])


def _replayed(
    claimed: Sequence[Any],
    block_of: Callable[[slice], Block],
    size: int,
    eos: Sequence[int],
    temperature: float,
) -> tuple[list[list[Replayed]], list[Odds]]:
    """Return the replays of all blocks, for the rows' own choices and each redraw; and the odds of
    EOS, if there are redraws.
    """
    made: list[list[Replayed]] = [[] for _ in claimed]
    odds = [np.empty(0)]
    total = len(claimed[0].tokens_B)
    for start in range(0, total, size):
        rows = slice(start, min(start + size, total))
        block = block_of(rows)
        for found, choices in zip(made, claimed, strict=True):
            found.append(block.replay(choices.at(rows), temperature))
        if len(claimed) > 1:
            odds.append(block.ends(eos, temperature))
    return made, odds


def _claimed(samples: Sequence[Sample]) -> list[ClaimedTokens]:
    """Return the own choices of all samples' rows, then those of each redraw."""
    lengths = [len(sample.completion_tokens) for sample in samples]
    positions_N = np.concatenate([np.arange(n, dtype=np.uint64) for n in lengths])
    own = [(sample.seed, sample.completion_tokens) for sample in samples]
    redrawn = zip(*([(r.seed, r.tokens) for r in s.redraws] for s in samples), strict=True)
    return [
        ClaimedTokens(
            np.concatenate([np.asarray(tokens, np.int64) for _, tokens in choices]),
            np.repeat(np.array([seed for seed, _ in choices], np.uint64), lengths),
            positions_N,
        )
        for choices in (own, *map(list, redrawn))
    ]


def _by_sample(blocks: list[Replayed], cuts: npt.NDArray[np.int64]) -> list[Replayed]:
    columns = (
        np.split(np.concatenate(column), cuts)
        for column in (
            [block.margins_T for block in blocks],
            [block.expected_T for block in blocks],
            [block.is_likelier_T for block in blocks],
        )
    )
    return [Replayed(*of_sample) for of_sample in zip(*columns, strict=True)]
