"""The forward pass: how samples are laid out for it, and the cache of a decode through it."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, OPTConfig, Qwen3Config
from transformers.cache_utils import DynamicSlidingWindowLayer

from muster.inference import forward
from muster.inference.decode_loop import plan_decode
from muster.inference.forward import (
    Forward,
    GrowingLayer,
    distinct,
    growing_cache,
    pad_left,
    pad_right,
    plan_prefill,
)
from muster.protocol.errors import EngineError

rows = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=20)


@given(rows)
def test_decode_plan_holds_every_sample_once(prompts: list[list[int]]) -> None:
    assert sorted(plan_decode(prompts)) == list(range(len(prompts)))


def test_decode_plan_puts_equal_prompts_side_by_side() -> None:
    assert plan_decode([[2, 2], [1], [3, 3], [2, 2]]) == [1, 0, 3, 2]


@given(rows, st.integers(1, 8), st.integers(1, 60))
def test_prefill_plan_holds_every_sample_once(
    prompts: list[list[int]], max_rows: int, max_tokens: int
) -> None:
    samples = [(prompt, prompt[::-1]) for prompt in prompts]
    batches = plan_prefill(samples, max_rows, max_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(prompts)))
    for batch in batches:
        last = max(len(samples[i][0]) + len(samples[i][1]) for i in batch)
        assert len(batch) == 1 or len(batch) * last <= max_tokens
        assert len(batch) <= max_rows


def test_prefill_plan_of_nothing_is_empty() -> None:
    assert plan_prefill([], 8, 8) == plan_decode([]) == []


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


# The head, given rows


def opt() -> Any:
    """A model whose code bypasses its base model, and projects the input of its head."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "ffn_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = OPTConfig(
        **sizes,
        vocab_size=11,
        word_embed_proj_dim=8,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config).eval()


TOKENS = np.array([[1, 2, 3, 4, 5, 6]])


def test_logits_of_rows_are_the_model_s_own_where_its_decoder_cannot_be_left_out() -> None:
    forward = Forward(opt())
    with torch.inference_mode():
        hidden, logits = forward(TOKENS, keep=6)
        assert torch.equal(forward.hidden(TOKENS, keep=6), hidden)
        # Rows in another order, and more than the model has positions.
        rows = [5, 0, 3, 3] * 8
        assert torch.allclose(forward.logits(hidden[0, rows]), logits[0, rows], atol=1e-6)


def test_the_decoder_is_not_run_for_logits_where_it_can_be_left_out() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    forward = Forward(model)
    ran: list[str] = []
    model.model.layers[0].register_forward_hook(lambda *_: ran.append("layer"))
    model.lm_head.register_forward_hook(lambda *_: ran.append("head"))
    with torch.inference_mode():
        hidden = forward.hidden(TOKENS, keep=6)
        assert ran == ["layer"]
        forward.logits(hidden[0])
        assert ran == ["layer", "head"]
        forward(TOKENS, keep=6)
        assert ran == ["layer", "head"] * 2


def test_a_model_whose_logits_depend_on_more_than_the_head_is_given_is_refused() -> None:
    model = opt()
    own = model.forward

    def biased(**arguments: Any) -> Any:
        output = own(**arguments)
        output.logits = output.logits + arguments["input_ids"].sum()
        return output

    model.forward = biased
    with pytest.raises(EngineError, match="from more than its head is given"):
        Forward(model)


def test_a_head_is_given_rows_that_lie_side_by_side() -> None:
    # torch would copy the head's whole weight for each row: gigabytes at 151,936 tokens.
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    ).eval()
    passed, given = Forward(model), list[torch.Tensor]()
    passed.head.register_forward_hook(lambda _head, inputs, _logits: given.append(inputs[0]))
    with torch.inference_mode():
        tokens = np.array([[1, 2, 3], [4, 5, 6]])
        hidden, logits = passed(tokens, keep=1)
        assert torch.equal(passed.logits(hidden[:, 0]), logits[:, 0])
    assert [each.shape for each in given] == [(2, 1, 16)] * 2
    assert all(each.is_contiguous() for each in given)
