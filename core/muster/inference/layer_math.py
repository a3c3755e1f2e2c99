"""The small operations of a layer between its matrix products, by torch or by fused kernels.

Each is a few operations of torch, which read and write whole activations several times; on CUDA
with Triton each is one kernel (`fused_layers`). Both round like transformers: to the model's format
after every step. Axes: N tokens, H hidden units, A heads, E head size, I inner units.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

logger = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
"""Formats that fused kernels compute in; torch has fused norms of float32 itself."""


class Norm(NamedTuple):
    """A root-mean-square norm."""

    weight: torch.Tensor
    """[H], or [A, E] for heads that have different weights."""
    eps: float
    is_offset: bool
    """Whether 1 is added to the weights, as in Gemma, whose norm rounds only at the end."""


class LayerMath:
    """The operations by torch, on any device; all but `turn` leave their arguments as they are."""

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Return the norm of the last axis of `x` [N, H]."""
        weight, eps, is_offset = norm
        if x.dtype == torch.float32 and weight.dim() == 1 and not is_offset:
            return F.rms_norm(x, weight.shape, weight, eps)
        normal = F.rms_norm(x.float(), x.shape[-1:], None, eps)
        if is_offset:
            return (normal * (1.0 + weight.float())).to(x.dtype)
        return weight * normal.to(x.dtype)

    def add_norm(
        self, x: torch.Tensor, added: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of two tensors [N, H], and its norm."""
        x = x + added
        return x, self.norm(x, norm)

    def turn(
        self,
        heads_NAE: torch.Tensor,
        norm: Norm | None,
        cos_N1E: torch.Tensor,
        sin_N1E: torch.Tensor,
    ) -> None:
        """Normalise heads if `norm` is given, and rotate them, in place. The first halves of the
        sines are negated; rows of `heads_NAE` are contiguous.
        """
        heads = heads_NAE if norm is None else self.norm(heads_NAE, norm)
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        torch.add(heads * cos_N1E, swapped * sin_N1E, out=heads_NAE)

    def gated(
        self, activation: Callable[[torch.Tensor], Any], gate: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        """Return `activation(gate) * up`, both [N, I]."""
        made: torch.Tensor = activation(gate) * up
        return made


@cache
def math_on(device: torch.device, dtype: torch.dtype) -> LayerMath:
    """Return the fused operations where they run and agree with torch's, else torch's."""
    plain = LayerMath()
    if device.type != "cuda" or dtype not in HALF:
        return plain
    try:
        from muster.inference.fused_layers import FusedMath

        fused = FusedMath()
        return fused if is_same(fused, plain, device, dtype) else plain
    except Exception as failure:  # A kernel's compiler may raise anything; torch works without.
        logger.warning("layers are computed without fused kernels: %s", failure)
        return plain


def is_same(ours: LayerMath, plain: LayerMath, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether operations round like others: nearly everywhere to the same number, and
    nowhere more than two steps of the format apart, at the size of what was added up.
    """
    return all(
        _is_close(one, other)
        for one, other in zip(
            _tried(ours, device, dtype), _tried(plain, device, dtype), strict=True
        )
    )


def _tried(math: LayerMath, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return results for a few tokens: ordinary widths, and ones that are no powers of two."""
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    found = []
    for tokens, width, heads, size in ((5, 256, 4, 64), (3, 200, 3, 40)):
        x, added = some(tokens, width), some(tokens, width)
        for is_offset in (False, True):
            norm = Norm(some(width), 1e-6, is_offset)
            found += [math.norm(x, norm), *math.add_norm(x, added, norm)]
            for own in (None, Norm(some(heads, size), 1e-6, is_offset)):
                turned = some(tokens, heads + 1, size)
                math.turn(turned[:, :heads], own, some(tokens, 1, size), some(tokens, 1, size))
                found.append(turned)
        found.append(math.gated(F.silu, x, added))
    return found


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    # A rotation subtracts: a small result has the rounding of the large numbers behind it.
    size = other.float().abs()
    step = 2 * torch.finfo(other.dtype).eps * size.clamp(min=float(size.mean()))
    apart = (one.float() - other.float()).abs()
    return bool((apart <= step).all()) and bool((apart > 0).float().mean() < 0.02)
