"""Rows of a lean decode: a fixed number of places that finished samples leave to the next.

Keys and values lie in one buffer whose size is known before the first token; every token is written
in place, and a prompt is computed once for all its samples. Axes: Y layers, S places for rows, R
rows in use, P prompts, L positions, K heads of keys and then values, E head size, H hidden units.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from muster.inference.forward import Forward, Predicted, distinct, pad_right
from muster.inference.lean_model import LeanModel, reason_against

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 1 << 14
"""Prompt tokens computed at once, padding included; a single prompt may be longer."""

_PROMPTS = ((1, 0, 2, 5, 3), (4, 1), (1, 0, 2, 5, 3))
_NEXT = ((2, 4, 1), (3, 0, 2), (0, 1, 5))
"""Tokens that each row takes, modulo the vocabulary: two rows share a prompt, one is shorter."""

_LEAST_CONTEXT = 8

_SIZES = (1.0, 16.0, 256.0)
"""Factors of the hidden state that heads are compared on."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: tuple[int, ...]
    cache_YLKE: torch.Tensor
    hidden_H: torch.Tensor


class LeanRows:
    """DecodingRows of a LeanModel; `length` is the most positions that a sample may have."""

    def __init__(self, model: LeanModel, places: int, length: int) -> None:
        self._model = model
        self._rotary = model.begin(length)
        heads = 2 * model.key_heads, model.head_size
        self._cache_YSLKE = _zeros(
            (model.layers, places, length, *heads), model.dtype, model.device
        )
        # Calls are what a step of a small model costs: views that never change are made once.
        self._tokens_Y = self._cache_YSLKE.view(model.layers, places * length, *heads).unbind()
        self._mask_SL = torch.full(
            (places, length), -torch.inf, dtype=model.dtype, device=model.device
        )
        self._lengths_R = np.empty(0, np.int64)
        self._kept: _Prompt | None = None

    def room(self) -> int:
        """Return how many places are free."""
        return len(self._mask_SL) - len(self._lengths_R)

    def admit(self, prompts: Sequence[tuple[int, ...]]) -> Predicted:
        """Append a row per prompt; return what predicts their first tokens."""
        different, prompt_of_R = distinct(prompts)
        first = len(self._lengths_R)
        hidden_PH: list[torch.Tensor] = []
        for prompt in self._computed(different):
            rows = torch.from_numpy(first + np.flatnonzero(prompt_of_R == len(hidden_PH)))
            size = len(prompt.tokens)
            self._cache_YSLKE[:, rows, :size] = prompt.cache_YLKE[:, None]
            self._mask_SL[rows] = -torch.inf
            self._mask_SL[rows, :size] = 0
            hidden_PH.append(prompt.hidden_H)
        lengths = np.array([len(prompt) for prompt in prompts])
        self._lengths_R = np.concatenate([self._lengths_R, lengths])
        # Samples of the last prompt that still wait shall find it computed.
        self._kept = _Prompt(prompt.tokens, prompt.cache_YLKE.clone(), prompt.hidden_H)
        hidden = torch.stack(hidden_PH)
        shared = torch.from_numpy(prompt_of_R).to(self._model.device)
        return hidden[shared], self._model.logits(hidden)[shared]

    def step(self, tokens_R: npt.NDArray[np.int64]) -> Predicted:
        """Take one more token per row; return what predicts the next."""
        model, rows, length = self._model, len(tokens_R), self._mask_SL.shape[1]
        width = int(self._lengths_R.max()) + 1
        places_R = torch.from_numpy(self._lengths_R).to(model.device)
        at_R = torch.from_numpy(np.arange(rows) * length + self._lengths_R).to(model.device)
        self._mask_SL.view(-1).index_fill_(0, at_R, 0)
        mask = self._mask_SL[:rows, None, None, :width]

        seen = self._cache_YSLKE[:, :rows, :width].transpose(2, 3)
        keys_Y = seen[:, :, : model.key_heads].unbind()
        values_Y = seen[:, :, model.key_heads :].unbind()

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            self._tokens_Y[layer].index_copy_(0, at_R, keys_values)
            return self._attend(queries, keys_Y[layer], values_Y[layer], mask)

        tokens = torch.from_numpy(tokens_R).to(model.device)
        hidden = model.run(tokens, self._rotary.at(places_R), attend)
        self._lengths_R = self._lengths_R + 1
        return hidden, model.logits(hidden)

    def _attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        model, rows = self._model, len(queries)
        # Query heads of one key head stand where positions usually do: nothing is repeated.
        grouped = queries.reshape(rows, model.key_heads, -1, model.head_size)
        mixed = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=model.scale
        )
        return mixed.reshape(rows, -1)

    def keep(self, order: npt.NDArray[np.int64]) -> None:
        """Row i becomes what row `order[i]` was, which must not be below i; others are dropped."""
        for row in np.flatnonzero(order != np.arange(len(order))):
            source, size = order[row], self._lengths_R[order[row]]
            self._cache_YSLKE[:, row, :size] = self._cache_YSLKE[:, source, :size]
            self._mask_SL[row] = self._mask_SL[source]
        self._lengths_R = self._lengths_R[order]

    def _computed(self, prompts: Sequence[tuple[int, ...]]) -> Iterator[_Prompt]:
        """Yield every prompt computed, in their order; what is kept is not computed again."""
        start = 0
        if self._kept is not None and self._kept.tokens == prompts[0]:
            yield self._kept
            start = 1
        while start < len(prompts):
            end = start + 1
            while end < len(prompts) and _padded(prompts[start : end + 1]) <= PROMPT_TOKENS:
                end += 1
            yield from self._compute(prompts[start:end])
            start = end

    def _compute(self, prompts: Sequence[tuple[int, ...]]) -> list[_Prompt]:
        # Padding follows the tokens, where causal attention never looks.
        model = self._model
        tokens_PL = torch.from_numpy(pad_right(prompts)).to(model.device)
        count, length = tokens_PL.shape
        cache = self._cache_YSLKE.new_empty(
            model.layers, count, length, *self._cache_YSLKE.shape[3:]
        )

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            queries = queries.reshape(count, length, -1, model.head_size)
            cache[layer] = keys_values.view(count, length, -1, model.head_size)
            keys, values = cache[layer].tensor_split(2, dim=2)
            mixed = F.scaled_dot_product_attention(
                queries.transpose(1, 2),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                is_causal=True,
                scale=model.scale,
                enable_gqa=True,
            )
            return mixed.transpose(1, 2).reshape(count * length, -1)

        places = torch.arange(length, device=model.device).repeat(count)
        hidden = model.run(tokens_PL.view(-1), self._rotary.at(places), attend)
        hidden_PLH = hidden.view(count, length, -1)
        return [
            _Prompt(tokens, cache[:, i, : len(tokens)], hidden_PLH[i, len(tokens) - 1])
            for i, tokens in enumerate(prompts)
        ]


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros: what attention masks out it still multiplies by nought."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system hands out such pages when they are first written: unused places take no memory.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


def _padded(prompts: Sequence[tuple[int, ...]]) -> int:
    return len(prompts) * max(map(len, prompts))


# --------------------------------------------------------------------- tried before it is used


def lean_model(model: Any, forward: Forward) -> LeanModel | None:
    """Return a model's lean arithmetic, tried; None, and why in the log, where there is none."""
    if reason := reason_against(model):
        logger.info("decoding through the model's own forward pass: %s", reason)
        return None
    try:
        lean = LeanModel(model)
        with torch.inference_mode():
            pairs = list(_pairs(lean, forward))
            error, head_error = _worst_error(pairs), _head_error(lean, forward, pairs[0][1])
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as failure:
        logger.warning("decoding through the model's own forward pass: %s", failure)
        return None
    # A layer computed otherwise is off by its whole size, 64 layers of bfloat16 by some percent.
    is_exact = lean.dtype == torch.float32
    limit, head_limit = (1e-3, 1e-5) if is_exact else (0.1, 0.02)
    if not error <= limit or not head_error <= head_limit:
        logger.warning(
            "decoding through the model's own forward pass: the lean one is off by %.2g, its head "
            "by %.2g",
            error,
            head_error,
        )
        return None
    return lean


_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def _worst_error(pairs: Sequence[_Pair]) -> float:
    """Return the largest relative error of any hidden state of a short decode."""
    return max(float((ours_H - own_H).norm() / own_H.norm()) for ours_H, own_H in pairs)


def _head_error(lean: LeanModel, forward: Forward, hidden_H: torch.Tensor) -> float:
    """Return the relative error of logits, of states of several sizes: a model that caps its logits
    does little to small ones.
    """
    sizes_B1 = torch.tensor(_SIZES, device=hidden_H.device)[:, None]
    hidden_BH = (sizes_B1 * hidden_H).to(lean.dtype)
    ours_BV, own_BV = lean.logits(hidden_BH), forward.logits(hidden_BH)
    return float(((ours_BV - own_BV).norm(dim=1) / own_BV.norm(dim=1)).max())


def _pairs(lean: LeanModel, forward: Forward) -> Iterator[_Pair]:
    prompts = [tuple(t % forward.vocab_size for t in prompt) for prompt in _PROMPTS]
    lean_rows = LeanRows(lean, len(prompts), _LEAST_CONTEXT)
    rows = [list(prompt) for prompt in prompts]
    hidden, _ = lean_rows.admit(prompts)
    yield from zip(hidden.float(), _own(forward, rows), strict=True)
    for position in range(len(_NEXT[0])):
        if position == 2:
            lean_rows.keep(np.array([2, 1]))
            rows = [rows[2], rows[1]]
        for row, tokens in zip(rows, _NEXT, strict=False):
            row.append(tokens[position] % forward.vocab_size)
        hidden, _ = lean_rows.step(np.array([row[-1] for row in rows]))
        yield from zip(hidden.float(), _own(forward, rows), strict=True)


def _own(forward: Forward, rows: list[list[int]]) -> torch.Tensor:
    """Return the last hidden state [R, H] of every row, by the model itself."""
    tokens_RL = pad_right(rows)
    hidden, _ = forward(tokens_RL, keep=tokens_RL.shape[1])
    lasts = [len(row) - 1 for row in rows]
    return hidden[range(len(rows)), lasts].float()
