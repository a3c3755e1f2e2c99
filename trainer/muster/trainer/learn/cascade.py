"""A packed row: where its sequences lie, and attention with kernels that take no mask.

The row holds all prompts, then the completions of each prompt (`Layout`). Attention is causal, cut
and merged (`cascade`):

 1. Causal attention within every prompt and every completion.
 2. Attention of all completions of a prompt to that prompt, in one piece.
 3. Both results of a completion token merged by their log-sum-exp.

The backward pass hands the merged result and log-sum-exp to the kernels' own backward passes. They
form probabilities as exp(score - log-sum-exp) and subtract rowsum(gradient * result), so with the
merged values each part's gradient is exactly its share.

On a CPU there is one flash call per sequence, in float32 or wider (the bfloat16 backward pass is
five times slower). On a GPU in half precision there are two varlen flash calls.

A process may hold the queries of only a part of the row (`muster.trainer.learn.context`). Its
layout then says which of them attend to what, and exchanges keys, values and their gradients.

Axes: S positions of the row, H heads, E head size; tensors here are [1, H, S, E] unless said. Keys
and values may have fewer heads, each for several heads of queries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

Triple = tuple[Tensor, Tensor, Tensor]

_HALF = (torch.float16, torch.bfloat16)


class Pair(NamedTuple):
    """Queries and keys; every one of the queries attends to every one of the keys."""

    asking: slice
    """Places of the queries among those of this process."""
    asked: slice
    """Places of the keys in the row."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Lengths of the sequences in a packed row; they say which positions belong together.

    Here the queries are those of the whole row; in `context.LayoutPart`, of a part of it.
    """

    prompts: tuple[int, ...]
    """Length of every prompt; they fill the row's beginning."""
    completions: tuple[tuple[int, ...], ...]
    """Per prompt, the number of positions of each of its completions; 0 is possible."""

    @property
    def width(self) -> int:
        """Positions of the row."""
        return sum(self.prompts) + sum(map(sum, self.completions))

    @property
    def longest(self) -> int:
        """Positions of the longest sequence, its prompt included."""
        return max(
            prompt + max(group, default=0)
            for prompt, group in zip(self.prompts, self.completions, strict=True)
        )

    def segments(self) -> Iterator[slice]:
        """Yield the places of all prompts and completions that are not empty, in order."""
        lengths = [*self.prompts, *(n for group in self.completions for n in group)]
        for end, length in zip(accumulate(lengths), lengths, strict=True):
            if length:
                yield slice(end - length, end)

    def groups(self) -> Iterator[tuple[slice, slice]]:
        """Yield per prompt its place and the place of all its completions."""
        prompt_end, end = 0, sum(self.prompts)
        for length, group in zip(self.prompts, self.completions, strict=True):
            prompt_end += length
            end += sum(group)
            yield slice(prompt_end - length, prompt_end), slice(end - sum(group), end)

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Yield per completion that is not empty the places of its prompt and of itself."""
        for (prompt, place), group in zip(self.groups(), self.completions, strict=True):
            for end, length in zip(
                accumulate(group, initial=place.start), (0, *group), strict=True
            ):
                if length:
                    yield prompt, slice(end - length, end)

    def positions(self) -> list[int]:
        """Return the position id of every place: completions go on from their prompt."""
        ids = [i for length in self.prompts for i in range(length)]
        for length, group in zip(self.prompts, self.completions, strict=True):
            ids += [length + i for n in group for i in range(n)]
        return ids

    def runs(self) -> list[int]:
        """Return the lengths of runs that cover all queries; each attends causally to itself."""
        return [s.stop - s.start for s in self.segments()]

    def rounds(self) -> list[list[Pair]]:
        """Return what queries attend to beyond their own run; the pairs of a round are adjacent."""
        return [[Pair(own, prompt) for prompt, own in self.groups()]]

    def seen(self) -> Iterator[tuple[slice, list[slice]]]:
        """Yield the places of consecutive queries, and the places in the row that the last of them
        attends to, in order.
        """
        yield from ((prompt, [prompt]) for prompt, _ in self.groups())
        yield from ((own, [prompt, own]) for prompt, own in self.sequences())

    def gather(self, own: Tensor) -> Tensor:
        """Return the whole row's keys or values; `own` are those at the places of the queries."""
        return own

    def room(self, own: Tensor) -> Tensor:
        """Return the tensor to which gradients of the row's keys or values are added; `own` has
        those found so far, at the places of the queries.
        """
        return own

    def sum_of(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the row's keys or values, summed over all processes, at the places
        of this process's queries.
        """
        return gradient


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether `cascade` can run on this device in this type."""
    return device.type == "cpu" or (device.type == "cuda" and dtype in _HALF)


def cascade(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Return the attention output [1, S, H, E] at the places of the queries."""
    out: Tensor = _Cascade.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]  # torch's stub
    return out


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
    ) -> Tensor:
        kernel = _Varlen(layout, scale) if query.is_cuda else _PerSequence(layout, scale)
        own = kernel.prepare(query), kernel.prepare(key), kernel.prepare(value)
        out, lse = kernel.forward(own, (layout.gather(own[1]), layout.gather(own[2])))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernel, ctx.layout = kernel, layout
        return out.transpose(1, 2).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        kernel, layout = ctx.kernel, ctx.layout
        own = kernel.prepare(query), kernel.prepare(key), kernel.prepare(value)
        saved = kernel.prepare(gradients[0].transpose(1, 2)), out, lse
        found = kernel.backward(own, saved)
        # Gathered again: if kept, the whole row's keys and values would take most memory of all.
        row = layout.gather(own[1]), layout.gather(own[2])
        rooms = layout.room(found[1]), layout.room(found[2])
        kernel.rounds_backward(own[0], row, saved, (found[0], *rooms))
        for gradient, room in zip(found[1:], rooms, strict=True):
            if room is not gradient:
                gradient += layout.sum_of(room)
        return *(g.to(query.dtype) for g in found), None, None


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge a part over other keys into `out` and `lse` in place; lse is [1, H, S]."""
    share = torch.sigmoid(other_lse - lse)[..., None].to(out.dtype)
    out += share * (other - out)
    lse.copy_(torch.logaddexp(lse, other_lse))


class _PerSequence:
    """Flash attention on a CPU, sequence by sequence."""

    def __init__(self, layout: Layout, scale: float) -> None:
        self._scale, self._runs = scale, layout.runs()
        self._pairs = [
            pair
            for pairs in layout.rounds()
            for pair in pairs
            if pair.asking.start < pair.asking.stop
        ]

    def prepare(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in _HALF else tensor

    def forward(self, own: Triple, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        pieces = zip(*(torch.split(t, self._runs, dim=2) for t in own), strict=True)
        parts = [self._part(*piece, is_causal=True) for piece in pieces]
        out, lse = (
            torch.cat([part[i].transpose(1, 2) for part in parts], dim=1).transpose(1, 2)
            for i in range(2)
        )
        for asking, asked in self._pairs:
            keys, values = (t[:, :, asked] for t in row)
            part = self._part(own[0][:, :, asking], keys, values, is_causal=False)
            _merge(out[:, :, asking], lse[:, :, asking], *part)
        return out, lse

    def backward(self, own: Triple, saved: Triple) -> Triple:
        gradient, *results = saved
        pieces = zip(
            *(torch.split(t, self._runs, dim=2) for t in (gradient, *own, *results)), strict=True
        )
        parts = [self._part_backward(piece, is_causal=True) for piece in pieces]
        found = [
            torch.cat([part[i].transpose(1, 2) for part in parts], dim=1).transpose(1, 2)
            for i in range(3)
        ]
        return found[0], found[1], found[2]

    def rounds_backward(
        self, query: Tensor, row: tuple[Tensor, Tensor], saved: Triple, added: Triple
    ) -> None:
        gradient, *results = saved
        tensors = (gradient, query, *row, *results)
        for asking, asked in self._pairs:
            places = (asking, asking, asked, asked, asking, asking)
            piece = [t[:, :, s] for t, s in zip(tensors, places, strict=True)]
            parts = self._part_backward(piece, is_causal=False)
            for whole, part, s in zip(added, parts, (asking, asked, asked), strict=True):
                whole[:, :, s] += part

    def _part(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        part: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=is_causal, scale=self._scale
        )
        return part

    def _part_backward(self, piece: Sequence[Tensor], *, is_causal: bool) -> Triple:
        parts: Triple = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *piece, 0.0, is_causal, scale=self._scale
        )
        return parts


class _Round(NamedTuple):
    """A round of pairs as varlen kernels take it."""

    asking: slice
    """Places of all of its queries."""
    asked: slice
    """Places of all of its keys."""
    asking_bounds: list[int]
    """Where each pair's queries begin, and the last one's end."""
    asked_bounds: list[int]
    """The same of its keys."""


class _Varlen:
    """Flash attention on a GPU: all sequences in one call, each round in another.

    The kernels get a copy of keys and values for every head of queries.
    """

    def __init__(self, layout: Layout, scale: float) -> None:
        self._scale, self._runs = scale, _bounds(layout.runs())
        rounds = [_round(pairs) for pairs in layout.rounds()]
        self._rounds = [r for r in rounds if r.asking.start < r.asking.stop]

    def prepare(self, tensor: Tensor) -> Tensor:
        return tensor

    def forward(self, own: Triple, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        heads = own[0].shape[1]
        q, k, v = (_flat(t, heads) for t in own)
        out, lse = self._call(q, k, v, [self._runs] * 2, is_causal=True)
        if self._rounds:
            k, v = (_flat(t, heads) for t in row)
        for asking, asked, *bounds in self._rounds:
            part, part_lse = self._call(q[asking], k[asked], v[asked], bounds, is_causal=False)
            _merge(out[asking].transpose(0, 1), lse[:, asking], part.transpose(0, 1), part_lse)
        return _unflat(out, heads), lse

    def backward(self, own: Triple, saved: Triple) -> Triple:
        gradient, out, lse = saved
        g, q, k, v, o = (_flat(t, own[0].shape[1]) for t in (gradient, *own, out))
        found = self._call_backward((g, q, k, v, o, lse), [self._runs] * 2, is_causal=True)
        dq, dk, dv = (_unflat(t, like.shape[1]) for t, like in zip(found, own, strict=True))
        return dq, dk, dv

    def rounds_backward(
        self, query: Tensor, row: tuple[Tensor, Tensor], saved: Triple, added: Triple
    ) -> None:
        if not self._rounds:
            return
        gradient, out, lse = saved
        g, q, k, v, o = (_flat(t, query.shape[1]) for t in (gradient, query, *row, out))
        for asking, asked, *bounds in self._rounds:
            part_lse = lse[:, asking].contiguous()
            piece = g[asking], q[asking], k[asked], v[asked], o[asking], part_lse
            parts = self._call_backward(piece, bounds, is_causal=False)
            for whole, part, s in zip(added, parts, (asking, asked, asked), strict=True):
                whole[:, :, s] += _unflat(part, whole.shape[1])

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: list[list[int]], *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        result = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            *_on(q.device, bounds),
            0.0,
            is_causal,
            False,
            scale=self._scale,
        )
        return result[0], result[1]

    def _call_backward(
        self, saved: tuple[Tensor, ...], bounds: list[list[int]], *, is_causal: bool
    ) -> Triple:
        random_state = torch.zeros(2, dtype=torch.uint64, device=saved[0].device)
        found: Triple = torch.ops.aten._flash_attention_backward(
            *saved,
            *_on(saved[0].device, bounds),
            0.0,
            is_causal,
            random_state,
            torch.empty(0, device=saved[0].device),
            scale=self._scale,
        )
        return found


def _round(pairs: Sequence[Pair]) -> _Round:
    return _Round(
        slice(pairs[0].asking.start, pairs[-1].asking.stop),
        slice(pairs[0].asked.start, pairs[-1].asked.stop),
        _bounds([pair.asking.stop - pair.asking.start for pair in pairs]),
        _bounds([pair.asked.stop - pair.asked.start for pair in pairs]),
    )


def _bounds(lengths: list[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def _on(device: torch.device, bounds: list[list[int]]) -> tuple[Any, ...]:
    """Return bounds of queries and of keys as tensors, and the longest pieces, as varlen kernels
    take them.
    """
    tensors = (torch.tensor(b, dtype=torch.int32, device=device) for b in bounds)
    longest = (max(b[i + 1] - b[i] for i in range(len(b) - 1)) for b in bounds)
    return *tensors, *longest


def _flat(tensor: Tensor, heads: int) -> Tensor:
    """Return a tensor as [S, heads, E]; a head that several query heads share is copied."""
    flat = tensor[0].transpose(0, 1)
    copies = heads // flat.shape[1]
    return (flat.repeat_interleave(copies, dim=1) if copies > 1 else flat).contiguous()


def _unflat(tensor: Tensor, heads: int) -> Tensor:
    """Return [S, H, E] as [1, heads, S, E]; the copies of one head are summed."""
    copies = tensor.shape[1] // heads
    if copies > 1:
        tensor = tensor.view(len(tensor), heads, copies, -1).sum(2)
    return tensor.transpose(0, 1)[None]
