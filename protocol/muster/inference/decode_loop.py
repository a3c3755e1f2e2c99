"""Generating one batch, top to bottom.

 1. prefill of the distinct prompts, whose keys and values are then shared out to their samples;
 2. per position: choose by `logit / T + noise`, commit to the hidden states that predicted, drop
    the rows that ended, one forward pass over the rest;
 3. the last proofs, which a thread has been building meanwhile.

Axes: R rows, L width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from muster.inference.batches import distinct, pad_left
from muster.inference.engine import Completion, Request
from muster.inference.forward import Forward, to_rows
from muster.inference.growing_cache import growing_cache
from muster.inference.sampler import Sampler
from muster.protocol.recipe import ProofRecipe
from muster.toploc import IncrementalBuilder


def generate_batch(
    forward: Forward, requests: Sequence[Request], *, eos: frozenset[int], proof: ProofRecipe
) -> list[Completion]:
    """Return the requests' completions; call under `torch.inference_mode`."""
    with IncrementalBuilder(chunk_tokens=proof.chunk_tokens, topk=proof.topk) as proofs:
        samples = _decode(forward, requests, eos, proofs)
        return [Completion(tokens, proofs.take(row)) for row, tokens in enumerate(samples)]


def _decode(
    forward: Forward, requests: Sequence[Request], eos: frozenset[int], proofs: IncrementalBuilder
) -> list[tuple[int, ...]]:
    """Return every row's tokens; its hidden states go to `proofs`."""
    limits_R = np.array([r.max_new_tokens for r in requests])
    longest = int(limits_R.max())
    sampler = Sampler(requests, forward.vocab_size, forward.device)
    tokens = np.empty((len(requests), longest), np.int64)
    lengths = np.zeros(len(requests), np.int64)
    eos_ids = np.array(sorted(eos), np.int64)

    context = _Context(forward, [r.prompt_tokens for r in requests], longest)
    hidden, logits = context.prefill()
    live = np.arange(len(requests))
    for position in range(longest):
        chosen = sampler.choose(live, logits, position)
        ends = np.isin(chosen, eos_ids) | (limits_R[live] == position + 1)
        proofs.add(live, to_rows(hidden))
        tokens[live, position] = chosen
        lengths[live] = position + 1
        if ends.any():
            proofs.end(live[ends])
            if ends.all():
                break
            context.keep(~ends)
            live, chosen = live[~ends], chosen[~ends]
        hidden, logits = context.step(chosen)
    return [tuple(row[:length].tolist()) for row, length in zip(tokens, lengths, strict=True)]


class _Context:
    """Keys, values and padding of the rows that are still being generated."""

    def __init__(self, forward: Forward, prompts: Sequence[Sequence[int]], longest: int) -> None:
        self._forward = forward
        self._prompts, self._prompt_of_R = distinct(prompts)
        self._cache = growing_cache(forward.model.config)
        self._longest = longest
        self._mask_RL: npt.NDArray[np.int64] | None = None
        self._next_R = np.array([len(prompt) for prompt in prompts])
        self._width = 0

    def prefill(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and logits of every row's last prompt token."""
        tokens, mask = pad_left(self._prompts)
        positions = None if mask is None else np.maximum(mask.cumsum(axis=1) - 1, 0)
        hidden, logits = self._forward(
            tokens, keep=1, cache=self._cache, mask=mask, positions_RL=positions
        )
        self._width = tokens.shape[1]
        if mask is not None:
            ones = np.ones((len(self._prompt_of_R), self._longest), np.int64)
            self._mask_RL = np.hstack([mask[self._prompt_of_R], ones])
        if len(self._prompts) == len(self._prompt_of_R):
            return hidden[:, -1], logits[:, -1]
        shared = torch.from_numpy(self._prompt_of_R).to(hidden.device)
        self._cache.reorder_cache(shared)
        return hidden[shared, -1], logits[shared, -1]

    def step(self, tokens_R: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and logits after one more token per row."""
        self._width += 1
        is_padded = self._mask_RL is not None
        hidden, logits = self._forward(
            tokens_R[:, None],
            keep=1,
            cache=self._cache,
            mask=self._mask_RL[:, : self._width] if self._mask_RL is not None else None,
            positions_RL=self._next_R[:, None] if is_padded else None,
        )
        self._next_R = self._next_R + 1
        return hidden[:, -1], logits[:, -1]

    def keep(self, rows: npt.NDArray[np.bool_]) -> None:
        """Drop the other rows."""
        kept = np.flatnonzero(rows)
        self._cache.reorder_cache(torch.from_numpy(kept).to(self._forward.device))
        self._next_R = self._next_R[kept]
        if self._mask_RL is not None:
            self._mask_RL = self._mask_RL[kept]
