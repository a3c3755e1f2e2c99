"""A packed row: where its sequences lie, and attention from kernels that know no masks.

The row holds all prompts, then the completions of each prompt (`Layout`). Attention is causal, cut
and merged (`cascade`):

 1. Causal attention within every prompt and every completion.
 2. Attention of all completions of a prompt to that prompt, in one piece.
 3. Both results of a completion token merged by their log-sum-exp.

The backward pass hands the merged result and log-sum-exp to the kernels' own backward passes. They
form probabilities as exp(score - log-sum-exp) and subtract rowsum(gradient * result), so with the
merged values each part's gradient is exactly its share.

On a CPU one flash call per sequence, in float32 or wider (its bfloat16 backward pass is five times
slower). On a GPU in half precision two varlen flash calls.

Axes: S positions of the row, H heads, E head size; tensors here are [1, H, S, E] unless said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

Triple = tuple[Tensor, Tensor, Tensor]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Layout:
    """Lengths of the sequences in a packed row; they say which positions belong together."""

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


def has_kernel(query: Tensor) -> bool:
    """Tell whether `cascade` can run on this device in this type."""
    return query.device.type == "cpu" or (query.is_cuda and query.dtype in _HALF)


def cascade(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
    """Return the attention output [1, S, H, E]; query, key and value have as many heads."""
    out: Tensor = _Cascade.apply(query, key, value, layout, scale)  # type: ignore[no-untyped-call]  # torch's stub
    return out


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float
    ) -> Tensor:
        kernel = _Varlen(layout, scale) if query.is_cuda else _PerSequence(layout, scale)
        out, lse = kernel.forward(*(kernel.prepare(t) for t in (query, key, value)))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernel = kernel
        return out.transpose(1, 2).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        prepare = ctx.kernel.prepare
        gradient = prepare(gradients[0].transpose(1, 2))
        inputs = prepare(query), prepare(key), prepare(value)
        found = ctx.kernel.backward(gradient, inputs, out, lse)
        return *(g.to(query.dtype) for g in found), None, None


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge a part over other keys into `out` and `lse` in place; lse is [1, H, S]."""
    share = torch.sigmoid(other_lse - lse)[..., None].to(out.dtype)
    out += share * (other - out)
    lse.copy_(torch.logaddexp(lse, other_lse))


class _PerSequence:
    """Flash attention on a CPU, sequence by sequence."""

    def __init__(self, layout: Layout, scale: float) -> None:
        self._layout, self._scale = layout, scale

    def prepare(self, tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype in _HALF else tensor

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        lengths = [s.stop - s.start for s in self._layout.segments()]
        pieces = zip(*(torch.split(t, lengths, dim=2) for t in (query, key, value)), strict=True)
        parts = [self._part(*piece, is_causal=True) for piece in pieces]
        out, lse = (
            torch.cat([part[i].transpose(1, 2) for part in parts], dim=1).transpose(1, 2)
            for i in range(2)
        )
        for prompt, own in self._layout.groups():
            if own.start < own.stop:
                asked = key[:, :, prompt], value[:, :, prompt]
                part = self._part(query[:, :, own], *asked, is_causal=False)
                _merge(out[:, :, own], lse[:, :, own], *part)
        return out, lse

    def backward(self, gradient: Tensor, inputs: Triple, out: Tensor, lse: Tensor) -> Triple:
        lengths = [s.stop - s.start for s in self._layout.segments()]
        saved = (gradient, *inputs, out, lse)
        pieces = zip(*(torch.split(t, lengths, dim=2) for t in saved), strict=True)
        parts = [self._part_backward(piece, is_causal=True) for piece in pieces]
        found = [
            torch.cat([part[i].transpose(1, 2) for part in parts], dim=1).transpose(1, 2)
            for i in range(3)
        ]
        for prompt, own in self._layout.groups():
            if own.start < own.stop:
                places = (own, own, prompt, prompt, own, own)
                piece = [t[:, :, s] for t, s in zip(saved, places, strict=True)]
                added = self._part_backward(piece, is_causal=False)
                for whole, part, s in zip(found, added, (own, prompt, prompt), strict=True):
                    whole[:, :, s] += part
        return found[0], found[1], found[2]

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


class _Varlen:
    """Flash attention on a GPU: all sequences in one call, all groups in another."""

    def __init__(self, layout: Layout, scale: float) -> None:
        self._layout, self._scale = layout, scale
        own = [s.stop - s.start for s in layout.segments()]
        self._prompts = sum(layout.prompts)
        self._segments = _bounds(own)
        groups = [sum(group) for group in layout.completions]
        self._groups, self._asked = _bounds(groups), _bounds(list(layout.prompts))
        self._has_completions = any(groups)

    def prepare(self, tensor: Tensor) -> Tensor:
        return tensor

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (_flat(t) for t in (query, key, value))
        out, lse = self._call(q, k, v, self._segments, self._segments, is_causal=True)
        if self._has_completions:
            p = self._prompts
            part, part_lse = self._call(
                q[p:], k[:p], v[:p], self._groups, self._asked, is_causal=False
            )
            _merge(out[p:].transpose(0, 1), lse[:, p:], part.transpose(0, 1), part_lse)
        return _unflat(out), lse

    def backward(self, gradient: Tensor, inputs: Triple, out: Tensor, lse: Tensor) -> Triple:
        g, q, k, v, o = (_flat(t) for t in (gradient, *inputs, out))
        found = self._call_backward(
            (g, q, k, v, o, lse), self._segments, self._segments, is_causal=True
        )
        if self._has_completions:
            p = self._prompts
            saved = (g[p:], q[p:], k[:p], v[:p], o[p:], lse[:, p:].contiguous())
            parts = self._call_backward(saved, self._groups, self._asked, is_causal=False)
            for whole, part in zip((found[0][p:], found[1][:p], found[2][:p]), parts, strict=True):
                whole += part
        return _unflat(found[0]), _unflat(found[1]), _unflat(found[2])

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, asking: list[int], asked: list[int], is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        result = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            *_on(q.device, asking, asked),
            0.0,
            is_causal,
            False,
            scale=self._scale,
        )
        return result[0], result[1]

    def _call_backward(
        self, saved: tuple[Tensor, ...], asking: list[int], asked: list[int], is_causal: bool
    ) -> Triple:
        random_state = torch.zeros(2, dtype=torch.uint64, device=saved[0].device)
        found: Triple = torch.ops.aten._flash_attention_backward(
            *saved,
            *_on(saved[0].device, asking, asked),
            0.0,
            is_causal,
            random_state,
            torch.empty(0, device=saved[0].device),
            scale=self._scale,
        )
        return found


def _bounds(lengths: list[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def _on(device: torch.device, asking: list[int], asked: list[int]) -> tuple[Any, ...]:
    """Return both bounds as tensors and the longest pieces, as varlen kernels take them."""
    bounds = (torch.tensor(b, dtype=torch.int32, device=device) for b in (asking, asked))
    longest = (max(b[i + 1] - b[i] for i in range(len(b) - 1)) for b in (asking, asked))
    return *bounds, *longest


def _flat(tensor: Tensor) -> Tensor:
    return tensor[0].transpose(0, 1).contiguous()


def _unflat(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1)[None]
