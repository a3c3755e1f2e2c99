"""The choices of a batch are the same on every path."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from muster.inference import sampler
from muster.inference.engine import Request

VOCAB = 23


def requests() -> list[Request]:
    temperatures = (1.0, 0.5, 1.0, 2.0)
    return [Request((1,), 2**63 + i, t, 6, position=5 * i) for i, t in enumerate(temperatures)]


Choose = Callable[..., torch.Tensor]


def chosen(rows: list[int], positions: list[int], choose: Choose = sampler.choices) -> list[int]:
    # A row's logits depend only on its request and position, not on the other rows.
    logits = [
        torch.randn(VOCAB, generator=torch.Generator().manual_seed(100 * row + position))
        for row, position in zip(rows, positions, strict=True)
    ]
    asked = [requests()[row] for row in rows]
    return choose(
        torch.stack(logits),
        [request.seed for request in asked],
        [request.position + done for request, done in zip(asked, positions, strict=True)],
        np.array([request.temperature for request in asked], np.float32),
    ).tolist()


def test_rows_that_join_and_leave_keep_their_noise() -> None:
    for rows, positions in [
        ([0, 2], [0, 0]),
        ([2, 0], [1, 1]),
        ([2, 3], [2, 0]),
        ([3, 2, 1], [1, 3, 0]),
        ([1, 2, 3], [1, 4, 2]),
    ]:
        alone = [chosen([row], [done])[0] for row, done in zip(rows, positions, strict=True)]
        assert chosen(rows, positions) == alone


@pytest.mark.parametrize("change", ["none", "another id", "another bit", "no NaN"])
def test_a_fused_kernel_that_chooses_otherwise_is_not_used(change: str) -> None:
    def winners(*asked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids, scores = sampler._winners_by_passes(*asked)
        if change == "another id":
            ids[2] += 1
        elif change == "another bit":
            scores[0] = torch.nextafter(scores[0], torch.tensor(torch.inf))
        elif change == "no NaN":
            scores.nan_to_num_()
        return ids, scores

    assert sampler.is_same(winners, torch.device("cpu")) == (change == "none")
    assert sampler._fused(torch.device("cpu")) is None
