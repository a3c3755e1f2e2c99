"""One prefill of a submission, measured for checks 6 and 7: proofs against hidden states, tokens
against noise.

Axes: T completion tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muster.inference import InferenceEngine, replay
from muster.inference.prefilling import prefill_parts
from muster.protocol.recipe import ProofRecipe, Recipe
from muster.protocol.rollouts import Rollout, sampled_places
from muster.toploc import ChunkResult, split_proofs, verify_proofs_many
from muster.toploc.chunks import Patterns


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What the prefill of one sample shows."""

    chunks: tuple[ChunkResult, ...]
    """Each proof against the hidden states."""
    margins: npt.NDArray[np.float32]
    """[T]: how far each token that the model sampled is below the replayed maximum, in logits / T.
    Replies of an environment were not sampled."""
    tokens: tuple[tuple[int, ...], tuple[int, ...]]
    """Prompt and completion: samples that are alike in both have the same hidden states."""


def replay_rows(
    rows: Sequence[Rollout],
    engine: InferenceEngine,
    recipe: Recipe,
    on_hidden: Callable[[Patterns], None] | None = None,
) -> list[Replay]:
    """Return the replay of every row under the loaded policy; proofs must be canonical.

    `on_hidden` is shown the hidden states of every row, in order.
    """
    replays: list[Replay] = []
    samples = [(row.prompt_tokens, row.completion_tokens) for row in rows]
    for chosen in prefill_parts(samples, engine.vocab_size):
        part, prefills = rows[chosen], engine.prefill(samples[chosen])
        if on_hidden is not None:
            for prefill in prefills:
                on_hidden(prefill.hidden_TH)
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
        margins = map(_of_the_model, part, replayed.margins)
        replays += map(Replay, map(tuple, chunks), margins, samples[chosen])
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


def _of_the_model(row: Rollout, margins_T: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return margins_T[sampled_places(len(margins_T), row.replies)] if row.replies else margins_T
