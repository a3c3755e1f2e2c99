"""Parts of a model in their cheaper form give the model's own results."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GemmaConfig, Qwen3Config

from muster.trainer.learn import cheaper
from muster.trainer.learn.attention import NAME, packed_hidden
from muster.trainer.learn.cascade import Layout
from muster.trainer.learn.cheaper import narrow, quicken
from muster.trainer.learn.recompute import Recompute, blocks, recompute

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LAYOUT = Layout((5, 4), ((3, 2), (0,)))
TOKENS = torch.arange(LAYOUT.width) * 7 % 32
PREDICTING = torch.tensor([4, 7, 8, 9, 10, 11, 12, 13])
"""All positions except the prompts' first ones."""


@pytest.fixture(autouse=True)
def _few_numbers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cheaper, "BLOCK_NUMBERS", 96)


def build(config: Any = None) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or Qwen3Config(**SIZES), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def replaced(model: Any) -> set[str]:
    """Return the classes of modules that are computed here."""
    return {
        type(m).__name__ for m in model.modules() if isinstance(m.__dict__.get("forward"), partial)
    }


def gradients(forward: Callable[[Tensor], Tensor], module: Any, given: Tensor) -> list[Tensor]:
    """Return a value, and the gradients of its inputs for a fixed gradient of it."""
    given = given.clone().requires_grad_()
    module.zero_grad()
    value = forward(given)
    value.backward(torch.cos(torch.arange(value.numel()) * 1.0).view(value.shape).to(value.dtype))
    return [value.detach(), given.grad, *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("part", ["input_layernorm", "mlp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_say_the_same_bits_and_gradients_to_rounding(part: str, dtype: torch.dtype) -> None:
    model = build().to(dtype)
    own = getattr(blocks(model)[0], part)
    given = torch.randn(1, 17, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    value, *expected = gradients(own.forward, own, given)
    quicken(model)
    found_value, *found = gradients(own.forward, own, given)
    assert torch.equal(found_value, value)
    within = 1e-6 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < within


def test_all_norms_and_feed_forward_parts_of_qwen3_are_replaced() -> None:
    model = build()
    quicken(model)
    assert replaced(model) == {"Qwen3RMSNorm", "Qwen3MLP"}


def test_parts_that_compute_something_else_are_left_alone() -> None:
    # Gemma's norms multiply by 1 + weight, and its gate is no silu.
    model = build(GemmaConfig(**SIZES))
    quicken(model)
    assert replaced(model) == set()


def test_a_norm_that_is_not_trained_gets_no_gradient() -> None:
    model = build()
    norm = blocks(model)[0].input_layernorm
    quicken(model)
    norm.requires_grad_(False)
    given = torch.randn(1, 3, 32, requires_grad=True)
    norm(given).sum().backward()
    assert norm.weight.grad is None
    assert given.grad is not None


def of_a_row(predicting: Tensor | None, kind: Recompute, *, is_narrow: bool) -> list[Tensor]:
    """Return the final hidden states that predict, and all gradients of a function of them."""
    model = build()
    model.set_attn_implementation(NAME)
    recompute(model, kind)
    if is_narrow:
        narrow(model)
    hidden = packed_hidden(model, TOKENS, LAYOUT, predicting)[PREDICTING]
    # A pass without gradient in between, as a filler pass might come.
    with torch.no_grad():
        packed_hidden(model, TOKENS[:1], Layout((1,), ((0,),)), torch.tensor([0]))
    hidden.square().sum().backward()
    return [hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", get_args(Recompute))
def test_the_last_block_computes_at_predicting_positions_what_it_computed_at_all(
    kind: Recompute,
) -> None:
    expected = of_a_row(None, kind, is_narrow=False)
    found = of_a_row(PREDICTING, kind, is_narrow=True)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6


def test_a_position_that_is_left_out_shows() -> None:
    expected, *_ = of_a_row(None, "none", is_narrow=False)
    found, *_ = of_a_row(PREDICTING[1:], "none", is_narrow=True)
    assert not torch.allclose(found[0], expected[0], rtol=1e-3)
    assert torch.equal(found[1:].isfinite(), expected[1:].isfinite())
    assert torch.allclose(found[1:], expected[1:], rtol=1e-4, atol=1e-5)


def test_the_last_feed_forward_part_is_given_predicting_positions_alone() -> None:
    model = build()
    model.set_attn_implementation(NAME)
    given: list[int] = []
    for block in blocks(model):
        block.mlp.down_proj.register_forward_hook(lambda _m, i, _o: given.append(i[0].shape[1]))
    narrow(model)
    packed_hidden(model, TOKENS, LAYOUT, PREDICTING)
    packed_hidden(model, TOKENS, LAYOUT)
    assert given == [14, 8, 14, 14]
