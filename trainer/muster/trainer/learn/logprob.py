"""Log-probabilities and entropies of chosen tokens, without the logits of all tokens at once.

Works on final hidden states and a language model's head, chunk by chunk. A chunk's logits are made
in one buffer of the head's type, and their gradient overwrites them, a few rows at a time in
float32 (float64 for float64). It takes the memory of the buffer and of the head's gradient. Three
forms:

* without gradient, when autograd is off;
* recompute: `token_logprobs` gives the values, the backward pass makes the logits again. For losses
  that need all tokens' values first (a ratio per sequence);
* one pass: `token_objective` calls the loss as soon as it has a token's values, and makes the
  gradient at once, with a quarter fewer matrix products. For losses that are a sum over tokens.

A head's gradient is as large as the head. With `Head.adds_at_once` it is added to the weight's
`grad` chunk by chunk, and autograd gets none.

Axes: N completion tokens, D hidden size, V vocabulary, C rows of a chunk, R rows made at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_LOGITS = 1 << 26
"""Logits of a chunk: 128 MiB in bfloat16. The product that adds to the weight's gradient reads and
writes all of it, so chunks of few tokens are slow."""
BLOCK_LOGITS = 1 << 20
"""Logits that are in float32 at a time on a CPU: 4 MiB, which fit into the cache."""
DEVICE_BLOCK_LOGITS = CHUNK_LOGITS
"""The same on an accelerator, where kernels on few rows take less time than their launches."""

Made = tuple[Tensor, Tensor | None, Tensor | None]
"""Gradients of hidden states, weight and bias."""

Rows = slice | Tensor
"""Which tokens of a micro-batch: a slice, or their numbers."""

Objective = Callable[[Tensor, Tensor, Rows], Tensor]
"""Takes logp [R], entropy [R] and which of the N tokens they are; returns each one's loss [R]."""


@dataclass(frozen=True, slots=True)
class Head:
    """The part of a model that turns final hidden states into logits."""

    weight_VD: Tensor
    """The output embedding."""
    bias_V: Tensor | None
    """Its bias, if it has one."""
    scale: float = 1.0
    """Factor on the logits (Cohere's `logit_scale`, one over Granite's `logits_scaling`)."""
    softcap: float = 0.0
    """Gemma's `final_logit_softcapping`: z becomes c * tanh(z / c); 0 for none."""
    adds_at_once: bool = False
    """Whether the gradient of the weight, a leaf, is added to its `grad` without autograd.
    `token_objective` then adds it in the forward pass, and the gradient of its sum must be 1."""


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

    The distribution is softmax(logits / temperature), as in sampling. Differentiable in the hidden
    states and the head, which may be a tied embedding.
    """
    if not torch.is_grad_enabled():
        return _values(hidden_ND, head, targets_N, temperature)
    logp_N, entropy_N = _Recompute.apply(  # type: ignore[no-untyped-call]  # torch's stub
        hidden_ND, head.weight_VD, head.bias_V, targets_N, head, temperature
    )
    return logp_N, entropy_N


def token_objective(
    hidden_ND: Tensor, head: Head, targets_N: Tensor, temperature: float, objective: Objective
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of all tokens' losses, and logp [N] and entropy [N] without gradient.

    The sum is differentiable in the hidden states and the head. `objective` is called for some
    tokens at a time, each token once, and must not mix tokens.
    """
    total, logp_N, entropy_N = _OnePass.apply(  # type: ignore[no-untyped-call]  # torch's stub
        hidden_ND, head.weight_VD, head.bias_V, targets_N, head, temperature, objective
    )
    return total, logp_N, entropy_N


class _Recompute(torch.autograd.Function):
    """`token_logprobs` with a backward pass that makes the logits again."""

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
        return _values(hidden_ND, head, targets_N, temperature)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, targets_N = ctx.saved_tensors
        logp_gradient_N, entropy_gradient_N = gradients
        head = replace(ctx.head, weight_VD=weight_VD, bias_V=bias_V)
        total_VD = _total_of(ctx.head.weight_VD, ctx.head, is_due=ctx.needs_input_grad[1])

        def given(_: _Block, rows: slice) -> tuple[Tensor, Tensor]:
            return logp_gradient_N[rows], entropy_gradient_N[rows]

        made = _gradients(hidden_ND, head, targets_N, ctx.temperature, given, total_VD)
        return *_for_autograd(made, head), None, None, None


class _OnePass(torch.autograd.Function):
    """`token_objective`: the gradient for a sum of 1 is made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        _bias_V: Tensor | None,
        targets_N: Tensor,
        head: Head,
        temperature: float,
        objective: Objective,
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = hidden_ND.new_zeros((), dtype=torch.float64)
        logp_N = hidden_ND.new_empty(len(targets_N), dtype=_wide(hidden_ND))
        entropy_N = torch.empty_like(logp_N)

        def found(block: _Block, rows: slice) -> tuple[Tensor, Tensor]:
            logp_N[rows], entropy_N[rows] = block.logp_R, block.entropy_R
            loss, *slopes = _slopes(objective, block, rows)
            total.add_(loss)
            return slopes[0], slopes[1]

        total_VD = _total_of(weight_VD, head, is_due=ctx.needs_input_grad[1])
        made = _gradients(hidden_ND, head, targets_N, temperature, found, total_VD)
        ctx.gradients, ctx.is_added = _for_autograd(made, head), head.adds_at_once
        ctx.mark_non_differentiable(logp_N, entropy_N)
        return total.to(logp_N.dtype), logp_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Keep no reference: autograd takes over a tensor that nobody else holds, and copies others.
        made, ctx.gradients = ctx.gradients, None
        if not bool(gradients[0] == 1):
            if ctx.is_added:
                raise ValueError("the head's gradient was added for a sum of 1")
            for gradient in made:
                if gradient is not None:
                    gradient.mul_(gradients[0])
        return *made, None, None, None, None


def _slopes(objective: Objective, block: _Block, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of a block's tokens, summed, and its slopes in logp and in entropy."""
    with torch.enable_grad():
        logp_R, entropy_R = (t.detach().requires_grad_() for t in (block.logp_R, block.entropy_R))
        loss = objective(logp_R, entropy_R, rows).sum()
        slopes = torch.autograd.grad(loss, (logp_R, entropy_R), materialize_grads=True)
    return loss.detach(), slopes[0], slopes[1]


@dataclass(frozen=True, slots=True)
class _Block:
    """Some tokens' distributions in float32."""

    logp_R: Tensor
    entropy_R: Tensor
    shifted_RV: Tensor
    """Logits divided by the temperature, minus the largest of the row."""
    exp_RV: Tensor
    """exp of `shifted_RV`; equals the probabilities times `sum_R`."""
    sum_R: Tensor
    slope_RV: Tensor | None
    """d logits / d raw logits of a softcap."""


def _values(
    hidden_ND: Tensor, head: Head, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logp_N = hidden_ND.new_empty(len(targets_N), dtype=_wide(hidden_ND))
    entropy_N = torch.empty_like(logp_N)

    # A function of its own: its tensors are freed before the next chunk's logits are made.
    def fill(chunk: slice) -> None:
        raw_CV = functional.linear(hidden_ND[chunk], head.weight_VD, head.bias_V)
        for rows, raw_RV in _blocks(raw_CV, chunk):
            block = _block(raw_RV, head, targets_N[rows], temperature)
            logp_N[rows], entropy_N[rows] = block.logp_R, block.entropy_R

    for chunk in _chunks(len(targets_N), head):
        fill(chunk)
    return logp_N, entropy_N


def _gradients(
    hidden_ND: Tensor,
    head: Head,
    targets_N: Tensor,
    temperature: float,
    slopes: Callable[[_Block, slice], tuple[Tensor, Tensor]],
    total_VD: Tensor | None,
) -> Made:
    """Return the gradients of hidden states, weight and bias from those of logp and entropy.

    The weight's gradient is added to `total_VD`, which is None for a weight that is not trained.
    """
    weight_VD, bias_V = head.weight_VD, head.bias_V
    gradient_ND = torch.empty_like(hidden_ND)
    gradient_V = None if bias_V is None else torch.zeros_like(bias_V)

    # As in `_values`: one chunk's logits are freed before the next one's are made.
    def add(chunk: slice) -> None:
        raw_CV = functional.linear(hidden_ND[chunk], weight_VD, bias_V)
        for rows, raw_RV in _blocks(raw_CV, chunk):
            block = _block(raw_RV, head, targets_N[rows], temperature)
            raw_RV.copy_(
                _raw_gradient(block, targets_N[rows], slopes(block, rows), head, temperature)
            )
        torch.mm(raw_CV, weight_VD, out=gradient_ND[chunk])
        if total_VD is not None:
            # A chunk's product is summed up in float32 and rounded once: few chunks lose little.
            total_VD.addmm_(raw_CV.T, hidden_ND[chunk])
        if gradient_V is not None:
            gradient_V.add_(raw_CV.sum(0))

    for chunk in _chunks(len(targets_N), head):
        add(chunk)
    return gradient_ND, total_VD, gradient_V


def _total_of(weight_VD: Tensor, head: Head, *, is_due: bool) -> Tensor | None:
    """Return the tensor to which the gradient of a head's weight is added."""
    if not is_due:
        return None
    return gradient_of(head.weight_VD) if head.adds_at_once else torch.zeros_like(weight_VD)


def _for_autograd(made: Made, head: Head) -> Made:
    return (made[0], None, made[2]) if head.adds_at_once else made


def gradient_of(weight: Tensor) -> Tensor:
    """Return the gradient that a leaf has so far: zeros if it has none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def chunk_rows(vocabulary: int) -> int:
    """Return how many tokens' logits are made at a time."""
    return max(16, CHUNK_LOGITS // vocabulary)


def block_rows(device: str, vocabulary: int) -> int:
    """Return how many tokens' logits are in float32 at a time, by type of device."""
    return max(1, (BLOCK_LOGITS if device == "cpu" else DEVICE_BLOCK_LOGITS) // vocabulary)


def _chunks(tokens: int, head: Head) -> Iterator[slice]:
    size = chunk_rows(head.weight_VD.shape[0])
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _blocks(raw_CV: Tensor, chunk: slice) -> Iterator[tuple[slice, Tensor]]:
    """Yield a few rows of a chunk at a time, each with the slice of its tokens before it."""
    size = block_rows(raw_CV.device.type, raw_CV.shape[1])
    for raw_RV, start in zip(
        torch.split(raw_CV, size), range(chunk.start, chunk.stop, size), strict=True
    ):
        yield slice(start, start + len(raw_RV)), raw_RV


def _block(raw_RV: Tensor, head: Head, targets_R: Tensor, temperature: float) -> _Block:
    logits_RV, slope_RV = raw_RV.to(_wide(raw_RV)), None
    if head.softcap:
        tanh_RV = torch.tanh(logits_RV * (head.scale / head.softcap))
        logits_RV, slope_RV = tanh_RV * (head.softcap / temperature), 1 - tanh_RV**2
    elif head.scale != temperature:
        logits_RV = logits_RV * (head.scale / temperature)
    shifted_RV = logits_RV - logits_RV.amax(dim=1, keepdim=True)
    exp_RV = shifted_RV.exp()
    sum_R = exp_RV.sum(dim=1)
    entropy_R = sum_R.log() - torch.linalg.vecdot(exp_RV, shifted_RV) / sum_R
    logp_R = shifted_RV.gather(1, targets_R[:, None]).squeeze(1) - sum_R.log()
    return _Block(logp_R, entropy_R, shifted_RV, exp_RV, sum_R, slope_RV)


def _raw_gradient(
    block: _Block,
    targets_R: Tensor,
    slopes: tuple[Tensor, Tensor],
    head: Head,
    temperature: float,
) -> Tensor:
    """Return the gradient of the loss with respect to `hidden @ weight.T + bias`, [R, V].

    With z the logits over T: d logp / dz = onehot - p and d H / dz = -p * (log p + H), where
    log p = shifted - log(sum). The result overwrites the block.
    """
    factor = head.scale / temperature
    logp_slope_R, entropy_slope_R = (slope * factor for slope in slopes)
    gradient_RV = block.exp_RV
    if entropy_slope_R.any():
        constant_R = logp_slope_R + entropy_slope_R * (block.entropy_R - block.sum_R.log())
        weight_RV = block.shifted_RV.mul_(entropy_slope_R[:, None]).add_(constant_R[:, None])
        gradient_RV.mul_(weight_RV.div_(-block.sum_R[:, None]))
    else:
        gradient_RV.mul_(-(logp_slope_R / block.sum_R)[:, None])
    gradient_RV.scatter_add_(1, targets_R[:, None], logp_slope_R[:, None])
    return gradient_RV if block.slope_RV is None else gradient_RV.mul_(block.slope_RV)
