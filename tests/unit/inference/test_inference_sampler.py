"""The choices of a batch are the same on every path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from muster.inference import sampler
from muster.inference.engine import Request
from muster.inference.sampler import Sampler

VOCAB = 23
ROWS = [0, 2, 3]


def requests() -> list[Request]:
    temperatures = (1.0, 0.5, 1.0, 2.0)
    return [Request((1,), 2**63 + i, t, 6, position=5 * i) for i, t in enumerate(temperatures)]


def choose(choosing: Sampler, rows: list[int], positions: list[int]) -> list[int]:
    # A row's logits depend on its request and position, whoever is beside it.
    logits = [
        torch.randn(VOCAB, generator=torch.Generator().manual_seed(100 * row + position))
        for row, position in zip(rows, positions, strict=True)
    ]
    return choosing.choose(np.array(rows), torch.stack(logits), np.array(positions)).tolist()


@pytest.mark.parametrize("position", range(6))
def test_choices_on_an_accelerator_are_those_of_the_cpu(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = choose(Sampler(requests()), ROWS, [position] * len(ROWS))
    # The accelerator's path runs on a CPU as well.
    monkeypatch.setattr(sampler, "choices", lambda *asked: sampler.device_winners(*asked)[0])
    assert choose(Sampler(requests()), ROWS, [position] * len(ROWS)) == expected


def test_rows_that_join_and_leave_keep_their_noise() -> None:
    choosing = Sampler(requests())
    found = []
    for rows, positions in [
        ([0, 2], [0, 0]),
        ([2, 0], [1, 1]),
        ([2, 3], [2, 0]),
        ([3, 2, 1], [1, 3, 0]),
        ([1, 2, 3], [1, 4, 2]),
    ]:
        for pair in zip(rows, positions, choose(choosing, rows, positions), strict=True):
            found.append(pair)
    alone = [chosen_alone(row, position) for row, position, _ in found]
    assert [token for *_, token in found] == alone


def chosen_alone(row: int, position: int) -> int:
    return choose(Sampler(requests()), [row], [position])[0]


def test_noise_belongs_to_the_request_and_not_to_its_place() -> None:
    alone = Sampler(requests()[2:3])
    together = Sampler(requests())
    logits, position = torch.zeros(1, VOCAB), np.array([4])
    assert alone.choose(np.array([0]), logits, position) == together.choose(
        np.array([2]), logits, position
    )


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
