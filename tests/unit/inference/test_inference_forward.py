"""The forward pass: how samples are laid out for it, and the cache of a decode through it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, MistralConfig, Qwen3Config
from transformers.cache_utils import DynamicSlidingWindowLayer

from muster.inference import forward
from muster.inference.decode_loop import plan_decode
from muster.inference.forward import (
    GrowingLayer,
    distinct,
    growing_cache,
    pad_left,
    pad_right,
    plan_prefill,
)

rows = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=20)


@given(rows)
def test_decode_plan_holds_every_sample_once(prompts: list[list[int]]) -> None:
    assert sorted(plan_decode(prompts)) == list(range(len(prompts)))


def test_decode_plan_puts_equal_prompts_side_by_side() -> None:
    assert plan_decode([[2, 2], [1], [3, 3], [2, 2]]) == [1, 0, 3, 2]


@given(rows, st.integers(1, 8), st.integers(1, 60), st.integers(1, 30))
def test_prefill_plan_holds_every_sample_once(
    prompts: list[list[int]], max_rows: int, max_tokens: int, max_logit_rows: int
) -> None:
    samples = [(prompt, prompt[::-1]) for prompt in prompts]
    batches = plan_prefill(samples, max_rows, max_tokens, max_logit_rows)
    assert sorted(i for batch in batches for i in batch) == list(range(len(prompts)))
    for batch in batches:
        first = min(len(samples[i][0]) for i in batch)
        last = max(len(samples[i][0]) + len(samples[i][1]) for i in batch)
        assert len(batch) == 1 or len(batch) * (last - first) <= max_logit_rows
        assert len(batch) == 1 or len(batch) * last <= max_tokens
        assert len(batch) <= max_rows


def test_prefill_plan_of_nothing_is_empty() -> None:
    assert plan_prefill([], 8, 8, 8) == plan_decode([]) == []


def test_distinct_prompts_keep_their_order() -> None:
    prompts, rows = distinct([[1], [2, 3], [1], [4]])
    assert prompts == [(1,), (2, 3), (4,)]
    assert rows.tolist() == [0, 1, 0, 2]


def test_left_padding_ends_rows_together() -> None:
    tokens, mask = pad_left([[1, 2, 3], [4]])
    assert tokens.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask is not None
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_left_padding_has_no_mask_when_rows_are_equally_long() -> None:
    tokens, mask = pad_left([[1, 2], [3, 4]])
    assert tokens.tolist() == [[1, 2], [3, 4]]
    assert mask is None


def test_right_padding_starts_rows_together() -> None:
    assert pad_right([[1, 2, 3], [4]]).tolist() == [[1, 2, 3], [4, 0, 0]]


# Keys and values in buffers with room

CONFIG = Qwen3Config(num_hidden_layers=2, num_attention_heads=2, hidden_size=8, head_dim=4)


@pytest.mark.parametrize("room", [0, 1, 64])
def test_views_are_what_concatenation_gives(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "ROOM", room)
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
    for _ in range(forward.ROOM):
        layer.update(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4))
    assert layer.keys.data_ptr() == place


def test_layers_with_a_window_stay_as_they_are() -> None:
    cache = growing_cache(MistralConfig(num_hidden_layers=2, sliding_window=4))
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer] * 2
