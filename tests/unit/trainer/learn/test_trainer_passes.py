"""Forward passes: behaviour policies, the shorter number format, and what is not computed."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from muster.protocol.ids import PolicyVersion
from muster.trainer.learn.logprob import head_of, token_logprobs
from muster.trainer.learn.packing import Sample, pack
from muster.trainer.learn.passes import ComputeType, Passes
from muster.trainer.learn.persistence import load_weights, named_weights


def _samples(*versions: int) -> list[Sample]:
    return [
        Sample((3, 4 + v % 2, 5), tuple(6 + (i + j) % 5 for j in range(2 + i)), 1.0 - i, v)
        for i, v in enumerate(versions)
    ]


class World:
    """A policy in training; version v is the base with every weight times 1 + v / 50."""

    def __init__(self, folder: Path, *, budget: int = 1000, dtype: ComputeType = "float32") -> None:
        self.base = AutoModelForCausalLM.from_pretrained(folder)
        self.trained = copy.deepcopy(self.base).train()
        self.asked: list[int] = []
        self.passes = Passes(
            self.trained,
            copy.deepcopy(self.base),
            self._published,
            temperature=0.8,
            micro_batch_tokens=budget,
            compute_dtype=dtype,
        )

    def _published(self, version: PolicyVersion) -> dict[str, torch.Tensor]:
        self.asked.append(version)
        weights = named_weights(self.base)
        return {name: weight * (1 + version / 50) for name, weight in weights.items()}

    def logprobs(self, sample: Sample) -> torch.Tensor:
        """The log-probabilities under the sample's version, computed alone in a padded row."""
        model = copy.deepcopy(self.base)
        load_weights(model, self._published(PolicyVersion(sample.policy_version)))
        (batch,) = pack([sample], 1000, is_padded=True)
        with torch.no_grad():
            return token_logprobs(batch.hidden(model), head_of(model), batch.targets_N, 0.8)[0]


@pytest.mark.parametrize("budget", [1000, 9, 1])
@pytest.mark.parametrize("versions", [(1, 1, 1, 1), (1, 2, 1, 2), (0, 2, 0, 1), (0, 3, 3, 0)])
def test_behaviour_is_that_of_each_sample_s_version(
    model_folder: Path, versions: tuple[int, ...], budget: int
) -> None:
    world, samples = World(model_folder, budget=budget), _samples(*versions)
    batches = world.passes.pack(samples)
    for batch, found in zip(batches, world.passes.behaviour(samples, batches), strict=True):
        expected = torch.cat([world.logprobs(samples[i]) for i in batch.order])
        if found is None:
            assert all(samples[i].policy_version == 0 for i in batch.order)
            found = world.passes.logprobs(batch)[0].detach()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_no_pass_is_made_for_the_policy_in_training_itself(model_folder: Path) -> None:
    world, samples = World(model_folder), _samples(0, 0)
    batches = world.passes.pack(samples)
    assert world.passes.behaviour(samples, batches) == [None]
    with torch.no_grad():
        next(world.trained.parameters()).view(-1)[0] += 1e-6
    (found,) = world.passes.behaviour(samples, batches)
    assert found is not None
    assert not found.requires_grad


def test_policies_take_turns_in_one_model(model_folder: Path) -> None:
    world, (sample, *_) = World(model_folder), _samples(2)
    batches = world.passes.pack([sample])
    for _ in range(2):
        (found,) = world.passes.behaviour([sample], batches)
        assert found is not None
        torch.testing.assert_close(found, world.logprobs(sample), rtol=1e-5, atol=1e-5)
        base = world.passes.reference(batches[0])
        assert torch.equal(base, world.passes.current(batches[0]))


def _backward(world: World, samples: list[Sample]) -> torch.Tensor:
    world.passes.refresh()
    for batch in world.passes.pack(samples):
        total, *_ = world.passes.objective(batch, lambda logp_R, _h, _rows: logp_R / 10)
        total.backward()  # type: ignore[no-untyped-call]  # torch's stub
    return torch.cat([p.grad.flatten() for p in world.trained.parameters()])


def test_bfloat16_gives_the_gradient_up_to_its_rounding_in_float32(model_folder: Path) -> None:
    samples = _samples(0, 1, 0, 1)
    exact = _backward(World(model_folder), samples)
    short = _backward(World(model_folder, dtype="bfloat16"), samples)
    assert short.dtype == torch.float32
    assert 1e-5 < float((short - exact).norm() / exact.norm()) < 0.03


def test_micro_batches_add_up_in_float32(model_folder: Path) -> None:
    world, samples = World(model_folder, dtype="bfloat16", budget=1), _samples(0, 1)
    parts = []
    for sample in samples:
        world.trained.zero_grad()
        parts.append(_backward(world, [sample]))
    world.trained.zero_grad()
    assert torch.equal(_backward(world, samples), parts[0] + parts[1])


def test_copy_takes_over_trained_weights_when_told(model_folder: Path) -> None:
    world, samples = World(model_folder, dtype="bfloat16"), _samples(0, 0)
    (batch,) = world.passes.pack(samples)
    before = world.passes.logprobs(batch)[0]
    with torch.no_grad():
        for weight in world.trained.parameters():
            weight *= 1.1
    assert torch.equal(world.passes.logprobs(batch)[0], before)
    world.passes.refresh()
    assert not torch.equal(world.passes.logprobs(batch)[0], before)


def test_trained_weights_stay_exact_beside_the_copy(model_folder: Path) -> None:
    world = World(model_folder, dtype="bfloat16")
    for own, weight in zip(world.trained.parameters(), world.base.parameters(), strict=True):
        assert own.dtype == torch.float32
        assert torch.equal(own, weight)
