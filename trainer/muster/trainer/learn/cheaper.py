"""Parts of a model that give the same values with less memory, fewer passes or fewer positions.

* RMS norms (Zhang and Sennrich 2019, arXiv 1910.07467): the gradient takes seven operations instead
  of sixteen, and the input is the only large tensor that is kept for it.
* Gated feed-forward parts, down(silu(gate(x)) * up(x)): silu(gate(x)) is not kept.
* The last block's feed-forward part: computed at the positions that predict a trained token. At the
  other positions only the keys and values of that block are needed.
* The input embedding: for every micro-batch autograd makes a gradient as large as the embedding
  (622 MB for Qwen3-0.6B in float32). All its rows are zero except those of the micro-batch's
  tokens. Here only the gradient of these rows is made and added to the weight's gradient.

On a CPU a few rows are computed at a time, so that they stay in the cache. Values equal those of
the model's own modules bit for bit: a module is replaced only if a small one of its class computes
the same.

Axes: N rows, D numbers of a row; S positions of a packed row, P of them that predict.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional

from muster.trainer.learn.logprob import gradient_of
from muster.trainer.learn.recompute import Again, blocks, feed_forward_parts

BLOCK_NUMBERS = 1 << 16
"""Numbers of a tensor that a CPU computes at a time: 256 KiB in float32."""
PREDICTING = "packed_predicting"
"""Keyword argument of a packed row's forward pass: the positions [P] that predict, in order."""
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of a gated feed-forward part's layers."""
_WIDTH = 8
"""Width of the small modules that are compared."""


def quicken(model: Any) -> None:
    """Replace the forward pass of a model's RMS norms and gated feed-forward parts, in place."""
    for module in model.modules():
        eps = _epsilon(module)
        if eps is not None and _is_norm(module, eps):
            module.forward = partial(_norm, module, eps, module.forward)
        elif _is_gated(module):
            module.forward = partial(_gated, module)


def narrow(model: Any) -> None:
    """Have the last block's feed-forward part computed at predicting positions only, in place.

    Only for models for which `attention.understands_packing` is true: their positions mix in
    attention alone. Call it after `recompute`.
    """
    for block in blocks(model)[-1:]:
        parts = [_Narrow(part.forward) for part in feed_forward_parts(block)]
        for part, narrowed in zip(feed_forward_parts(block), parts, strict=True):
            part.forward = narrowed
        # Inside the function that the backward pass runs again, so that it uses the same positions.
        if isinstance(block.forward, Again):
            block.forward.inner = partial(_noting, parts, block.forward.inner)
        else:
            block.forward = partial(_noting, parts, block.forward)


class _Narrow:
    """A forward pass that works on each position alone, at some positions; zeros elsewhere."""

    places_P: Tensor | None = None
    """The positions; None means all."""

    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self._forward = forward

    def __call__(self, hidden_1SD: Tensor) -> Tensor:
        if self.places_P is None:
            return self._forward(hidden_1SD)
        found = self._forward(hidden_1SD.index_select(1, self.places_P))
        shape = (1, hidden_1SD.shape[1], found.shape[2])
        return found.new_zeros(shape).index_copy(1, self.places_P, found)


def _noting(parts: list[_Narrow], forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    for part in parts:
        part.places_P = options.get(PREDICTING)
    return forward(*inputs, **options)


def _epsilon(module: Any) -> float | None:
    """Return what a norm adds to the mean square; None if the module is not a norm."""
    shapes = {name: value.dim() for name, value in module.named_parameters()}
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if shapes == {"weight": 1} and isinstance(found, float) else None


def _is_norm(module: Any, eps: float) -> bool:
    with unset_fake_temporarily(), torch.no_grad():
        probe = copy.copy(module)
        probe._parameters = {"weight": torch.nn.Parameter(_numbers(_WIDTH, 0.3))}
        return _computes(probe, partial(_norm, probe, eps, probe.forward))


def _is_gated(module: Any) -> bool:
    if {name for name, _ in module.named_children()} != {*PROJECTIONS, "act_fn"}:
        return False
    with unset_fake_temporarily(), torch.no_grad():
        probe = copy.copy(module)
        layers = {name: _layer(i) for i, name in enumerate(PROJECTIONS)}
        probe._modules = {**module._modules, **layers}
        return _computes(probe, partial(_gated, probe))


def _computes(probe: Any, forward: Callable[[Tensor], Tensor]) -> bool:
    """Tell whether a module computes the same as a function, bit for bit."""
    given = _numbers(4 * _WIDTH, 0.7).view(1, 4, _WIDTH)
    return torch.equal(type(probe).forward(probe, given), forward(given))


def _layer(number: int) -> torch.nn.Linear:
    made = torch.nn.Linear(_WIDTH, _WIDTH, bias=False, device="meta")
    made.weight = torch.nn.Parameter(_numbers(_WIDTH**2, 0.9 + number).view(_WIDTH, _WIDTH))
    return made


def _numbers(count: int, step: float) -> Tensor:
    """Return numbers that need no random generator."""
    return torch.sin(torch.arange(1, count + 1, dtype=torch.float32) * step) + 0.1


def _row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors [N, ...] a few rows at a time; on an accelerator, all rows at once."""
    first = tensors[0]
    rows = max(1, len(first))
    if first.device.type == "cpu":
        rows = max(1, BLOCK_NUMBERS // first.shape[-1])
    yield from zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)


def _norm(module: Any, eps: float, own: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    weight = module.weight
    if hidden.dtype != weight.dtype or hidden.dtype == torch.float64:
        return own(hidden)
    normed: Tensor = _Norm.apply(hidden, weight, eps)  # type: ignore[no-untyped-call]  # torch's stub
    return normed


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        hidden_ND = hidden.reshape(-1, len(weight_D))
        normed_ND = hidden_ND.new_empty(hidden_ND.shape)
        root_N1 = hidden_ND.new_empty(len(hidden_ND), 1, dtype=torch.float32)
        for rows, normed, root in _row_blocks(hidden_ND, normed_ND, root_N1):
            wide = rows.float()
            torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps, out=root)
            torch.mul(weight_D, (wide * root).to(rows.dtype), out=normed)
        ctx.save_for_backward(hidden_ND, weight_D, root_N1)
        return normed_ND.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """With n = x / rms(x): dw = sum of g n, and dx = (g w - n mean(g w n)) / rms(x)."""
        hidden_ND, weight_D, root_N1 = ctx.saved_tensors
        gradient_ND = gradients[0].reshape(hidden_ND.shape)
        found_ND = hidden_ND.new_empty(hidden_ND.shape)
        wide_D = weight_D.float()
        found_D = torch.zeros_like(wide_D)
        for rows, gradient, found, root in _row_blocks(hidden_ND, gradient_ND, found_ND, root_N1):
            normed, wide = rows * root, gradient.float()
            share = wide * normed
            found_D += share.sum(0)
            mean = torch.mv(share, wide_D).div_(len(wide_D)).unsqueeze(1)
            found.copy_((wide * wide_D).addcmul_(normed, mean, value=-1).mul_(root))
        due = found_D.to(weight_D.dtype) if ctx.needs_input_grad[1] else None
        return found_ND.view(gradients[0].shape), due, None


def _gated(module: Any, hidden: Tensor) -> Tensor:
    gate, up = module.gate_proj(hidden), module.up_proj(hidden)
    product: Tensor = _Gate.apply(gate, up)  # type: ignore[no-untyped-call]  # torch's stub
    down: Tensor = module.down_proj(product)
    return down


class _Gate(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        product = gate.new_empty(gate.shape)
        for made, g, u in _row_blocks(*map(_rows, (product, gate, up))):
            torch.mul(functional.silu(g), u, out=made)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        found = gate.new_empty(gate.shape), up.new_empty(up.shape)
        for to_gate, to_up, g, u, due in _row_blocks(*map(_rows, (*found, gate, up, gradients[0]))):
            torch.mul(functional.silu(g), due, out=to_up)
            to_gate.copy_(torch.ops.aten.silu_backward(due * u, g))
        return found


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def add_rows_at_once(embedding: Any) -> None:
    """Have an embedding's gradient added row by row, in place; for weights that are leaves.

    An embedding that is not trained, or that does more than read rows, stays as it is.
    """
    is_plain = type(embedding).forward is torch.nn.Embedding.forward
    if is_plain and embedding.weight.requires_grad and not embedding.scale_grad_by_freq:
        embedding.forward = partial(_read_rows, embedding)


def _read_rows(embedding: torch.nn.Embedding, tokens: Tensor) -> Tensor:
    rows: Tensor = _Rows.apply(tokens, embedding.weight, embedding)  # type: ignore[no-untyped-call]  # torch's stub
    return rows


class _Rows(torch.autograd.Function):
    """Rows of a weight. Every row that was read is added once, so the sum has one order."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, embedding: torch.nn.Embedding) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.embedding = embedding
        return functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (tokens,) = ctx.saved_tensors
        read, places = tokens.flatten().unique(return_inverse=True)
        padding = ctx.embedding.padding_idx
        added = torch.ops.aten.embedding_dense_backward(
            gradients[0].flatten(0, -2), places, len(read), -1, False
        )
        if padding is not None:
            added[read == padding] = 0.0
        gradient_of(ctx.embedding.weight).index_add_(0, read, added)
        return None, None, None
