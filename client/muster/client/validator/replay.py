"""One prefill of a submission, measured for checks 6 and 7: proofs against hidden states, tokens
against noise.

Axes: T completion tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muster.inference import InferenceEngine, replay
from muster.protocol.recipe import ProofRecipe, Recipe
from muster.protocol.rollouts import Rollout
from muster.toploc import ChunkResult, split_proofs, verify_proofs_many

PREFILL_VALUES = 1 << 26
"""Logits computed in one prefill: 256 MiB of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What the prefill of one sample shows."""

    chunks: tuple[ChunkResult, ...]
    """Each proof against the hidden states."""
    margins: npt.NDArray[np.float32]
    """[T]: how far each chosen token is below the replayed maximum, in logits / T."""


def replay_rows(rows: Sequence[Rollout], engine: InferenceEngine, recipe: Recipe) -> list[Replay]:
    """Return the replay of every row under the loaded policy; proofs must be canonical."""
    replays: list[Replay] = []
    for part in _parts(rows, engine.vocab_size):
        prefills = engine.prefill([(row.prompt_tokens, row.completion_tokens) for row in part])
        chunks = verify_proofs_many(
            [prefill.hidden_TH for prefill in prefills],
            [split_row_proofs(row, recipe.proof, engine.hidden_size) for row in part],
            chunk_tokens=recipe.proof.chunk_tokens,
            topk=recipe.proof.topk,
        )
        replayed = replay(
            [prefill.logits_TV for prefill in prefills],
            [row.completion_tokens for row in part],
            [row.sampling_seed for row in part],
            recipe.sampling.temperature,
        )
        replays += map(Replay, map(tuple, chunks), replayed.margins)
    return replays


def split_row_proofs(row: Rollout, proof: ProofRecipe, hidden_size: int) -> list[bytes]:
    """Return a row's proofs one by one; raises ProofError for an encoding that is not canonical."""
    return split_proofs(
        row.proofs,
        tokens=len(row.completion_tokens),
        hidden_size=hidden_size,
        chunk_tokens=proof.chunk_tokens,
        topk=proof.topk,
    )


def _parts(rows: Sequence[Rollout], vocab_size: int) -> Iterator[list[Rollout]]:
    """Yield the rows in runs whose padded logits stay within PREFILL_VALUES."""
    part: list[Rollout] = []
    longest = 0
    for row in rows:
        tokens = max(longest, len(row.prompt_tokens) + len(row.completion_tokens))
        if part and tokens * (len(part) + 1) * vocab_size > PREFILL_VALUES:
            yield part
            part, tokens = [], len(row.prompt_tokens) + len(row.completion_tokens)
        part.append(row)
        longest = tokens
    if part:
        yield part
