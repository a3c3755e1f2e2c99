"""Log-probabilities and entropies of chosen tokens, without the logits of all tokens at once.

Works on final hidden states and a language model's head, in chunks of rows; the backward pass
recomputes each chunk's logits. Memory is that of one chunk, and of the head's gradient.

Axes: N completion tokens, D hidden size, V vocabulary, C rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 23
"""Logits computed at a time: 32 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Head:
    """How a model turns final hidden states into logits."""

    weight_VD: Tensor
    """The output embedding."""
    bias_V: Tensor | None
    """Its bias, if it has one."""
    scale: float = 1.0
    """Factor on the logits (Cohere's `logit_scale`, one over Granite's `logits_scaling`)."""
    softcap: float = 0.0
    """Gemma's `final_logit_softcapping`: z becomes c * tanh(z / c); 0 for none."""


def head_of(model: Any) -> Head:
    """Return the head of a Hugging Face causal language model."""
    layer, config = model.get_output_embeddings(), model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = float(getattr(config, "final_logit_softcapping", None) or 0.0)
    return Head(layer.weight, getattr(layer, "bias", None), scale, softcap)


def token_logprobs(
    hidden_ND: Tensor, head: Head, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probability of each target and entropy of its distribution, both float32 [N].

    The distribution is softmax(logits / temperature), as sampled from. Differentiable in the hidden
    states and the head, also twice used (a tied embedding).
    """
    if not torch.is_grad_enabled():
        chunks = [
            _forward(h, head, t, temperature)[:2] for h, t in _chunks(hidden_ND, head, targets_N)
        ]
        return torch.cat([c[0] for c in chunks]), torch.cat([c[1] for c in chunks])
    logp_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]  # torch's stub
        hidden_ND, head.weight_VD, head.bias_V, targets_N, head, temperature
    )
    return logp_N, entropy_N


def _chunks(hidden_ND: Tensor, head: Head, targets_N: Tensor) -> list[tuple[Tensor, Tensor]]:
    rows = max(16, CHUNK_LOGITS // head.weight_VD.shape[0])
    return list(zip(torch.split(hidden_ND, rows), torch.split(targets_N, rows), strict=True))


def _forward(
    hidden_CD: Tensor, head: Head, targets_C: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return logp [C], entropy [C], log-softmax [C, V], and d logits / d raw for a softcap."""
    logits_CV = torch.nn.functional.linear(hidden_CD, head.weight_VD, head.bias_V).float()
    slope_CV = None
    if head.softcap:
        tanh_CV = torch.tanh(logits_CV * (head.scale / head.softcap))
        logits_CV, slope_CV = tanh_CV * (head.softcap / temperature), 1 - tanh_CV**2
    elif head.scale != temperature:
        logits_CV = logits_CV * (head.scale / temperature)
    logp_CV = torch.log_softmax(logits_CV, dim=-1)
    entropy_C = -(logp_CV.exp() * logp_CV).sum(-1)
    return logp_CV.gather(1, targets_C[:, None]).squeeze(1), entropy_C, logp_CV, slope_CV


class _TokenLogprobs(torch.autograd.Function):
    """`token_logprobs` with a backward pass that recomputes the logits chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        head: Head,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N)
        ctx.head, ctx.temperature = head, temperature
        chunks = [
            _forward(h, head, t, temperature)[:2] for h, t in _chunks(hidden_ND, head, targets_N)
        ]
        return torch.cat([c[0] for c in chunks]), torch.cat([c[1] for c in chunks])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N = ctx.saved_tensors
        gradient_ND = torch.empty_like(hidden_ND)
        gradient_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        gradient_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        start = 0
        for hidden_CD, targets_C in _chunks(hidden_ND, ctx.head, targets_N):
            rows = slice(start, start + len(targets_C))
            raw_CV = _raw_gradient(
                hidden_CD, targets_C, ctx.head, ctx.temperature, *(g[rows] for g in gradients)
            ).to(hidden_ND.dtype)
            gradient_ND[rows] = raw_CV @ weight_VD
            gradient_VD += raw_CV.T @ hidden_CD
            if gradient_V is not None:
                gradient_V += raw_CV.float().sum(0)
            start = rows.stop
        bias_gradient = None if gradient_V is None else gradient_V.to(weight_VD.dtype)
        return gradient_ND, gradient_VD.to(weight_VD.dtype), bias_gradient, None, None, None


def _raw_gradient(
    hidden_CD: Tensor,
    targets_C: Tensor,
    head: Head,
    temperature: float,
    logp_gradient_C: Tensor,
    entropy_gradient_C: Tensor,
) -> Tensor:
    """Return the gradient of the loss with respect to `hidden @ weight.T + bias`, [C, V].

    With z the logits over T: d logp / dz = onehot - p and d H / dz = -p * (log p + H).
    """
    _, entropy_C, logp_CV, slope_CV = _forward(hidden_CD, head, targets_C, temperature)
    p_CV = logp_CV.exp()
    gradient_CV = -p_CV * logp_gradient_C[:, None]
    gradient_CV.scatter_add_(1, targets_C[:, None], logp_gradient_C[:, None])
    if entropy_gradient_C.any():
        surprise_CV = logp_CV + entropy_C[:, None]
        gradient_CV -= entropy_gradient_C[:, None] * p_CV * surprise_CV
    if slope_CV is not None:
        gradient_CV *= slope_CV
    return gradient_CV * (head.scale / temperature)
