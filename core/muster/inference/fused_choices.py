"""The best token of every row in two kernels: hash, noise, score, choice, for CUDA with Triton.

Imported by `muster.inference.sampler` alone, and only if there is a CUDA device. The arithmetic is
that of docs/protocol.md section 5, as torch does it on CUDA: integers, and the same library's
logarithm in float64. Two such logarithms per token would take most of the time. So the first kernel
computes float32 scores that are off by less than _SLACK, and the second computes exactly the few
tiles that can hold the best token. No [R, V] tensor is written. The sampler compares both kernels
with torch before it uses them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024
"""Tokens that one program looks at."""

_SLACK = tl.constexpr(1e-2)
"""How far below a row's best approximate score the exact best may be; the approximate noise is off
by less than a hundredth of it (`_near_noise`)."""
_ROUNDING = tl.constexpr(2.0**-20)
"""The same for large scores, relative to the score: sixteen roundings of float32."""
_SERIES = tl.constexpr(2.0**-6)
"""Below this a series is more exact than the logarithm."""


@triton.jit
def _mix(words):  # type: ignore[no-untyped-def]
    words = words ^ (words >> 16)
    words = words * 0x7FEB352D
    words = words ^ (words >> 15)
    words = words * 0x846CA68B
    return words ^ (words >> 16)


@triton.jit
def _words(keys, row, rows, places):  # type: ignore[no-untyped-def]
    first = tl.load(keys + row).to(tl.uint32, bitcast=True)
    second = tl.load(keys + rows + row).to(tl.uint32, bitcast=True)
    return _mix(_mix(places.to(tl.uint32) ^ first) + second)


@triton.jit
def _log2(x):  # type: ignore[no-untyped-def]
    # One instruction, with an error of 2^-22: absolute between 1/2 and 2, else relative (PTX ISA,
    # lg2.approx). The library's logarithm takes some twenty.
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _near_noise(words):  # type: ignore[no-untyped-def]
    # -log(-log(1 - rest)). If the rest is small, 1 - rest loses most of its digits, so a series is
    # used, with a relative error of 1e-6. Elsewhere the inner logarithm is above 1/64, so its error
    # becomes a relative error of at most 64 times as much, 2e-5, which is the absolute error of the
    # outer logarithm.
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = rest * (1.0 + rest * (0.5 + rest * 0.33333334))
    inner = tl.where(rest < _SERIES, series, _log2(uniform) * -0.6931471805599453)
    return _log2(inner) * -0.6931471805599453


@triton.jit
def _scaled(logits, stride, temperatures, row, places, vocab):  # type: ignore[no-untyped-def]
    own = tl.load(logits + row * stride + places, mask=places < vocab, other=float("-inf"))
    own = own.to(tl.float32)
    return tl.div_rn(own, tl.load(temperatures + row) + tl.zeros_like(own))


@triton.jit  # type: ignore[untyped-decorator]
def _near_best_of_tile(  # type: ignore[no-untyped-def]
    logits, stride, keys, temperatures, near, rows, vocab, size: tl.constexpr
):
    row, tile = tl.program_id(0), tl.program_id(1)
    places = tile * size + tl.arange(0, size)
    own = tl.load(logits + row * stride + places, mask=places < vocab, other=float("-inf"))
    score = own.to(tl.float32) * (1.0 / tl.load(temperatures + row))
    score += _near_noise(_words(keys, row, rows, places))
    # A tile with NaN counts as having the largest score of all, so the second kernel computes it.
    best = tl.max(tl.where(score != score, float("inf"), score), axis=0)
    tl.store(near + row * tl.num_programs(1) + tile, best)


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_row(  # type: ignore[no-untyped-def]
    logits,
    stride,
    keys,
    temperatures,
    near,
    ids,
    scores,
    rows,
    vocab,
    tiles,
    size: tl.constexpr,
    room: tl.constexpr,
):
    row, numbers = tl.program_id(0), tl.arange(0, room)
    near_best = tl.load(near + row * tiles + numbers, mask=numbers < tiles, other=float("-inf"))
    top = tl.max(near_best, axis=0)
    floor = top - (_SLACK + _ROUNDING * tl.abs(top))
    is_open = (numbers < tiles) & ((near_best >= floor) | (near_best == top))
    found = tl.full((), float("-inf"), tl.float32)
    place = tl.full((), 0, tl.int32) + vocab
    is_none = tl.full((), 0, tl.int32)
    for _ in range(tl.sum(is_open.to(tl.int32), axis=0)):
        # In ascending order, so that the first of equal tokens wins.
        tile = tl.min(tl.where(is_open, numbers, room), axis=0)
        is_open = is_open & (numbers != tile)
        places = tile * size + tl.arange(0, size)
        uniform = (_words(keys, row, rows, places).to(tl.float64) + 0.5) * 2.3283064365386963e-10
        noise = (-tl.log(-tl.log(uniform))).to(tl.float32)
        score = noise + _scaled(logits, stride, temperatures, row, places, vocab)
        nones = score != score
        best = tl.max(tl.where(nones, float("-inf"), score), axis=0)
        own = tl.min(tl.where(score == best, places, vocab), axis=0)
        first_none = tl.min(tl.where(nones, places, vocab), axis=0)
        is_better = (best > found) | (place == vocab)
        found = tl.where(is_better, best, found)
        place = tl.where(is_better & (is_none == 0), own, place)
        # A row with NaN yields the first token whose score is NaN, as everywhere.
        place = tl.where((first_none < vocab) & (is_none == 0), first_none, place)
        is_none = tl.where(first_none < vocab, 1, is_none)
    tl.store(ids + row, place.to(tl.int64))
    tl.store(scores + row, tl.where(is_none == 1, float("nan"), found))


def winners(
    logits_RV: torch.Tensor, keys_2R: torch.Tensor, temperature_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and scores [R] of `muster.inference.sampler.device_winners`.

    Takes logits of any float format whose rows are contiguous, int32 keys, float32 temperatures.
    """
    rows, vocab = logits_RV.shape
    tiles = triton.cdiv(vocab, TILE)
    near = torch.empty(rows, tiles, dtype=torch.float32, device=logits_RV.device)
    scores = torch.empty(rows, dtype=torch.float32, device=logits_RV.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    given = logits_RV, logits_RV.stride(0), keys_2R, temperature_R, near
    _near_best_of_tile[(rows, tiles)](*given, rows, vocab, TILE)
    room = triton.next_power_of_2(tiles)
    _best_of_row[(rows,)](*given, ids, scores, rows, vocab, tiles, TILE, room)
    return ids, scores
