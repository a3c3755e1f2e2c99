"""The best token of every row in one kernel: hash, noise, score and choice, for CUDA with Triton.

Imported by `muster.inference.sampler` alone, and only where there is a CUDA device. The arithmetic
is that of docs/protocol.md section 5, as torch does it there: integers, and the same library's
logarithm in float64. One launch a batch in the place of some twenty, and nothing of [R, V] is
written. The sampler compares both before it uses this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024
"""Tokens that one program looks at."""


@triton.jit
def _mix(words):  # type: ignore[no-untyped-def]
    words = words ^ (words >> 16)
    words = words * 0x7FEB352D
    words = words ^ (words >> 15)
    words = words * 0x846CA68B
    return words ^ (words >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_tile(  # type: ignore[no-untyped-def]
    logits, stride, keys, temperatures, scores, ids, rows, vocab, size: tl.constexpr
):
    row, tile = tl.program_id(0), tl.program_id(1)
    places = tile * size + tl.arange(0, size)
    first = tl.load(keys + row).to(tl.uint32, bitcast=True)
    second = tl.load(keys + rows + row).to(tl.uint32, bitcast=True)
    words = _mix(_mix(places.to(tl.uint32) ^ first) + second)
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    noise = (-tl.log(-tl.log(uniform))).to(tl.float32)
    own = tl.load(logits + row * stride + places, mask=places < vocab, other=float("-inf"))
    score = noise + tl.div_rn(
        own.to(tl.float32), tl.load(temperatures + row) + tl.zeros_like(noise)
    )
    is_none = score != score
    best = tl.max(tl.where(is_none, float("-inf"), score), axis=0)
    is_best = score == best
    if tl.max(is_none.to(tl.int32), axis=0) > 0:
        # A row with NaN has the first one, as everywhere.
        is_best = is_none
        best = float("nan")
    place = tl.min(tl.where(is_best, places, vocab), axis=0)
    tl.store(scores + row * tl.num_programs(1) + tile, best)
    tl.store(ids + row * tl.num_programs(1) + tile, place)


def winners(
    logits_RV: torch.Tensor, keys_2R: torch.Tensor, temperature_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and scores [R] of `muster.inference.sampler.device_winners`.

    Takes logits of any float format whose rows are contiguous, int32 keys, float32 temperatures.
    """
    rows, vocab = logits_RV.shape
    tiles = triton.cdiv(vocab, TILE)
    scores = torch.empty(rows, tiles, dtype=torch.float32, device=logits_RV.device)
    ids = torch.empty(rows, tiles, dtype=torch.int64, device=logits_RV.device)
    _best_of_tile[(rows, tiles)](
        logits_RV, logits_RV.stride(0), keys_2R, temperature_R, scores, ids, rows, vocab, TILE
    )
    # The first of equal tiles: it has the smaller ids.
    scores_R, tile_R = scores.max(dim=1)
    return ids.gather(1, tile_R[:, None])[:, 0], scores_R
