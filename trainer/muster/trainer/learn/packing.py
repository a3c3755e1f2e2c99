"""Division of the work: groups to ranks, samples to micro-batches, and the layout of their tokens.

* Packed: one row without padding, each distinct prompt once before all its completions; a sample
  that shares its prompt with no other is one sequence.
* Padded, for models that cannot attend to such a row: samples of similar length, a row each, padded
  on the right. A causal model's real tokens never see what comes after them, so no mask is needed.

Groups stay whole on a rank, because their prompt is computed once for all their samples.

Axes: B rows, T positions, D hidden size, N completion tokens of all samples of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from muster.protocol.rollouts import Spans, sampled_places
from muster.trainer.learn.attention import packed_hidden
from muster.trainer.learn.cascade import Layout

Group = TypeVar("Group", bound="Sequence[TrainingSample]")

ASSUMED_WIDTH = 1024
"""Hidden size for which work is estimated; a rough estimate is enough to balance ranks."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One completion to train on."""

    prompt_tokens: tuple[int, ...]
    """Not trained on."""
    completion_tokens: tuple[int, ...]
    """Trained on, EOS included, except the replies in it."""
    advantage: float = 0.0
    """Advantage of each of its tokens."""
    policy_version: int = 0
    """The policy that sampled it."""
    replies: Spans = ()
    """Ranges of the completion that an environment wrote."""

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled: those that are trained on."""
        return len(self.completion_tokens) - sum(end - start for start, end in self.replies)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_tokens) + len(self.completion_tokens)


class Work(NamedTuple):
    """Sizes of what a model computes for some samples; each distinct prompt is computed once."""

    tokens: int
    """Positions that go through the blocks."""
    pairs: int
    """Pairs of a position and one that it attends to, itself included."""
    predicted: int
    """Positions that go through the head."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model together."""

    order: tuple[int, ...]
    """Position of each sample in the list that was packed."""
    tokens_BT: Tensor
    """Input of the model; the last token of a completion predicts nothing and is left out."""
    layout: Layout | None
    """Layout of a packed row; none for padded rows."""
    predicting_N: Tensor
    """Flat positions (row * T + position) whose hidden states predict the completion tokens."""
    targets_N: Tensor
    """The completion tokens, sample after sample."""
    row_N: Tensor
    """The sample of each completion token, as an index into `order`."""
    work: Work
    """Work to compute it, without padding."""

    def hidden(self, model: Any) -> Tensor:
        """Return the final hidden states [N, D] that predict the completion tokens."""
        tokens_BT = self.tokens_BT.to(model.device)
        predicting_N = self.predicting_N.to(model.device)
        if self.layout is not None:
            # Not `unique`: its result has no known size when tensors have no content (`rehearsal`).
            asked = sorted(set(self.predicting_N.tolist()))
            places = torch.tensor(asked, dtype=torch.int64, device=model.device)
            hidden_SD = packed_hidden(model, tokens_BT[0], self.layout, places)
        else:
            hidden_SD = model.base_model(
                input_ids=tokens_BT, use_cache=False
            ).last_hidden_state.flatten(0, 1)
        return hidden_SD.index_select(0, predicting_N)


def pack(
    samples: Sequence[TrainingSample], token_budget: int, *, is_padded: bool = False
) -> list[MicroBatch]:
    """Return micro-batches that compute at most `token_budget` tokens each; a longer sample stands
    alone.

    Every sample is in exactly one of them; samples of one prompt stay together unless they exceed
    the budget. Deterministic.
    """
    if is_padded:
        return _pack_padded(samples, token_budget)
    prompts: dict[tuple[int, ...], list[int]] = {}
    for i, sample in enumerate(samples):
        prompts.setdefault(sample.prompt_tokens, []).append(i)
    parts = [p for group in prompts.values() for p in _within(samples, group, token_budget)]
    costs = [_cost(samples, part) for part in parts]
    bins: list[list[int]] = []
    room: list[int] = []
    for k in sorted(range(len(parts)), key=lambda k: -costs[k]):
        b = next((b for b, free in enumerate(room) if free >= costs[k]), len(bins))
        if b == len(bins):
            bins.append([])
            room.append(token_budget)
        bins[b].append(k)
        room[b] -= costs[k]
    return [_packed(samples, _joined(samples, [parts[k] for k in sorted(b)])) for b in bins]


def _joined(samples: Sequence[TrainingSample], parts: list[list[int]]) -> list[list[int]]:
    """Join parts of one prompt that ended up in the same micro-batch."""
    joined: dict[tuple[int, ...], list[int]] = {}
    for part in parts:
        joined.setdefault(samples[part[0]].prompt_tokens, []).extend(part)
    return list(joined.values())


def _computed(sample: TrainingSample) -> int:
    return len(sample.completion_tokens) - 1


def _cost(samples: Sequence[TrainingSample], part: list[int]) -> int:
    """Return the positions that samples of one prompt take."""
    return len(samples[part[0]].prompt_tokens) + sum(_computed(samples[i]) for i in part)


def _within(
    samples: Sequence[TrainingSample], group: list[int], token_budget: int
) -> list[list[int]]:
    """Cut the samples of one prompt into parts within the budget, or of one sample."""
    parts: list[list[int]] = []
    for i in group:
        if not parts or _cost(samples, [*parts[-1], i]) > token_budget:
            parts.append([])
        parts[-1].append(i)
    return parts


def _packed(samples: Sequence[TrainingSample], parts: list[list[int]]) -> MicroBatch:
    # A sample that shares its prompt with no other is one sequence with it.
    begins = [_begin(samples[part[0]], is_alone=len(part) == 1) for part in parts]
    layout = Layout(
        tuple(map(len, begins)),
        tuple(
            tuple(_computed(samples[i]) for i in part) if len(part) > 1 else (0,) for part in parts
        ),
    )
    tokens = [token for begin in begins for token in begin]
    predicting: list[int] = []
    for part, end in zip(parts, accumulate(map(len, begins)), strict=True):
        for i in part:
            computed = _computed(samples[i])
            if len(part) == 1:
                own = [*range(end - computed - 1, end)]
            else:
                own = [end - 1, *range(len(tokens), len(tokens) + computed)]
                tokens += samples[i].completion_tokens[:-1]
            predicting += _of_the_policy(samples[i], own)
    order = [i for part in parts for i in part]
    return _micro_batch(samples, order, [tokens], layout, predicting)


def _begin(sample: TrainingSample, *, is_alone: bool) -> tuple[int, ...]:
    """Return a sample's prompt; if no other sample shares it, also the computed completion."""
    return sample.prompt_tokens + sample.completion_tokens[:-1] * is_alone


def _pack_padded(samples: Sequence[TrainingSample], token_budget: int) -> list[MicroBatch]:
    by_length = sorted(range(len(samples)), key=lambda i: -samples[i].length)
    batches: list[list[int]] = []
    for i in by_length:
        width = samples[batches[-1][0]].length - 1 if batches else 0
        if not batches or (len(batches[-1]) + 1) * width > token_budget:
            batches.append([])
        batches[-1].append(i)
    return [_padded(samples, order) for order in batches]


def _padded(samples: Sequence[TrainingSample], order: list[int]) -> MicroBatch:
    width = samples[order[0]].length - 1
    rows: list[list[int]] = []
    predicting: list[int] = []
    for row, i in enumerate(order):
        sample = samples[i]
        tokens = [*sample.prompt_tokens, *sample.completion_tokens[:-1]]
        first = row * width + len(sample.prompt_tokens) - 1
        rows.append(tokens + [0] * (width - len(tokens)))
        predicting += _of_the_policy(sample, range(first, first + len(sample.completion_tokens)))
    return _micro_batch(samples, order, rows, None, predicting)


def _micro_batch(
    samples: Sequence[TrainingSample],
    order: list[int],
    rows: list[list[int]],
    layout: Layout | None,
    predicting: list[int],
) -> MicroBatch:
    lengths = torch.tensor([samples[i].sampled for i in order])
    targets = [_of_the_policy(samples[i], samples[i].completion_tokens) for i in order]
    return MicroBatch(
        tuple(order),
        torch.tensor(rows),
        layout,
        torch.tensor(predicting),
        torch.tensor([token for tokens in targets for token in tokens]),
        torch.arange(len(order)).repeat_interleave(lengths),
        work_of([samples[i] for i in order]),
    )


def _of_the_policy(sample: TrainingSample, values: Sequence[int]) -> Sequence[int]:
    """Return the values of the tokens that the policy sampled; `values` has all tokens'."""
    if not sample.replies:
        return values
    return [values[place] for place in sampled_places(len(values), sample.replies)]


def balance(groups: Sequence[Group], ranks: int) -> list[list[Group]]:
    """Return the groups of every rank, in the order given; each is on exactly one.

    Longest first, each to the rank with least work so far (Graham 1969: at most 4/3 of the best
    possible). Deterministic: every rank computes the same answer. A rank gets none when there are
    fewer groups than ranks. Raises ValueError for less than one rank.
    """
    if ranks < 1:
        raise ValueError(f"cannot divide work among {ranks} ranks")
    work = [group_cost(group) for group in groups]
    load = [0.0] * ranks
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(groups)), key=lambda i: (-work[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], len(mine[r]), r))
        mine[rank].append(i)
        load[rank] += work[i]
    return [[groups[i] for i in sorted(chosen)] for chosen in mine]


def group_cost(group: Sequence[TrainingSample]) -> float:
    """Return the work of a group of one prompt, in tokens of a model of the assumed width.

    A token costs about 24 D^2 operations per layer in matrices and 4 D per position that it attends
    to, so P pairs of positions count as P / (6 D) tokens.
    """
    work = work_of(group)
    return work.tokens + work.pairs / (6 * ASSUMED_WIDTH)


def work_of(samples: Sequence[TrainingSample]) -> Work:
    """Return the work of computing some samples."""
    prompts = {sample.prompt_tokens for sample in samples}
    tokens = sum(map(len, prompts))
    pairs = sum(len(p) * (len(p) + 1) // 2 for p in prompts)
    for sample in samples:
        own = _computed(sample)
        tokens += own
        pairs += own * len(sample.prompt_tokens) + own * (own + 1) // 2
    return Work(tokens, pairs, sum(sample.sampled for sample in samples))
