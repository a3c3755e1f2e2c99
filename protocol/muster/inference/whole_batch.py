"""Rows of a decode through the model's own forward pass: any architecture, one batch at a time.

Samples are admitted together and leave one by one; the next come when all have left. Axes: R rows,
L width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from muster.inference.batches import distinct, pad_left
from muster.inference.decoding_rows import Predicted
from muster.inference.forward import Forward
from muster.inference.growing_cache import growing_cache


class WholeBatch:
    """DecodingRows of any transformers model; `new_tokens` bounds a sample's completion."""

    def __init__(self, forward: Forward, rows: int, new_tokens: int) -> None:
        self._forward = forward
        self._rows = rows
        self._new_tokens = new_tokens
        self._next_R = np.empty(0, np.int64)

    def room(self) -> int:
        """Return how many samples may be admitted: none while there are any."""
        return 0 if len(self._next_R) else self._rows

    def admit(self, prompts: Sequence[tuple[int, ...]]) -> Predicted:
        """Start a batch; return what predicts the first tokens."""
        different, prompt_of_R = distinct(prompts)
        tokens, mask = pad_left(different)
        positions = None if mask is None else np.maximum(mask.cumsum(axis=1) - 1, 0)
        self._cache = growing_cache(self._forward.model.config)
        hidden, logits = self._forward(
            tokens, keep=1, cache=self._cache, mask=mask, positions_RL=positions
        )
        self._width = tokens.shape[1]
        self._next_R = np.array([len(prompt) for prompt in prompts])
        self._mask_RL: npt.NDArray[np.int64] | None = None
        if mask is not None:
            ones = np.ones((len(prompts), self._new_tokens), np.int64)
            self._mask_RL = np.hstack([mask[prompt_of_R], ones])
        if len(different) == len(prompts):
            return hidden[:, -1], logits[:, -1]
        shared = torch.from_numpy(prompt_of_R).to(hidden.device)
        self._cache.reorder_cache(shared)
        return hidden[shared, -1], logits[shared, -1]

    def step(self, tokens_R: npt.NDArray[np.int64]) -> Predicted:
        """Take one more token per row; return what predicts the next."""
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

    def keep(self, order: npt.NDArray[np.int64]) -> None:
        """Row i becomes what row `order[i]` was; the others are dropped."""
        self._next_R = self._next_R[order]
        if len(order):
            self._cache.reorder_cache(torch.from_numpy(order).to(self._forward.device))
        if self._mask_RL is not None:
            self._mask_RL = self._mask_RL[order]
