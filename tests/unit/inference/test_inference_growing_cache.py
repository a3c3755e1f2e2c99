"""Keys and values in buffers with room are those of transformers' own cache."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, MistralConfig, Qwen3Config
from transformers.cache_utils import DynamicSlidingWindowLayer

from muster.inference import growing_cache as module
from muster.inference.growing_cache import GrowingLayer, growing_cache

CONFIG = Qwen3Config(num_hidden_layers=2, num_attention_heads=2, hidden_size=8, head_dim=4)


@pytest.mark.parametrize("room", [0, 1, 64])
def test_views_are_what_concatenation_gives(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM", room)
    generator = torch.Generator().manual_seed(0)
    growing, plain = growing_cache(CONFIG), DynamicCache(config=CONFIG)
    rows = 2
    for added, order in [(5, [0, 1, 1, 0]), (1, None), (1, [3, 0]), (1, None), (2, [1])]:
        for layer in range(2):
            new = torch.randn(2, rows, 3, added, 4, generator=generator)
            found, expected = (c.update(new[0], new[1], layer) for c in (growing, plain))
            for ours, theirs in zip(found, expected, strict=True):
                assert torch.equal(ours, theirs)
        assert growing.get_seq_length() == plain.get_seq_length()
        assert growing.get_mask_sizes(1, 0) == plain.get_mask_sizes(1, 0)
        if order is not None:
            for cache in (growing, plain):
                cache.reorder_cache(torch.tensor(order))
            rows = len(order)


def test_a_token_is_written_into_room_that_is_there() -> None:
    layer = GrowingLayer()
    layer.update(torch.ones(1, 1, 5, 4), torch.ones(1, 1, 5, 4))
    place = layer.keys.data_ptr()
    for _ in range(module.ROOM):
        layer.update(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
    assert layer.keys.data_ptr() == place


def test_layers_with_a_window_stay_as_they_are() -> None:
    cache = growing_cache(MistralConfig(num_hidden_layers=2, sliding_window=4))
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer] * 2
