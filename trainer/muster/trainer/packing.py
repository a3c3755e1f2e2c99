"""Micro-batches: samples of similar length side by side, within a budget of tokens.

Rows are padded on the right. A causal model's real tokens never see what comes after them, so no
attention mask is needed and any causal language model can be trained.

Axes: B rows, T positions, D hidden size, N completion tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to train on."""

    prompt_tokens: tuple[int, ...]
    """Not trained on."""
    completion_tokens: tuple[int, ...]
    """Trained on, EOS included."""
    advantage: float
    """Of every token of it."""
    policy_version: int
    """The policy that sampled it."""

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_tokens) + len(self.completion_tokens)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model together."""

    order: tuple[int, ...]
    """Position of each row's sample in the list that was packed."""
    tokens_BT: Tensor
    """Prompt, completion without its last token, padding."""
    predicting_N: Tensor
    """Flat positions (row * T + position) whose hidden states predict the completion tokens."""
    targets_N: Tensor
    """The completion tokens, row after row."""
    row_N: Tensor
    """The row of each completion token."""

    def hidden(self, model: Any) -> Tensor:
        """Return the final hidden states [N, D] that predict the completion tokens."""
        tokens_BT = self.tokens_BT.to(model.device)
        hidden_BTD: Tensor = model.base_model(
            input_ids=tokens_BT, use_cache=False
        ).last_hidden_state
        return hidden_BTD.flatten(0, 1)[self.predicting_N.to(model.device)]


def pack(samples: Sequence[Sample], token_budget: int) -> list[MicroBatch]:
    """Return micro-batches of at most `token_budget` padded tokens; a longer sample stands alone.

    Every sample is in exactly one of them. Deterministic.
    """
    by_length = sorted(range(len(samples)), key=lambda i: -samples[i].length)
    batches: list[list[int]] = []
    for i in by_length:
        width = samples[batches[-1][0]].length - 1 if batches else 0
        if not batches or (len(batches[-1]) + 1) * width > token_budget:
            batches.append([])
        batches[-1].append(i)
    return [_micro_batch(samples, order) for order in batches]


def _micro_batch(samples: Sequence[Sample], order: list[int]) -> MicroBatch:
    width = samples[order[0]].length - 1
    rows: list[list[int]] = []
    predicting: list[int] = []
    targets: list[int] = []
    owners: list[int] = []
    for row, i in enumerate(order):
        sample = samples[i]
        tokens = [*sample.prompt_tokens, *sample.completion_tokens[:-1]]
        first = row * width + len(sample.prompt_tokens) - 1
        rows.append(tokens + [0] * (width - len(tokens)))
        predicting += range(first, first + len(sample.completion_tokens))
        targets += sample.completion_tokens
        owners += [row] * len(sample.completion_tokens)
    return MicroBatch(
        tuple(order),
        torch.tensor(rows),
        torch.tensor(predicting),
        torch.tensor(targets),
        torch.tensor(owners),
    )
