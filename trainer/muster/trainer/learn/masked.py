"""Attention of a packed row with masks, where the cascade has no kernel.

These are sliding windows that are shorter than the sequences, capped scores, and devices without a
kernel for the number format. A completion's queries are taken some at a time, each time with just
the keys that they see, and the backward pass computes them again. So the memory grows with the
length of the row, not with its square.

Axes: S positions of the row, H heads, E head size, Q queries and K keys of one call.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from muster.trainer.learn.cascade import Layout, Triple

QUERIES = 1024
"""Most queries of a call."""
CAPPED_PAIRS = QUERIES**2
"""Most pairs of a query and a key of a call whose scores are capped: it has all of them at once."""


class Rule(NamedTuple):
    """How a query attends to the keys up to its own place."""

    scale: float
    """Factor of the scores."""
    window: int | None
    """Number of keys that it sees, its own included; None for all."""
    softcap: float | None
    """Bound of the scores; None or 0 for none."""


def masked(query: Tensor, key: Tensor, value: Tensor, layout: Layout, rule: Rule) -> Tensor:
    """Return the attention output [1, S, H, E] at the places of the queries; keys and values
    [1, H, S, E] are of the whole row, and may have fewer heads.
    """
    out: Tensor = _Masked.apply(query, key, value, layout, rule)  # type: ignore[no-untyped-call]  # torch's stub
    return out


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, rule: Rule
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.layout, ctx.rule = layout, rule
        out = torch.zeros_like(query.transpose(1, 2))
        for asking, asked in _calls(layout, rule):
            found = _attend(*_pieces((query, key, value), asking, asked), rule)
            out[:, asking] = found.transpose(1, 2)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        query, key, value = (torch.zeros_like(t) for t in saved)
        for asking, asked in _calls(ctx.layout, ctx.rule):
            pieces, gradient = _pieces(saved, asking, asked), gradients[0][:, asking]
            made = _attend_backward(pieces, ctx.rule, gradient.transpose(1, 2))
            query[:, :, asking] = made[0]
            sizes = [_size(part) for part in asked]
            for whole, parts in ((key, made[1]), (value, made[2])):
                for place, part in zip(asked, torch.split(parts, sizes, dim=2), strict=True):
                    whole[:, :, place] += part
        return query, key, value, None, None


def _calls(layout: Layout, rule: Rule) -> Iterator[tuple[slice, list[slice]]]:
    """Yield the places of some queries, and in order those of the keys that any of them sees."""
    for own, parts in layout.seen():
        earlier = sum(map(_size, parts)) - _size(own)
        start = own.start
        while start < own.stop:
            first = earlier + start - own.start
            begin = 0 if rule.window is None else max(0, first + 1 - rule.window)
            most = QUERIES
            if rule.softcap:
                most = min(most, max(1, CAPPED_PAIRS // (first - begin + QUERIES)))
            stop = min(start + most, own.stop)
            yield slice(start, stop), list(_cut(parts, begin, first + stop - start))
            start = stop


def _cut(parts: Sequence[slice], begin: int, end: int) -> Iterator[slice]:
    """Yield the places from the `begin`-th up to the `end`-th of some parts."""
    for part in parts:
        first, last = max(begin, 0), min(end, _size(part))
        if first < last:
            yield slice(part.start + first, part.start + last)
        begin, end = begin - _size(part), end - _size(part)


def _pieces(row: Triple, asking: slice, asked: Sequence[slice]) -> Triple:
    query, *others = row
    key, value = (torch.cat([t[:, :, place] for place in asked], dim=2) for t in others)
    return query[:, :, asking], key, value


def _attend(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """Return [1, H, Q, E]; the last query is at the last key."""
    copies = query.shape[1] // key.shape[1]
    if copies > 1:
        key, value = (t.repeat_interleave(copies, dim=1) for t in (key, value))
    seen = _seen(query.shape[2], key.shape[2], rule.window, query.device)
    if rule.softcap:
        return _capped(query, key, value, seen, rule.scale, rule.softcap)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=rule.scale
    )


def _attend_backward(pieces: Triple, rule: Rule, gradient: Tensor) -> Triple:
    """Return the gradients of query, key and value, given that of `_attend`."""
    with torch.enable_grad():
        query, key, value = (t.detach().requires_grad_() for t in pieces)
        out = _attend(query, key, value, rule)
    found = torch.autograd.grad(out, (query, key, value), gradient)
    return found[0], found[1], found[2]


def _seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return [Q, K], true where a query sees a key."""
    place_K = torch.arange(keys, device=device)
    own_Q1 = place_K[keys - queries :, None]
    return (place_K <= own_Q1) & (place_K > own_Q1 - (window or keys))


def _capped(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, softcap: float
) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(2, 3)
    scores = softcap * torch.tanh(scores * (scale / softcap))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return weights.to(value.dtype) @ value


def _size(range_: slice) -> int:
    return int(range_.stop - range_.start)
