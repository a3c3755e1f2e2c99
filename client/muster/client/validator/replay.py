"""One prefill of a submission, measured for checks 6 and 7: proofs against hidden states, tokens
against noise.

Axes: T completion tokens, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from muster.inference import InferenceEngine, replay
from muster.inference.engine import Prefill, prefill_parts
from muster.protocol.errors import EngineError, SampleUnfit
from muster.protocol.recipe import ProofRecipe, Recipe
from muster.protocol.rollouts import Rollout, sampled_places
from muster.toploc import ChunkResult, split_proofs, verify_proofs_many
from muster.toploc.chunks import Patterns
from muster.toploc.history import MOST_FLIPS, Flip


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
    flips: tuple[Flip, ...] = ()
    """The first tokens that are not what the noise yields here."""


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
        replays += _replay_part(rows[chosen], engine, recipe, on_hidden)
    return replays


def _replay_part(
    rows: Sequence[Rollout],
    engine: InferenceEngine,
    recipe: Recipe,
    on_hidden: Callable[[Patterns], None] | None,
) -> list[Replay]:
    """Return the replay of rows at once, or of one half after the other where memory is short."""
    try:
        hidden, replays = _replay_at_once(rows, engine, recipe)
    except SampleUnfit:
        raise
    except (EngineError, MemoryError):
        if len(rows) == 1:
            raise
    else:
        if on_hidden is not None:
            for hidden_TH in hidden:
                on_hidden(hidden_TH)
        return replays
    gc.collect()
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return [each for half in halves for each in _replay_part(half, engine, recipe, on_hidden)]


def _replay_at_once(
    rows: Sequence[Rollout], engine: InferenceEngine, recipe: Recipe
) -> tuple[list[Patterns], list[Replay]]:
    samples = [(row.prompt_tokens, row.completion_tokens) for row in rows]
    prefills = engine.prefill(samples)
    hidden = [prefill.hidden_TH for prefill in prefills]
    chunks = verify_proofs_many(
        hidden,
        [split_row_proofs(row, recipe.proof, engine.hidden_size) for row in rows],
        chunk_tokens=recipe.proof.chunk_tokens,
        topk=recipe.proof.topk,
    )
    replayed = replay(
        [prefill.logits_TV for prefill in prefills],
        [row.completion_tokens for row in rows],
        [row.sampling_seed for row in rows],
        recipe.sampling.temperature,
    )
    replays = []
    for row, prefill, found, margins_T, expected_T in zip(
        rows, prefills, chunks, replayed.margins, replayed.expected, strict=True
    ):
        sampled = sampled_places(len(margins_T), row.replies)
        flips = _flips(row, prefill, expected_T, sampled, engine.eos_token_ids)
        tokens = (row.prompt_tokens, row.completion_tokens)
        replays.append(Replay(tuple(found), margins_T[sampled], tokens, flips))
    return hidden, replays


def split_row_proofs(row: Rollout, proof: ProofRecipe, hidden_size: int) -> list[bytes]:
    """Return a row's proofs one by one; raises ProofError for an encoding that is not canonical."""
    return split_proofs(
        row.proofs,
        tokens=len(row.completion_tokens),
        hidden_size=hidden_size,
        chunk_tokens=proof.chunk_tokens,
        topk=proof.topk,
    )


def _flips(
    row: Rollout,
    prefill: Prefill,
    expected_T: npt.NDArray[np.int64],
    sampled: Sequence[int],
    eos: frozenset[int],
) -> tuple[Flip, ...]:
    """Return where the model's tokens are not the replay's, the first of them."""
    tokens_T = np.asarray(row.completion_tokens, np.int64)
    places = np.array(sampled)
    flipped = places[tokens_T[places] != expected_T[places]][:MOST_FLIPS]
    found = []
    for place, chosen, expected in zip(
        flipped, tokens_T[flipped], expected_T[flipped], strict=True
    ):
        is_likelier = prefill.logits_TV[place, chosen] > prefill.logits_TV[place, expected]
        to_end = (int(chosen) in eos) - (int(expected) in eos)
        found.append(Flip(int(chosen), int(expected), to_end, 1 if is_likelier else -1))
    return tuple(found)
