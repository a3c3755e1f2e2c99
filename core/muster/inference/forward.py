"""A transformers model's own forward pass: its inputs and results, and a decode through it.

This works for any architecture. A hook on the head sees exactly the rows that the head is given,
and can end a pass there. It can also give the head other rows: then the model's own code computes
their logits. So models that scale or cap their logits need no special case. Axes: R rows, L width,
N kept positions, B rows of a block, H hidden units, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils import ModelOutput

from muster.protocol.errors import EngineError
from muster.toploc.chunks import to_patterns

Tokens = Sequence[int]
Predicted: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Hidden states [R, H] in the model's format and logits [R, V], float32 or in that format too, one
row per sample."""

ROOM = 64
"""Spare positions of a new buffer; after so many tokens it is copied into a longer one."""


# --------------------------------------------------------------------------------- laying out


def plan_prefill(
    samples: Sequence[tuple[Tokens, Tokens]], max_rows: int, max_tokens: int
) -> list[list[int]]:
    """Return batches, as lists of places: similar lengths together, so that there is little
    padding.

    `max_tokens` bounds the tokens of a batch with padding, and so its activations; one sample
    always fits.
    """
    lengths = [len(prompt) + len(completion) for prompt, completion in samples]
    batches: list[list[int]] = []
    for i in sorted(range(len(samples)), key=lambda i: (lengths[i], len(samples[i][0]))):
        rows = len(batches[-1]) + 1 if batches else max_rows + 1
        if rows > max_rows or rows * lengths[i] > max_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def distinct(prompts: Sequence[Tokens]) -> tuple[list[tuple[int, ...]], npt.NDArray[np.int64]]:
    """Return the distinct prompts in order of appearance, and per row [R] its prompt's index."""
    places: dict[tuple[int, ...], int] = {}
    rows = [places.setdefault(tuple(prompt), len(places)) for prompt in prompts]
    return list(places), np.array(rows)


def pad_left(rows: Sequence[Tokens]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
    """Return tokens [R, L] that end in the last column, and their mask (None without padding)."""
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max())
    tokens = np.zeros((len(rows), width), np.int64)
    mask = (np.arange(width) >= width - lengths[:, None]).astype(np.int64)
    tokens[mask.astype(bool)] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return tokens, None if (lengths == width).all() else mask


def pad_right(rows: Sequence[Tokens]) -> npt.NDArray[np.int64]:
    """Return tokens [R, L] starting in the first column."""
    lengths = np.array([len(row) for row in rows])
    tokens = np.zeros((len(rows), int(lengths.max())), np.int64)
    is_token = np.arange(tokens.shape[1]) < lengths[:, None]
    tokens[is_token] = np.concatenate([np.asarray(row, np.int64) for row in rows])
    return tokens


# --------------------------------------------------------------------------------- computing


_PROBE = (1, 0, 2, 5, 3)
"""Tokens on which the two ways to logits are compared, modulo the vocabulary."""


class _HeadReached(Exception):
    """Ends a forward pass whose logits nobody wants."""


class Forward:
    """Calls a model; made once per model, because it hooks the model's head. One thread at a time.

    Raises EngineError unless the model's logits follow from the input of its head alone.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.head: torch.nn.Module = model.get_output_embeddings()
        self.head.register_forward_pre_hook(self._at_head)
        weight: torch.Tensor = self.head.weight
        self.vocab_size, self.hidden_size = weight.shape
        self.device = weight.device
        self._seen = torch.empty(0)
        self._given: torch.Tensor | None = None
        self._ends_at_head = False
        self._output_type: type[ModelOutput] | None = None
        with torch.inference_mode():
            self._try_head()

    def __call__(
        self,
        tokens_RL: npt.NDArray[np.int64],
        *,
        keep: int | torch.Tensor,
        cache: Any = None,
        mask: npt.NDArray[np.int64] | None = None,
        positions_RL: npt.NDArray[np.int64] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states [R, N, H] in the model's dtype and float32 logits [R, N, V].

        `keep` is the number of last positions wanted, or their indices. `mask` covers the cache
        and the tokens; None means nothing is padding.
        """
        output = self.model(
            input_ids=self._place(tokens_RL),
            attention_mask=self._place(mask),
            position_ids=self._place(positions_RL),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
        return self._take_seen(), output.logits.float()

    def hidden(
        self,
        tokens_RL: npt.NDArray[np.int64],
        *,
        keep: int | torch.Tensor,
        mask: npt.NDArray[np.int64] | None = None,
        positions_RL: npt.NDArray[np.int64] | None = None,
    ) -> torch.Tensor:
        """Return the hidden states alone, see `__call__`: the pass ends before the head."""
        self._ends_at_head = True
        try:
            with suppress(_HeadReached):
                self(tokens_RL, keep=keep, mask=mask, positions_RL=positions_RL)
        finally:
            self._ends_at_head = False
        return self._take_seen()

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [B, V] of hidden states as the head is given them."""
        # One token each: even if the decoder runs, no row exceeds the model's context.
        tokens_B1 = torch.zeros(len(hidden_BH), 1, dtype=torch.int64, device=self.device)
        self._given = hidden_BH[:, None]
        try:
            with self._skipping_decoder(self._given):
                output = self.model(input_ids=tokens_B1, use_cache=False, logits_to_keep=0)
        finally:
            self._given = None
        logits: torch.Tensor = output.logits[:, 0].float()
        return logits

    def _try_head(self) -> None:
        """Find out whether `logits` has to run the decoder, or the model works without it."""
        outputs: list[Any] = []
        decoder = self.model.base_model
        hook = decoder.register_forward_hook(
            lambda _module, _inputs, output: outputs.append(output)
        )
        probe = np.array([[token % self.vocab_size for token in _PROBE]])
        hidden, logits = self(probe, keep=len(_PROBE))
        hook.remove()
        found = type(outputs[0]) if outputs and decoder is not self.model else None
        for output_type in (found, None):
            self._output_type = output_type
            with suppress(AttributeError, TypeError, ValueError):
                # The same product in another shape rounds differently in the model's own format.
                limit = 2 * torch.finfo(hidden.dtype).eps * float(logits.nan_to_num().abs().max())
                found_NV = self.logits(hidden[0])
                if torch.allclose(found_NV, logits[0], rtol=0, atol=limit, equal_nan=True):
                    return
        raise EngineError(
            f"{type(self.model).__name__} computes logits from more than its head is given",
            hint="a sampler's replay needs a model whose head follows its decoder",
        )

    @contextmanager
    def _skipping_decoder(self, hidden: torch.Tensor) -> Iterator[None]:
        output_type, decoder = self._output_type, self.model.base_model
        if output_type is None:
            yield
            return
        decoder.forward = lambda *_args, **_kwargs: output_type(last_hidden_state=hidden)
        try:
            yield
        finally:
            del decoder.forward

    def _place(self, array: npt.NDArray[np.int64] | None) -> torch.Tensor | None:
        return None if array is None else torch.from_numpy(array).to(self.device)

    def _take_seen(self) -> torch.Tensor:
        seen, self._seen = self._seen, torch.empty(0)
        return seen

    def _at_head(
        self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor]:
        if self._given is None:
            self._seen = inputs[0]
            if self._ends_at_head:
                raise _HeadReached
        # For a slice that is not contiguous, torch would copy the weight for each row.
        return ((self._seen if self._given is None else self._given).contiguous(),)


def to_rows(hidden: torch.Tensor) -> Any:
    """Return hidden states as the builder of their device takes them: on a CPU patterns, or floats
    without a copy; elsewhere the tensor itself.

    Rounding every step would double the cost of proving; the builder rounds whole chunks.
    """
    if hidden.device.type != "cpu":
        return hidden
    return hidden.numpy() if hidden.dtype == torch.float32 else to_patterns(hidden)


# ----------------------------------------------------------------------------------- decoding


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values [R, heads, L, E]: views of longer buffers.

    transformers' own cache copies all keys and values for every new token. Here a token is written
    into a buffer with spare positions; attention reads the same values through views.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values after adding some positions."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [t[:, :, :0] for t in (key_states, value_states)]
            self._used = 0
        end = self._used + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            self._buffers = [self._longer(buffer, end + ROOM) for buffer in self._buffers]
        for buffer, added in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, self._used : end] = added
        self._used = end
        self._show()
        return self.keys, self.values

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep these rows, in this order; rows may be repeated."""
        self._buffers = [buffer.index_select(0, beam_idx) for buffer in self._buffers]
        self._show()

    def _longer(self, buffer: torch.Tensor, length: int) -> torch.Tensor:
        rows, heads, _, size = buffer.shape
        longer = buffer.new_empty(rows, heads, length, size)
        longer[:, :, : self._used] = buffer[:, :, : self._used]
        return longer

    def _show(self) -> None:
        self.keys, self.values = (buffer[:, :, : self._used] for buffer in self._buffers)


def growing_cache(config: Any) -> DynamicCache:
    """Return an empty cache for a model; layers with a window keep transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(x) is DynamicLayer else x for x in cache.layers]
    return cache


class WholeBatch:
    """DecodingRows of any transformers model; `new_tokens` bounds a sample's completion."""

    def __init__(self, forward: Forward, rows: int, new_tokens: int) -> None:
        self._forward = forward
        self._rows = rows
        self._new_tokens = new_tokens
        self._next_R = np.empty(0, np.int64)

    def room(self) -> int:
        """Return how many samples may be admitted: 0 while any are generated."""
        return 0 if len(self._next_R) else self._rows

    def admit(self, prompts: Sequence[tuple[int, ...]]) -> Predicted:
        """Start a batch; return the hidden states and logits of the first tokens."""
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
        """Take one more token per row; return the hidden states and logits of the next."""
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
