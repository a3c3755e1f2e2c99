"""Which rank trains on which group, so that all finish at about the same time. Pure.

Groups stay whole, because their prompt is computed once for all their samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from muster.trainer.packing import Sample

Group = TypeVar("Group", bound=Sequence[Sample])

DEFAULT_HIDDEN_SIZE = 1024


def balance(
    groups: Sequence[Group], ranks: int, *, hidden_size: int = DEFAULT_HIDDEN_SIZE
) -> list[list[Group]]:
    """Return the groups of every rank, in the order given; each is on exactly one.

    Longest first, each to the rank with least work so far (Graham 1969: at most 4/3 of the best
    possible). Deterministic: every rank computes the same answer. A rank stays without when there
    are fewer groups than ranks. Raises ValueError for less than one rank.
    """
    if ranks < 1:
        raise ValueError(f"cannot divide work among {ranks} ranks")
    work = [group_cost(group, hidden_size) for group in groups]
    load = [0.0] * ranks
    mine: list[list[int]] = [[] for _ in range(ranks)]
    for i in sorted(range(len(groups)), key=lambda i: (-work[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], len(mine[r]), r))
        mine[rank].append(i)
        load[rank] += work[i]
    return [[groups[i] for i in sorted(chosen)] for chosen in mine]


def group_cost(group: Sequence[Sample], hidden_size: int) -> float:
    """Return the work of a group of one prompt, in tokens of a model of that width.

    A token costs about 24 D^2 operations per layer in matrices and 4 D per position that it attends
    to, so P pairs of positions count as P / (6 D) tokens.
    """
    if not group:
        return 0.0
    prompts = {sample.prompt_tokens for sample in group}
    tokens = sum(map(len, prompts))
    pairs = sum(len(p) * (len(p) + 1) // 2 for p in prompts)
    for sample in group:
        own = len(sample.completion_tokens) - 1
        tokens += own
        pairs += own * len(sample.prompt_tokens) + own * (own + 1) // 2
    return tokens + pairs / (6 * hidden_size)
