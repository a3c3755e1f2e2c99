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


def chosen(position: int, *, on_device: bool = False) -> list[int]:
    choosing = Sampler(requests(), VOCAB, torch.device("cpu"))
    if on_device:
        # The accelerator's path, which runs on a CPU as well.
        choosing._on_cpu = False
    logits = torch.randn(len(ROWS), VOCAB, generator=torch.Generator().manual_seed(position))
    return choosing.choose(np.array(ROWS), logits, position).tolist()


@pytest.mark.parametrize("position", range(6))
def test_choices_on_an_accelerator_are_those_of_the_cpu(position: int) -> None:
    assert chosen(position, on_device=True) == chosen(position)


@pytest.mark.parametrize("position", range(6))
def test_choices_without_precomputed_noise_are_the_same(
    position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = chosen(position)
    monkeypatch.setattr(sampler, "_PRECOMPUTED_ELEMENTS", 0)
    assert chosen(position) == expected


def test_noise_belongs_to_the_request_and_not_to_its_place() -> None:
    alone = Sampler(requests()[2:3], VOCAB, torch.device("cpu"))
    logits = torch.zeros(1, VOCAB)
    together = Sampler(requests(), VOCAB, torch.device("cpu"))
    assert alone.choose(np.array([0]), logits, 4) == together.choose(np.array([2]), logits, 4)
