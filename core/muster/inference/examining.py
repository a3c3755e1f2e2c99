"""What a forward pass shows of samples, block of rows by block of rows.

An engine has the hidden states of some samples and can make logits of any few of their rows. Here
the rows of all samples are joined, cut into blocks whose logits are small, and replayed while they
are there, so that no [T, V] ever is. Numpy only; `muster.inference.blocks` has the same on a
device. Axes: T completion tokens of a sample, N rows of all samples, B rows of a block, H hidden
units, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from muster.inference.engine import Examined, Replayed, Sample
from muster.inference.sampling import replay_block
from muster.protocol.recipe import ProofRecipe
from muster.toploc import ChunkResult, verify_proofs_many
from muster.toploc.chunks import Patterns
from muster.toploc.projections import VALUES, project_rows

BLOCK_BYTES = 64 << 20
"""Float32 logits of one block of rows, or of one row."""

Floats = npt.NDArray[np.float32]
Odds = npt.NDArray[np.float64]


class Recomputed(NamedTuple):
    """All that a forward pass computes of one completion; row t predicts token t.

    For calibration and small models: at the size that users have it is half a megabyte a token.
    """

    hidden_TH: Patterns
    """Rows after the final norm, as bfloat16 patterns."""
    logits_TV: Floats
    """Logits, before temperature."""


class Choices(NamedTuple):
    """Tokens that are said to follow from noise, one per row."""

    tokens_B: npt.NDArray[np.int64]
    seeds_B: npt.NDArray[np.uint64]
    positions_B: npt.NDArray[np.uint64]

    def at(self, rows: slice) -> Choices:
        """Return those of some rows."""
        return Choices(self.tokens_B[rows], self.seeds_B[rows], self.positions_B[rows])


class Block(Protocol):
    """The logits of some rows, wherever they are."""

    def replay(self, choices: Choices, temperature: float) -> Replayed:
        """Return the rows' choices against those that the noise yields."""

    def ends(self, eos: Sequence[int], temperature: float) -> Odds:
        """Return [B] the probability of an EOS."""


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A Block in this process's memory."""

    logits_BV: Floats

    def replay(self, choices: Choices, temperature: float) -> Replayed:
        """Return the rows' choices against those that the noise yields."""
        logits_BV = self.logits_BV
        margins_B, expected_B = replay_block(logits_BV, *choices, temperature)
        rows_B = np.arange(len(logits_BV))
        chosen_B = logits_BV[rows_B, choices.tokens_B]
        return Replayed(margins_B, expected_B, chosen_B > logits_BV[rows_B, expected_B])

    def ends(self, eos: Sequence[int], temperature: float) -> Odds:
        """Return [B] the probability of an EOS."""
        scaled_BV = self.logits_BV.astype(np.float64) / temperature
        weights_BV = np.exp(scaled_BV - scaled_BV.max(axis=1, keepdims=True))
        odds: Odds = weights_BV[:, list(eos)].sum(axis=1) / weights_BV.sum(axis=1)
        return odds


class Proven(NamedTuple):
    """What hidden states show of samples, wherever they are."""

    chunks: Sequence[Sequence[ChunkResult]]
    """Per sample, each proof against them."""
    projections: Sequence[Odds]
    """Per sample [S, VALUES], see `Examined.projections`."""


def examine(
    samples: Sequence[Sample],
    proven: Proven,
    block_of: Callable[[slice], Block],
    *,
    vocab_size: int,
    eos: Iterable[int],
    temperature: float,
    block_bytes: int | None = None,
) -> list[Examined]:
    """Return what is found in samples of as many redraws each.

    `block_of` makes the logits of some of the N rows, which are those of all samples in order;
    `block_bytes` bounds them, by default as a CPU likes it.
    """
    rows = max(1, (block_bytes or BLOCK_BYTES) // (4 * vocab_size))
    replays, ends = _replayed(samples, block_of, rows, sorted(eos), temperature)
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


def prove_host(samples: Sequence[Sample], hidden: Sequence[Patterns], proof: ProofRecipe) -> Proven:
    """Return what hidden states [T, H] in this process's memory show of samples.

    Raises ProofError for hidden states that are no numbers and proofs that do not parse.
    """
    proofs = [sample.proofs for sample in samples]
    chunks = verify_proofs_many(hidden, proofs, chunk_tokens=proof.chunk_tokens, topk=proof.topk)
    sums = [
        [project_rows(hidden_TH, s.seed, s.first, s.tokens) for s in sample.shares]
        for sample, hidden_TH in zip(samples, hidden, strict=True)
    ]
    return Proven(chunks, [np.array(each, np.float64).reshape(-1, VALUES) for each in sums])


def _replayed(
    samples: Sequence[Sample],
    block_of: Callable[[slice], Block],
    size: int,
    eos: Sequence[int],
    temperature: float,
) -> tuple[list[list[Replayed]], list[Odds]]:
    """Return, per choice of a sample, the replays of all samples; and the odds of EOS."""
    claimed = _claimed(samples)
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
    cuts = np.cumsum([len(sample.completion_tokens) for sample in samples])[:-1]
    ends = np.split(np.concatenate(odds), cuts)
    return [_by_sample(found, cuts) for found in made], ends


def _claimed(samples: Sequence[Sample]) -> list[Choices]:
    """Return the samples' own choices, then those of each redraw, of the rows of all samples."""
    lengths = [len(sample.completion_tokens) for sample in samples]
    positions_N = np.concatenate([np.arange(n, dtype=np.uint64) for n in lengths])
    own = [(sample.seed, sample.completion_tokens) for sample in samples]
    redrawn = zip(*([(r.seed, r.tokens) for r in s.redraws] for s in samples), strict=True)
    return [
        Choices(
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


def examine_whole(
    samples: Sequence[Sample],
    computed: Sequence[Recomputed],
    *,
    eos: Iterable[int],
    proof: ProofRecipe,
    temperature: float,
) -> list[Examined]:
    """Return what is found in samples of which everything is computed already."""
    if not samples:
        return []
    logits_NV = np.concatenate([each.logits_TV for each in computed])
    return examine(
        samples,
        prove_host(samples, [each.hidden_TH for each in computed], proof),
        lambda rows: HostBlock(logits_NV[rows]),
        vocab_size=logits_NV.shape[1],
        eos=eos,
        temperature=temperature,
    )
