"""Packed attention: the gradients of sequences that are alone in their rows, for many models."""

import copy
import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)
from worlds.tiny_shapes import COMMON, GEMMA, LAYOUTS, uneven_samples

from muster.trainer.learn import attention, masked
from muster.trainer.learn.cascade import Layout, cascade
from muster.trainer.learn.logprob import head_of, token_logprobs
from muster.trainer.learn.packing import TrainingSample, pack
from muster.trainer.learn.passes import ComputeType, Passes

GPT2: dict[str, Any] = {
    **dict.fromkeys(("bos_token_id", "pad_token_id")),
    "vocab_size": 40,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "eos_token_id": 1,
}
PACKED = {
    "qwen3": Qwen3Config(**COMMON),
    "llama": LlamaConfig(**COMMON),
    "capped scores and logits, sliding window": Gemma2Config(**GEMMA, sliding_window=4),
    "sliding window, two rotary tables": Gemma3TextConfig(**GEMMA, sliding_window=4),
    "learned positions, dropout": GPT2Config(**GPT2),
    "mixture of experts": Qwen2MoeConfig(
        **COMMON, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
}


def _model(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    # Experts' grouped products have no float64.
    dtype = torch.float32 if hasattr(config, "num_experts") else torch.float64
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).to(dtype).train()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    attention.switch_off_dropout(model)
    return model


def _dense(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attention of a packed row by one mask over all of it."""
    seen = torch.zeros(layout.width, layout.width, dtype=torch.bool)
    for s in layout.segments():
        size = s.stop - s.start
        seen[s, s] = torch.ones(size, size, dtype=torch.bool).tril()
    for prompt, own in layout.groups():
        seen[own, prompt] = True
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scale
    ).transpose(1, 2)


@settings(max_examples=30, deadline=None)
@given(LAYOUTS, st.integers(0, 1000))
def test_cascade_is_attention_under_a_mask(layout: Layout, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 2, layout.width, 8)
    weight = torch.randn(1, layout.width, 2, 8, generator=generator, dtype=torch.float64)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]
    results = []
    for attend in (cascade, _dense):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = attend(*leaves, layout, 0.3)
        (out * weight).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_cascade_in_bfloat16_is_that_of_float32_rounded() -> None:
    layout = Layout((5, 3), ((4, 6), (2, 0, 7)))
    generator = torch.Generator().manual_seed(0)
    short = [
        torch.randn(1, 2, layout.width, 8, generator=generator).to(torch.bfloat16) for _ in range(3)
    ]
    out = cascade(*short, layout, 0.3)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, cascade(*(t.float() for t in short), layout, 0.3).to(torch.bfloat16))


def _gradients(
    model: Any, samples: list[TrainingSample], budget: int, is_padded: bool
) -> dict[str, Tensor]:
    model.zero_grad()
    for batch in pack(samples, budget, is_padded=is_padded):
        logp_N, entropy_N = token_logprobs(
            batch.hidden(model), head_of(model), batch.targets_N, 0.9
        )
        advantage_B = torch.tensor([samples[i].advantage for i in batch.order])
        (logp_N * advantage_B[batch.row_N] + 0.1 * entropy_N).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm; models round to float32 inside even in float64."""
    assert found.keys() == expected.keys()
    whole, other = (torch.cat([g[n].flatten() for n in expected]) for g in (found, expected))
    return float((whole - other).norm() / other.norm())


@pytest.mark.parametrize("name", PACKED)
def test_packed_gradients_are_those_of_padded_rows(name: str) -> None:
    model, samples = _model(PACKED[name]), uneven_samples()
    # torch's attention would not cap Gemma's scores.
    model.set_attn_implementation("eager")
    expected = _gradients(model, samples, 10_000, is_padded=True)
    assert attention.understands_packing(model)
    assert model.config._attn_implementation == attention.NAME
    for budget in (10_000, 20, 1):
        assert _distance(_gradients(model, samples, budget, is_padded=False), expected) < 1e-6


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", ["qwen3", *(name for name in PACKED if "window" in name)])
def test_calls_on_a_few_queries_give_the_same_gradients(
    name: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, samples = _model(PACKED[name]), uneven_samples()
    model.set_attn_implementation(attention.MASKED)
    expected = _gradients(model, samples, 10_000, is_padded=False)
    assert attention.understands_packing(model)
    assert _distance(_gradients(model, samples, 10_000, is_padded=False), expected) < 1e-6
    model.set_attn_implementation(attention.MASKED)
    monkeypatch.setattr(masked, "QUERIES", queries)
    monkeypatch.setattr(masked, "CAPPED_PAIRS", 4 * queries)
    assert _distance(_gradients(model, samples, 10_000, is_padded=False), expected) < 1e-6


@settings(max_examples=50, deadline=None)
@given(LAYOUTS, st.integers(1, 9), st.none() | st.integers(1, 8))
def test_calls_have_just_the_keys_that_their_queries_see(
    layout: Layout, queries: int, window: int | None
) -> None:
    row = torch.arange(layout.width)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(masked, "QUERIES", queries)
        calls = list(masked._calls(layout, masked.Rule(1.0, window, None)))
    assert torch.cat([row[asking] for asking, _ in calls]).sort().values.equal(row)
    for asking, asked in calls:
        (whole,) = (
            torch.cat([row[part] for part in parts])[: asking.stop - own.stop or None]
            for own, parts in layout.seen()
            if own.start <= asking.start < own.stop
        )
        size = asking.stop - asking.start
        assert 0 < size <= queries
        seen = whole if window is None else whole[-(window + size - 1) :]
        assert torch.equal(torch.cat([row[part] for part in asked]), seen)


def _fails_in_bfloat16(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
) -> Tensor:
    if query.dtype == torch.bfloat16:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    return cascade(query, key, value, layout, scale)


def _differs_in_bfloat16(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
) -> Tensor:
    factor = 1.2 if query.dtype == torch.bfloat16 else 1.0
    return cascade(query, key, value, layout, factor * scale)


def _has_no_gradient_in_bfloat16(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
) -> Tensor:
    output = cascade(query, key, value, layout, scale)
    if output.requires_grad and query.dtype == torch.bfloat16:
        output.register_hook(lambda gradient: gradient * float("nan"))
    return output


@pytest.mark.parametrize(
    "kernel", [_fails_in_bfloat16, _differs_in_bfloat16, _has_no_gradient_in_bfloat16]
)
def test_rows_take_masks_where_the_kernel_fails_in_the_compute_type(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = _in_bfloat16()
    assert "attention takes masks: its kernel fails here" not in caplog.messages
    monkeypatch.setattr(attention, "cascade", kernel)
    found = _in_bfloat16(attention.MASKED)
    assert "attention takes masks: its kernel fails here" in caplog.messages
    assert _distance(found, expected) < 0.02
    passes = _passes(_model(PACKED["qwen3"]).float(), "float32")
    assert passes._computing.model.config._attn_implementation == attention.NAME


def _passes(model: Any, dtype: ComputeType) -> Passes:
    return Passes(
        model, lambda _: None, temperature=0.9, micro_batch_tokens=1000, compute_dtype=dtype
    )


def _in_bfloat16(chosen: str = attention.NAME) -> dict[str, Tensor]:
    """The gradients of passes in bfloat16, whose attention has to be the given one."""
    model = _model(PACKED["qwen3"]).float()
    passes = _passes(model, "bfloat16")
    assert passes.is_packed
    assert passes._computing.model.config._attn_implementation == chosen
    for batch in passes.pack(uneven_samples()):
        total, *_ = passes.objective(batch, lambda logp_R, _h, _rows: logp_R)
        total.backward()  # type: ignore[no-untyped-call]  # torch's stub
    return {name: p.grad for name, p in model.named_parameters()}


def test_a_gpu_in_float32_has_masks_only() -> None:
    model = _model(PACKED["qwen3"])
    found = attention.fastest(model, torch.device("cuda"), torch.float32)
    assert found == attention.MASKED
    assert attention.fastest(model, torch.device("cpu"), torch.float32) == attention.NAME


def test_gradient_checkpointing_keeps_the_layout() -> None:
    model, samples = _model(PACKED["qwen3"]), uneven_samples()
    assert attention.understands_packing(model)
    expected = _gradients(model, samples, 10_000, is_padded=False)
    model.gradient_checkpointing_enable()
    assert _distance(_gradients(model, samples, 10_000, is_padded=False), expected) < 1e-6


def test_recurrent_model_is_found_out_and_keeps_its_attention(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=1, state_size=4)
    model = _model(config)
    own = model.config._attn_implementation
    with caplog.at_level(logging.INFO, logger="muster.trainer.learn.attention"):
        assert not attention.understands_packing(model)
    assert model.config._attn_implementation == own
    assert "sequences are not packed" in caplog.messages
    assert _gradients(model, uneven_samples(), 100, is_padded=True)


@pytest.mark.parametrize("option", ["packed_layout", "attention_mask", "dropout", "s_aux"])
def test_what_cannot_be_packed_is_refused(option: str) -> None:
    state = torch.zeros(1, 2, 5, 8)
    options: dict[str, Any] = {"packed_layout": Layout((2,), ((3,),)), "attention_mask": None}
    attention.packed_attention(torch.nn.Identity(), state, state, state, **options)
    options |= {
        "packed_layout": {"packed_layout": None},
        "attention_mask": {"attention_mask": torch.ones(1, 1, 5, 5)},
        "dropout": {"dropout": 0.1},
        "s_aux": {"s_aux": torch.zeros(2)},
    }[option]
    with pytest.raises(ValueError, match="Identity cannot attend to a packed row"):
        attention.packed_attention(torch.nn.Identity(), state, state, state, **options)
