"""Keys and values of a decode, in buffers with room to grow.

transformers' own cache copies everything for every token that is added. Here a token is written
into room that is already there; the views that attention reads are the same values.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 64
"""Positions to spare when a buffer is made; every so many tokens it is copied."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    """One layer's keys and values [R, heads, L, E]: views of longer buffers."""

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
