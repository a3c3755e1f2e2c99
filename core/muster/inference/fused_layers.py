"""The operations of `layer_math` as one kernel each, for CUDA with Triton.

Imported by `muster.inference.layer_math` alone, which compares them with torch before it uses them.
A program computes one token: its row, all its heads, or a piece of its inner units. Numbers are
computed in float32 and rounded to the model's format wherever torch's operations would store them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from muster.inference.layer_math import LayerMath, Norm

PIECE = 1024
"""Inner units of one program."""


@triton.jit  # type: ignore[untyped-decorator]
def _weighted(normal, weight, is_offset: tl.constexpr, like: tl.constexpr):  # type: ignore[no-untyped-def]
    wide = weight.to(tl.float32)
    if is_offset:
        return (normal * (1.0 + wide)).to(like)
    return (wide * normal.to(like).to(tl.float32)).to(like)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_row(  # type: ignore[no-untyped-def]
    x,
    added,
    weights,
    sums,
    out,
    stride,
    width,
    eps,
    has_added: tl.constexpr,
    is_offset: tl.constexpr,
    size: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, size)
    own = places < width
    value = tl.load(x + row * stride + places, mask=own, other=0.0)
    like = value.dtype
    if has_added:
        other = tl.load(added + row * width + places, mask=own, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(like)
        tl.store(sums + row * width + places, value, mask=own)
    wide = value.to(tl.float32)
    normal = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps))
    weight = tl.load(weights + places, mask=own, other=0.0)
    tl.store(out + row * width + places, _weighted(normal, weight, is_offset, like), mask=own)


@triton.jit
def _rotated(one, other, cos, sin):  # type: ignore[no-untyped-def]
    # Each product and the sum are stored in the model's format.
    like = one.dtype
    left = (one.to(tl.float32) * cos.to(tl.float32)).to(like).to(tl.float32)
    right = (other.to(tl.float32) * sin.to(tl.float32)).to(like).to(tl.float32)
    return (left + right).to(like)


@triton.jit  # type: ignore[untyped-decorator]
def _turn_row(  # type: ignore[no-untyped-def]
    x,
    weights,
    cosines,
    sines,
    stride,
    turn_stride,
    heads,
    half,
    eps,
    has_norm: tl.constexpr,
    is_offset: tl.constexpr,
    head_room: tl.constexpr,
    half_room: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, head_room)[:, None], tl.arange(0, half_room)[None, :]
    own = (head < heads) & (place < half)
    at = head * (2 * half) + place
    first = tl.load(x + row * stride + at, mask=own, other=0.0)
    second = tl.load(x + row * stride + at + half, mask=own, other=0.0)
    like = first.dtype
    if has_norm:
        left, right = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(left * left + right * right, axis=1)[:, None]
        scale = 1.0 / tl.sqrt(squares / (2 * half) + eps)
        weight = tl.load(weights + at, mask=own, other=0.0)
        first = _weighted(left * scale, weight, is_offset, like)
        weight = tl.load(weights + at + half, mask=own, other=0.0)
        second = _weighted(right * scale, weight, is_offset, like)
    turned, there = row * turn_stride + place, place < half
    cos = tl.load(cosines + turned, mask=there, other=0.0)
    sin = tl.load(sines + turned, mask=there, other=0.0)
    tl.store(x + row * stride + at, _rotated(first, second, cos, sin), mask=own)
    cos = tl.load(cosines + turned + half, mask=there, other=0.0)
    sin = tl.load(sines + turned + half, mask=there, other=0.0)
    tl.store(x + row * stride + at + half, _rotated(second, first, cos, sin), mask=own)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_piece(gates, ups, out, width, size: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * size + tl.arange(0, size)
    own = places < width
    gate = tl.load(gates + row * width + places, mask=own, other=0.0)
    up = tl.load(ups + row * width + places, mask=own, other=0.0)
    like = gate.dtype
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(like).to(tl.float32)
    tl.store(out + row * width + places, (opened * up.to(tl.float32)).to(like), mask=own)


class FusedMath(LayerMath):
    """The operations by kernels; what they do not cover, by torch."""

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """As `LayerMath.norm`."""
        return self._norm(x, None, norm)[1]

    def add_norm(
        self, x: torch.Tensor, added: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `LayerMath.add_norm`."""
        return self._norm(x, added.contiguous(), norm)

    def _norm(
        self, x: torch.Tensor, added: torch.Tensor | None, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, width = x.shape
        out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
        sums = x if added is None else torch.empty_like(out)
        if tokens:
            _norm_row[(tokens,)](
                x, x if added is None else added, norm.weight, sums, out, x.stride(0), width,
                norm.eps, added is not None, norm.is_offset, triton.next_power_of_2(width),
            )  # fmt: skip
        return sums, out

    def turn(
        self,
        heads_NAE: torch.Tensor,
        norm: Norm | None,
        cos_N1E: torch.Tensor,
        sin_N1E: torch.Tensor,
    ) -> None:
        """As `LayerMath.turn`."""
        tokens, heads, size = heads_NAE.shape
        if not tokens:
            return
        _turn_row[(tokens,)](
            heads_NAE, heads_NAE if norm is None else norm.weight, cos_N1E, sin_N1E,
            heads_NAE.stride(0), cos_N1E.stride(0), heads, size // 2,
            0.0 if norm is None else norm.eps, norm is not None,
            norm is not None and norm.is_offset,
            triton.next_power_of_2(heads), triton.next_power_of_2(size // 2),
            enable_fp_fusion=False,  # It would skip the rounding of a product that is added.
        )  # fmt: skip

    def gated(
        self, activation: Callable[[torch.Tensor], Any], gate: torch.Tensor, up: torch.Tensor
    ) -> torch.Tensor:
        """As `LayerMath.gated`."""
        is_silu = activation is F.silu or type(activation).__name__ in ("SiLU", "SiLUActivation")
        if not is_silu or not len(gate):
            return super().gated(activation, gate, up)
        tokens, width = gate.shape
        out = torch.empty_like(gate)
        _gate_piece[(tokens, triton.cdiv(width, PIECE))](
            gate.contiguous(), up.contiguous(), out, width, PIECE
        )
        return out
