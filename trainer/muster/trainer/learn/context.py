"""Context parallelism: ranks that share rows, for rows beyond one rank's memory.

Every rank of a group has the same micro-batches. It computes a part of each row's positions:

 1. The row is filled up and cut into 2 N equal pieces for N ranks. Rank r has the pieces r and 2N -
    r - 1, so that all ranks compute about as many pairs of a query and a key.
 2. Most layers compute each position alone and need no other rank. Only in attention do ranks
    exchange tensors: every rank gathers the row's keys and values, and in the backward pass their
    gradients are summed on the rank that has the position (`cascade`).
 3. A token's log-probability is computed on the rank with the position that predicts it. Then all
    ranks get all log-probabilities of the micro-batch, which losses with a ratio per sample need.

Axes: S positions of the row, L of this rank's part; N completion tokens of the micro-batch, M of
this rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from muster.trainer.learn.cascade import Layout, Pair
from muster.trainer.learn.logprob import Objective, Rows
from muster.trainer.learn.packing import MicroBatch, TrainingSample, Work
from muster.trainer.learn.sharded import ShardedPasses


class RowRanks(Protocol):
    """Ranks that share rows, as `parallel.ContextGroup` is."""

    size: int
    place: int

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return each rank's tensor, in order of place."""

    def sum_of(self, parts: list[Tensor]) -> Tensor:
        """Return the sum of all ranks' parts for this rank."""

    def add(self, own: Tensor) -> None:
        """Add all ranks' tensors up, in place."""


@dataclass(frozen=True, slots=True)
class LayoutPart(Layout):
    """A packed row; this process has the queries of two of its pieces.

    Positions that fill the row up are one more completion of its last prompt: nothing attends to
    them.
    """

    group: RowRanks
    """The ranks that have its pieces."""
    filling: int
    """Positions that fill the row up."""

    @classmethod
    def of(cls, layout: Layout, group: RowRanks) -> LayoutPart:
        """Return this rank's part of a row."""
        filling = -layout.width % (2 * group.size)
        *others, last = layout.completions
        return cls(layout.prompts, (*others, (*last, filling)), group, filling)

    def places(self, rank: int | None = None) -> tuple[slice, slice]:
        """Return the places of a rank's two pieces in the row; without `rank`, of this rank's."""
        count, place = 2 * self.group.size, self.group.place if rank is None else rank
        piece = self.width // count
        first, last = place * piece, (count - 1 - place) * piece
        return slice(first, first + piece), slice(last, last + piece)

    def positions(self) -> list[int]:
        """As `Layout.positions`, for this rank's places; positions that fill the row up get 0."""
        ids = Layout.positions(self)[: self.width - self.filling] + [0] * self.filling
        return [i for place in self.places() for i in ids[place]]

    def runs(self) -> list[int]:
        """As `Layout.runs`: a sequence that lies in several pieces is cut."""
        return [_size(own) for segment in self.segments() for own, _ in self._within(segment)]

    def rounds(self) -> list[list[Pair]]:
        """As `Layout.rounds`, and a round for each run that continues from an earlier piece."""
        earlier = [
            [Pair(own, slice(segment.start, place.start))]
            for segment in self.segments()
            for own, place in self._within(segment)
            if segment.start < place.start
        ]
        prompts: list[Pair] = []
        end = self._count(slice(0, sum(self.prompts)))
        for prompt, completions in self.groups():
            start, end = end, end + self._count(completions)
            prompts.append(Pair(slice(start, end), prompt))
        return [prompts, *earlier]

    def seen(self) -> Iterator[tuple[slice, list[slice]]]:
        """As `Layout.seen`."""
        for queries, parts in Layout.seen(self):
            for own, place in self._within(queries):
                yield own, [*parts[:-1], slice(parts[-1].start, place.stop)]

    def gather(self, own: Tensor) -> Tensor:
        """As `Layout.gather`; on all ranks of the group."""
        halves = [part.chunk(2, dim=2) for part in self.group.gather(own)]
        firsts, lasts = zip(*halves, strict=True)
        return torch.cat([*firsts, *reversed(lasts)], dim=2)

    def room(self, own: Tensor) -> Tensor:
        """As `Layout.room`: zeros for the whole row."""
        return own.new_zeros(*own.shape[:2], self.width, own.shape[3])

    def sum_of(self, gradient: Tensor) -> Tensor:
        """As `Layout.sum_of`, summed up in float32 or wider; on all ranks of the group."""
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        parts = [
            torch.cat([wide[:, :, place] for place in self.places(rank)], dim=2)
            for rank in range(self.group.size)
        ]
        return self.group.sum_of(parts).to(gradient.dtype)

    def _within(self, range_: slice) -> Iterator[tuple[slice, slice]]:
        """Yield this rank's parts of a range of the row: the place among its queries, and in the
        row.
        """
        before = 0
        for place in self.places():
            start, end = max(range_.start, place.start), min(range_.stop, place.stop)
            if start < end:
                shift = before - place.start
                yield slice(start + shift, end + shift), slice(start, end)
            before += _size(place)

    def _count(self, range_: slice) -> int:
        """Return how many positions of a range of the row this rank has."""
        return sum(_size(own) for own, _ in self._within(range_))


@dataclass(frozen=True, slots=True)
class BatchPart:
    """One rank's part of a micro-batch."""

    batch: MicroBatch
    """The rank's positions, and the completion tokens that they predict."""
    tokens_M: Tensor
    """Numbers of these tokens among the micro-batch's completion tokens."""
    tokens: int
    """Number of completion tokens of the whole micro-batch."""
    group: RowRanks
    """The ranks that compute the other parts."""

    @classmethod
    def of(cls, batch: MicroBatch, group: RowRanks) -> BatchPart:
        """Return this rank's part of a packed micro-batch."""
        if batch.layout is None:
            raise ValueError("padded rows have no parts")
        layout = LayoutPart.of(batch.layout, group)
        row_S = functional.pad(batch.tokens_BT[0], (0, layout.filling))
        places_L = torch.cat([torch.arange(p.start, p.stop) for p in layout.places()])
        own_S = torch.full_like(row_S, -1)
        own_S[places_L] = torch.arange(len(places_L))
        predicting_N = own_S[batch.predicting_N]
        (tokens_M,) = torch.nonzero(predicting_N >= 0, as_tuple=True)
        part = replace(
            batch,
            tokens_BT=row_S[None, places_L],
            layout=layout,
            predicting_N=predicting_N[tokens_M],
            targets_N=batch.targets_N[tokens_M],
            row_N=batch.row_N[tokens_M],
            work=_share(batch.work, group),
        )
        return cls(part, tokens_M, len(predicting_N), group)

    def objective(self, whole: Objective) -> Objective:
        """Return an objective over the whole micro-batch as one over this part."""

        def of_tokens(logp_R: Tensor, entropy_R: Tensor, rows: Rows) -> Tensor:
            return whole(logp_R, entropy_R, self.tokens_M.to(logp_R.device)[rows])

        return of_tokens

    def whole(self, values_M: Tensor) -> Tensor:
        """Return the micro-batch's values [N], given this rank's [M]; on all ranks of the group.

        Differentiable, if all ranks differentiate the same function of them.
        """
        values_N: Tensor = _Whole.apply(values_M, self)  # type: ignore[no-untyped-call]  # torch's stub
        return values_N


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_M: Tensor, part: BatchPart) -> Tensor:
        ctx.tokens_M = part.tokens_M.to(values_M.device)
        values_N = values_M.new_zeros(part.tokens)
        values_N[ctx.tokens_M] = values_M
        # Every value is added to zeros only, so the sum is exact.
        part.group.add(values_N)
        return values_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.tokens_M], None


class ContextPasses(ShardedPasses):
    """Forward passes of sharded models over rows that a group of ranks shares."""

    def objective(self, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
        """As `Passes.objective`: the sum is over this rank's tokens, the values are all."""
        part = self._part(batch)
        total, logp_M, entropy_M = super().objective(part.batch, part.objective(objective))
        return total, part.whole(logp_M), part.whole(entropy_M)

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """As `Passes.logprobs`, of all tokens."""
        part = self._part(batch)
        logp_M, entropy_M = super().logprobs(part.batch)
        return part.whole(logp_M), part.whole(entropy_M)

    def surprise(self, samples: Sequence[TrainingSample]) -> list[float]:
        """As `Passes.surprise`; `read_policies` reads the versions again."""
        found = super().surprise(samples)
        # Samples are known by identity, and ranks other than 0 get copies with each command.
        self._seen.clear()
        return found

    def _part(self, batch: MicroBatch) -> BatchPart:
        assert self._team.context_group is not None
        return BatchPart.of(batch, self._team.context_group)


def _size(range_: slice) -> int:
    return int(range_.stop - range_.start)


def _share(work: Work, group: RowRanks) -> Work:
    """Return this rank's equal share of the work; the shares of all ranks add up to it."""
    shares = (n * (group.place + 1) // group.size - n * group.place // group.size for n in work)
    return Work(*shares)
