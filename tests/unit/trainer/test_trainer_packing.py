"""Micro-batches: every token once, within the budget, and the same hidden states as unpacked."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from muster.trainer.packing import Sample, pack

SAMPLES = st.lists(
    st.builds(
        Sample,
        prompt_tokens=st.lists(st.integers(3, 12), min_size=1, max_size=9).map(tuple),
        completion_tokens=st.lists(st.integers(3, 12), min_size=1, max_size=9).map(tuple),
        advantage=st.floats(-1, 1),
        policy_version=st.integers(0, 3),
    ),
    min_size=1,
    max_size=12,
)


@given(SAMPLES, st.integers(1, 100))
def test_every_sample_is_packed_exactly_once(samples: list[Sample], budget: int) -> None:
    batches = pack(samples, budget)
    assert sorted(i for batch in batches for i in batch.order) == list(range(len(samples)))


@given(SAMPLES, st.integers(1, 100))
def test_micro_batches_stay_within_the_budget_or_hold_one_sample(
    samples: list[Sample], budget: int
) -> None:
    for batch in pack(samples, budget):
        assert batch.tokens_BT.numel() <= budget or len(batch.order) == 1


@given(SAMPLES, st.integers(1, 100))
def test_targets_follow_the_tokens_that_predict_them(samples: list[Sample], budget: int) -> None:
    for batch in pack(samples, budget):
        for row, i in enumerate(batch.order):
            sample, mine = samples[i], batch.row_N == row
            assert tuple(batch.targets_N[mine].tolist()) == sample.completion_tokens
            before = (*sample.prompt_tokens, *sample.completion_tokens[:-1])
            positions = batch.predicting_N[mine] - row * batch.tokens_BT.shape[1]
            assert positions[0] == len(sample.prompt_tokens) - 1
            seen = batch.tokens_BT[row, : len(before)]
            assert tuple(seen.tolist()) == before
            assert positions[-1] == len(before) - 1


def test_hidden_states_do_not_depend_on_the_neighbours(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    samples = [
        Sample((3, 4, 5), (6, 7, 8, 1), 0.0, 0),
        Sample((9,), (10,), 0.0, 0),
        Sample((3, 3, 3, 3, 3), (4, 1), 0.0, 0),
    ]
    with torch.no_grad():
        (packed,) = pack(samples, 1000)
        together = packed.hidden(model)
        for row, i in enumerate(packed.order):
            (alone,) = pack([samples[i]], 1000)
            torch.testing.assert_close(together[packed.row_N == row], alone.hidden(model))
