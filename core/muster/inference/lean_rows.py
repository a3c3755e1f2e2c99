"""Rows of a lean decode: a fixed number of places, which waiting samples reuse.

Keys and values lie in one buffer whose size is known before the first token; every token is written
in place, and a prompt is computed once for all its samples. Axes: Y layers, S places for rows, R
rows in use, P prompts, L positions, K heads of keys and then values, E head size, H hidden units.
"""

import logging
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from muster.inference.forward import Forward, Predicted, distinct, pad_right
from muster.inference.lean_model import LeanModel, reason_against
from muster.inference.lean_prefill import Pass, mix, predicting_rows, prefill
from muster.inference.step_graphs import LEAST_WIDTH, Record, StepGraphs

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 1 << 14
"""Prompt tokens computed at once; a single prompt may be longer."""

_PROMPTS = ((1, 0, 2, 5, 3), (4, 1), (1, 0, 2, 5, 3))
_NEXT = ((2, 4, 1), (3, 0, 2), (0, 1, 5))
"""Tokens that each row takes, modulo the vocabulary: two rows share a prompt, one is shorter."""

_LEAST_CONTEXT = 8

_SIZES = (1.0, 16.0, 256.0)
"""Scales of the hidden states and queries on which heads and attention are compared."""

_WINDOW = 3
"""Window of layers that have one, during the comparison."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: tuple[int, ...]
    cache_YLKE: torch.Tensor
    hidden_H: torch.Tensor


class LeanRows:
    """DecodingRows of a LeanModel; `length` is the most positions that a sample may have.

    If `record` is given, it records steps, and they are replayed.
    """

    def __init__(
        self, model: LeanModel, places: int, length: int, record: Record | None = None
    ) -> None:
        self._model = model
        if record is not None:
            length += -length % LEAST_WIDTH
        self._rotary = model.begin(length)
        self._length = length
        heads = 2 * model.key_heads, model.head_size
        self._cache_YSLKE = _zeros(
            (model.layers, places, length, *heads), model.dtype, model.device
        )
        # Python calls dominate a step of a small model: views that never change are made once.
        self._tokens_Y = self._cache_YSLKE.view(model.layers, places * length, *heads).unbind()
        self._places = places
        hidden = torch.full((places, length), -torch.inf, dtype=model.dtype, device=model.device)
        self._masks = {window: hidden.clone() for window in dict.fromkeys(model.windows)}
        """[S, L] per window, added to scores."""
        self._lengths_R = np.empty(0, np.int64)
        self._kept: _Prompt | None = None
        self._graphs = record and StepGraphs(record, model.empty_results(places), length)

    def room(self) -> int:
        """Return how many places are free."""
        return self._places - len(self._lengths_R)

    def admit(self, prompts: Sequence[tuple[int, ...]]) -> Predicted:
        """Append a row per prompt; return the hidden states and logits of their first tokens."""
        different, prompt_of_R = distinct(prompts)
        first = len(self._lengths_R)
        hidden_PH: list[torch.Tensor] = []
        for prompt in self._computed(different):
            rows = torch.from_numpy(first + np.flatnonzero(prompt_of_R == len(hidden_PH)))
            size = len(prompt.tokens)
            self._cache_YSLKE[:, rows, :size] = prompt.cache_YLKE[:, None]
            for window, mask_SL in self._masks.items():
                mask_SL[rows] = -torch.inf
                mask_SL[rows, max(0, size - (window or size)) : size] = 0
            hidden_PH.append(prompt.hidden_H)
        lengths = np.array([len(prompt) for prompt in prompts])
        self._lengths_R = np.concatenate([self._lengths_R, lengths])
        # Samples of the last prompt that still wait need not compute it again.
        self._kept = _Prompt(prompt.tokens, prompt.cache_YLKE.clone(), prompt.hidden_H)
        hidden = torch.stack(hidden_PH)
        shared = torch.from_numpy(prompt_of_R).to(self._model.device)
        return hidden[shared], self._model.logits(hidden)[shared]

    def step(self, tokens_R: npt.NDArray[np.int64]) -> Predicted:
        """Take one more token per row; return the hidden states and logits of the next."""
        at_R = np.arange(len(tokens_R)) * self._length + self._lengths_R
        given_3R, width = (
            np.stack([tokens_R, self._lengths_R, at_R]),
            int(self._lengths_R.max()) + 1,
        )
        self._lengths_R = self._lengths_R + 1
        if self._graphs:
            return self._graphs.step(self._step, given_3R, width)
        return self._step(torch.from_numpy(given_3R).to(self._model.device), width)

    def _step(self, given_3R: torch.Tensor, width: int) -> Predicted:
        """Return what `step` does, given tokens, their positions, and those in the whole buffer."""
        model = self._model
        tokens_R, positions_R, at_R = given_3R.unbind()
        rows = len(tokens_R)
        masks = {
            window: self._seen(window, positions_R, at_R)[:rows, None, None, :width]
            for window in self._masks
        }
        seen = self._cache_YSLKE[:, :rows, :width].transpose(2, 3)
        keys_Y = seen[:, :, : model.key_heads].unbind()
        values_Y = seen[:, :, model.key_heads :].unbind()

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            self._tokens_Y[layer].index_copy_(0, at_R, keys_values)
            # Query heads of one key head take the axis of positions, so keys need no repetition.
            grouped = queries.reshape(rows, model.key_heads, -1, model.head_size)
            mask = masks[model.windows[layer]]
            mixed = mix(
                grouped, keys_Y[layer], values_Y[layer], mask, scale=model.scale, cap=model.cap
            )
            return mixed.reshape(rows, -1)

        hidden = model.run(tokens_R, self._rotary.at(positions_R), attend)
        return hidden, model.logits(hidden)

    def _seen(
        self, window: int | None, positions_R: torch.Tensor, at_R: torch.Tensor
    ) -> torch.Tensor:
        """Return the mask [S, L] of a window that has moved to the next position."""
        mask_SL = self._masks[window]
        if window is not None:
            # While the window is not full, this hides the next position, which is shown right
            # below.
            left_R = at_R - window * (positions_R >= window)
            mask_SL.view(-1).index_fill_(0, left_R, -torch.inf)
        mask_SL.view(-1).index_fill_(0, at_R, 0)
        return mask_SL

    def keep(self, order: npt.NDArray[np.int64]) -> None:
        """Row i becomes what row `order[i]` was, which must not be below i; others are dropped."""
        for row in np.flatnonzero(order != np.arange(len(order))):
            source, size = order[row], self._lengths_R[order[row]]
            self._cache_YSLKE[:, row, :size] = self._cache_YSLKE[:, source, :size]
            for mask_SL in self._masks.values():
                mask_SL[row] = mask_SL[source]
        self._lengths_R = self._lengths_R[order]

    def _computed(self, prompts: Sequence[tuple[int, ...]]) -> Iterator[_Prompt]:
        """Yield every prompt computed, in order; a prompt that is kept is not computed again."""
        start = 0
        if self._kept is not None and self._kept.tokens == prompts[0]:
            yield self._kept
            start = 1
        while start < len(prompts):
            end = start + 1
            while end < len(prompts) and _tokens(prompts[start : end + 1]) <= PROMPT_TOKENS:
                end += 1
            yield from self._compute(prompts[start:end])
            start = end

    def _compute(self, prompts: Sequence[tuple[int, ...]]) -> list[_Prompt]:
        model, work = self._model, Pass()
        rows = [work.add(prompt) for prompt in prompts]
        cache = self._cache_YSLKE.new_empty(model.layers, work.length, *self._cache_YSLKE.shape[3:])

        def keep(layer: int, keys_values: torch.Tensor) -> None:
            cache[layer] = keys_values

        hidden_NH = prefill(model, work, self._rotary, keep)
        return [
            _Prompt(tokens, cache[:, at], hidden_NH[at.stop - 1])
            for tokens, at in zip(prompts, rows, strict=True)
        ]


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros: attention multiplies masked values by 0, which must not meet a NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # The system allocates such pages at their first write: unused places take no memory.
    pages = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(pages).view(dtype).view(shape)


def _tokens(prompts: Sequence[tuple[int, ...]]) -> int:
    return sum(map(len, prompts))


# --------------------------------------------------------------------- tried before it is used


def try_lean(model: Any, forward: Forward) -> LeanModel | None:
    """Return a model's lean arithmetic once it was compared with the model's own forward pass; None
    when its layers are not known or differ, and the log says which.
    """
    if reason := reason_against(model):
        logger.info("decoding through the model's own forward pass: %s", reason)
        return None
    try:
        lean = LeanModel(model)
        with torch.inference_mode(), _short_windows(lean, model):
            pairs = list(_pairs(lean, forward))
            error, head_error = _worst_error(pairs), _head_error(lean, forward, pairs[0][1])
            attention_error = _attention_error(lean, model)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as failure:
        logger.warning("decoding through the model's own forward pass: %s", failure)
        return None
    # A layer computed wrongly is off by 100 %; 64 layers in bfloat16 are off by a few percent.
    is_exact = lean.dtype == torch.float32
    limit, head_limit = (1e-3, 1e-5) if is_exact else (0.1, 0.02)
    if not error <= limit or not head_error <= head_limit or not attention_error <= 1e-3:
        logger.warning(
            "decoding through the model's own forward pass: the lean one is off by %.2g, its head "
            "by %.2g, its attention by %.2g",
            error,
            head_error,
            attention_error,
        )
        return None
    return lean


_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def _worst_error(pairs: Sequence[_Pair]) -> float:
    """Return the largest relative error of any hidden state of a short decode."""
    return max(float((ours_H - own_H).norm() / own_H.norm()) for ours_H, own_H in pairs)


def _head_error(lean: LeanModel, forward: Forward, hidden_H: torch.Tensor) -> float:
    """Return the relative error of logits, for hidden states of several scales: a cap changes only
    large logits.
    """
    sizes_B1 = torch.tensor(_SIZES, device=hidden_H.device)[:, None]
    hidden_BH = (sizes_B1 * hidden_H).to(lean.dtype)
    ours_BV, own_BV = lean.logits(hidden_BH), forward.logits(hidden_BH)
    return float(((ours_BV - own_BV).norm(dim=1) / own_BV.norm(dim=1)).max())


def _attention_error(lean: LeanModel, model: Any) -> float:
    """Return the relative error of one query's attention, in float32, for scores of several scales:
    a cap changes only large scores.
    """
    module = model.model.layers[0].self_attn
    kernel = ALL_ATTENTION_FUNCTIONS.get_interface(
        model.config._attn_implementation,
        sys.modules[type(module).__module__].eager_attention_forward,
    )
    cap, random = getattr(module, "attn_logit_softcapping", None), torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 1, lean.key_heads, 4, lean.head_size, generator=random)
    spread, values = drawn.to(lean.device)
    asked = torch.ones(1, lean.query_heads, 1, lean.head_size, device=lean.device)
    none = torch.zeros(1, 1, 1, 4, device=lean.device)
    errors = []
    for size in _SIZES:
        # Scores of that scale that differ by about one: no key takes all of the attention.
        both = size * asked, 1 + spread / size, values, none
        ours = mix(*both, scale=lean.scale, cap=lean.cap).transpose(1, 2)
        own, _ = kernel(module, *both, scaling=lean.scale, softcap=cap)
        errors.append(float((ours - own).norm() / own.norm()))
    return max(errors)


@contextmanager
def _short_windows(lean: LeanModel, model: Any) -> Iterator[None]:
    """Make windows so small that a short decode exceeds them."""
    config, own = model.config, lean.windows
    if not any(own):
        yield
        return
    length = config.sliding_window
    config.sliding_window = _WINDOW
    lean.windows = [window and _WINDOW for window in own]
    try:
        yield
    finally:
        config.sliding_window, lean.windows = length, own


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
    # Now as a validator computes: all positions of completions at once, two after one prompt.
    samples = [(prompts[0], row[len(prompts[0]) :]) for row in (rows[0], rows[0][::-1] + rows[0])]
    for (prompt, completion), hidden_TH in zip(
        samples, predicting_rows(lean, samples), strict=True
    ):
        for t, hidden_H in enumerate(hidden_TH.float()):
            yield hidden_H, _own(forward, [[*prompt, *completion[:t]]])[0]


def _own(forward: Forward, rows: list[list[int]]) -> torch.Tensor:
    """Return the last hidden state [R, H] of every row, by the model itself."""
    tokens_RL = pad_right(rows)
    hidden, _ = forward(tokens_RL, keep=tokens_RL.shape[1])
    lasts = [len(row) - 1 for row in rows]
    return hidden[range(len(rows)), lasts].float()
