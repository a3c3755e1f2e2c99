"""Attention over packed rows: sequences side by side, a group's prompt once for all completions.

A packed row holds all prompts, then the completions of the first prompt, of the second, and so on.
Every completion token attends to its prompt and to its own completion up to itself, as if it were
alone in a row. `muster_packed` is registered with transformers, so every model whose attention goes
through its registry is trained this way; `understands_packing` finds out by comparing.

Two ways to the same numbers, of which `fastest` chooses:

* cascade: causal attention within each prompt and completion, attention of a group's completions to
  their prompt in one go, and both merged by their log-sum-exp. The backward pass gives each part
  the merged result and log-sum-exp, which makes its gradient exact. On a GPU in half precision
  these are two varlen flash calls; otherwise flash calls per sequence, in float32.
* masked: calls for some of a completion's queries on the keys that they see, where the cascade has
  no kernel: sliding windows that are shorter than the sequences, capped scores, and devices whose
  kernel does not take the number format or the head's size.

Axes: S positions of the row, H heads, E head size.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from muster.trainer.learn.cascade import Layout, cascade, has_kernel
from muster.trainer.learn.masked import Rule, masked

logger = logging.getLogger(__name__)

NAME = "muster_packed"
"""The attention implementation's name in transformers."""
MASKED = "muster_packed_masked"
"""Name of the same with masks only, as on a device without kernels."""


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: Layout | None = None,
    has_kernels: bool = True,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [1, S, H, E]; transformers calls this function for `NAME`.

    `packed_layout` travels as a keyword argument of the model's forward pass. Raises ValueError if
    the row cannot be packed: no layout, a mask, dropout, attention sinks, position biases.
    """
    unknown = [n for n in ("s_aux", "position_bias") if options.get(n) is not None]
    if packed_layout is None or attention_mask is not None or dropout or unknown:
        raise ValueError(
            f"{type(module).__name__} cannot attend to a packed row: layout {packed_layout}, mask "
            f"{attention_mask is not None}, dropout {dropout}, {unknown}; "
            'use set_attn_implementation("sdpa")'
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    is_cut = sliding_window is not None and packed_layout.longest > sliding_window
    if softcap or is_cut or not has_kernels:
        keys, values = (_row(t, packed_layout) for t in (key, value))
        rule = Rule(scale, sliding_window, softcap)
        out = masked(query, keys, values, packed_layout, rule)
    else:
        out = cascade(query, key, value, packed_layout, scale)
    return out, None


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(MASKED, partial(packed_attention, has_kernels=False))


def switch_off_dropout(model: Any) -> None:
    """Make training compute what sampling computed: no layer of the model drops anything."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def fastest(model: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Return the attention that computes a model's packed rows on a device in a number format:
    `NAME`, or `MASKED` where the cascade fails there; it is tried once, forward and backward.
    """
    if not has_kernel(device, dtype):
        return MASKED
    for size in {getattr(module, "head_dim", None) for module in model.modules()}:
        if isinstance(size, int) and (reason := _reason_against(device, dtype, size)):
            fields = {"head_size": size, "reason": reason}
            logger.warning("attention takes masks: its kernel fails here", extra=fields)
            return MASKED
    return NAME


def _reason_against(device: torch.device, dtype: torch.dtype, size: int) -> str:
    """Say why `cascade` cannot compute heads of a size; empty when it can."""
    rule = Rule(size**-0.5, None, None)
    expected = _tried(partial(masked, rule=rule), device, dtype, size)
    try:
        found = _tried(partial(cascade, scale=rule.scale), device, dtype, size)
    except RuntimeError as error:
        return str(error)[:200]
    pairs = zip(expected, found, strict=True)
    differences = [float((e - f).abs().max() / e.abs().max()) for e, f in pairs]
    is_right = all(each <= torch.finfo(dtype).eps ** 0.5 for each in differences)  # no NaN is
    return "" if is_right else f"it differs from masked attention by {differences}"


def _tried(
    attend: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, size: int
) -> list[Tensor]:
    """Return the output and the gradients of two heads that share keys and values."""
    layout, generator = Layout((3, 2), ((4, 2), (3, 0))), torch.Generator().manual_seed(0)
    drawn = (torch.randn(1, h, layout.width, size, generator=generator) for h in (2, 1, 1))
    given = [tensor.to(device, dtype).requires_grad_() for tensor in drawn]
    with torch.enable_grad():
        out = attend(*given, layout)
    return [out.detach(), *torch.autograd.grad(out, given, out.detach())]


@torch.no_grad()
def understands_packing(model: Any) -> bool:
    """Tell whether a model computes the same for packed sequences as for each alone.

    If false, the model keeps its own attention; if true, it has the `fastest` one. The function
    compares both, so it also finds other attention, recurrent layers and other position ids.
    """
    layout = Layout((3, 2), ((4, 2), (3, 0)))
    own = model.config._attn_implementation
    # torch's attention leaves capped scores uncapped.
    model.set_attn_implementation("eager")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(layout.width, device=model.device) * 7 % vocabulary
    expected = [
        model.base_model(
            torch.cat([tokens[p], tokens[c]])[None], use_cache=False
        ).last_hidden_state[0, p.stop - p.start :]
        for p, c in layout.sequences()
    ]
    try:
        model.set_attn_implementation(fastest(model, model.device, model.dtype))
        found = packed_hidden(model, tokens, layout)
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        # Whatever fails here, the padded path does not need it.
        logger.info("sequences are not packed", extra={"reason": str(error)[:200]})
        model.set_attn_implementation(own)
        return False
    pairs = zip(expected, (found[c] for _, c in layout.sequences()), strict=True)
    worst = max(float((e - f).abs().max() / e.abs().max()) for e, f in pairs)
    # Rounding errors are far below the square root of eps, the influence of another sequence above;
    # models round to float32 inside even in float64.
    if not worst <= max(torch.finfo(t).eps for t in (expected[0].dtype, torch.float32)) ** 0.5:
        logger.info("sequences are not packed", extra={"difference": worst})
        model.set_attn_implementation(own)
        return False
    return True


def packed_hidden(
    model: Any, tokens_S: Tensor, layout: Layout, predicting_P: Tensor | None = None
) -> Tensor:
    """Return the final hidden states [S, D] of a packed row; with `predicting_P`, each position
    once, perhaps correct at these positions only (`cheaper.narrow`).
    """
    hidden_1SD: Tensor = model.base_model(
        input_ids=tokens_S[None],
        position_ids=torch.tensor([layout.positions()], device=tokens_S.device),
        use_cache=False,
        packed_layout=layout,
        packed_predicting=predicting_P,
    ).last_hidden_state
    return hidden_1SD[0]


def _row(own: Tensor, layout: Layout) -> Tensor:
    """Return the whole row's keys or values; `own` are at the queries' places."""
    whole: Tensor = _Gathered.apply(own, layout)  # type: ignore[no-untyped-call]  # torch's stub
    return whole


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, layout: Layout) -> Tensor:
        ctx.layout, ctx.shape = layout, own.shape
        return layout.gather(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.layout.sum_of(gradients[0]), None
