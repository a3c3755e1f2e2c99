"""Forward passes: behaviour policies, the shorter number format, and skipped work."""

import copy
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM

from muster.protocol.errors import ConfigError
from muster.protocol.ids import PolicyVersion
from muster.trainer.learn.logprob import head_of, token_logprobs
from muster.trainer.learn.packing import TrainingSample, pack
from muster.trainer.learn.passes import ComputeType, Known, Passes
from muster.trainer.learn.persistence import (
    Weights,
    load_base,
    load_weights,
    named_weights,
    standing_in,
)
from muster.trainer.learn.recompute import Recompute, recompute


def _samples(*versions: int) -> list[TrainingSample]:
    return [
        TrainingSample((3, 4 + v % 2, 5), tuple(6 + (i + j) % 5 for j in range(2 + i)), 1.0 - i, v)
        for i, v in enumerate(versions)
    ]


class World:
    """A policy in training; version v is the base with every weight times 1 + v / 50."""

    def __init__(
        self,
        folder: Path,
        *,
        budget: int = 1000,
        dtype: ComputeType = "float32",
        recomputed: Recompute = "none",
    ) -> None:
        self.base = AutoModelForCausalLM.from_pretrained(folder)
        self.trained = copy.deepcopy(self.base).train()
        self.asked: list[int] = []
        self.passes = Passes(
            self.trained,
            self._published,
            temperature=0.8,
            micro_batch_tokens=budget,
            compute_dtype=dtype,
            recomputed=recomputed,
        )

    def _published(self, version: PolicyVersion) -> dict[str, torch.Tensor]:
        self.asked.append(version)
        weights = named_weights(self.base)
        return {name: weight * (1 + version / 50) for name, weight in weights.items()}

    def logprobs(self, sample: TrainingSample) -> torch.Tensor:
        """The log-probabilities under the sample's version, computed alone in a padded row."""
        model = copy.deepcopy(self.base)
        load_weights(model, self._published(PolicyVersion(sample.policy_version)))
        (batch,) = pack([sample], 1000, is_padded=True)
        with torch.no_grad():
            return token_logprobs(batch.hidden(model), head_of(model), batch.targets_N, 0.8)[0]


def _known(
    world: World, *steps: list[TrainingSample], with_reference: bool = False
) -> list[list[Known]]:
    world.asked.clear()
    return world.passes.read_policies(steps, with_reference=with_reference)


@pytest.mark.parametrize("budget", [1000, 9, 1])
@pytest.mark.parametrize("versions", [(1, 1, 1, 1), (1, 2, 1, 2), (0, 2, 0, 1), (0, 3, 3, 0)])
def test_behaviour_is_that_of_each_sample_s_version(
    model_folder: Path, versions: tuple[int, ...], budget: int
) -> None:
    world, samples = World(model_folder, budget=budget), _samples(*versions)
    (first, second) = _known(world, samples[:2], samples[2:])
    for sample, known in zip(samples, [*first, *second], strict=True):
        if known.behaviour is None:
            assert sample.policy_version == 0
            assert sample in samples[:2]
        else:
            expected = world.logprobs(sample)
            torch.testing.assert_close(known.behaviour, expected, rtol=1e-5, atol=1e-5)


def test_every_policy_is_read_once_a_step(model_folder: Path) -> None:
    world, samples = World(model_folder), _samples(3, 2, 3, 2, 2, 3, 2, 3)
    known = _known(world, *([sample] for sample in samples), with_reference=True)
    assert world.asked == [0, 2, 3]
    assert all(k.behaviour is not None and k.reference is not None for (k,) in known)


def test_look_for_mismatch_is_not_repeated(model_folder: Path) -> None:
    world, samples = World(model_folder), _samples(2, 3, 2)
    world.passes.surprise(samples)
    (known,) = _known(world, samples)
    with_look = [k.behaviour for k in known]
    (known,) = _known(world, samples)
    for found, k in zip(with_look, known, strict=True):
        assert found is not None
        assert k.behaviour is not None
        torch.testing.assert_close(found, k.behaviour, rtol=1e-5, atol=1e-5)


def test_no_pass_is_made_for_the_policy_in_training_itself(model_folder: Path) -> None:
    world, samples = World(model_folder), _samples(0, 0, 0)
    (first, second) = _known(world, samples[:2], samples[2:])
    assert [k.behaviour for k in first] == [None, None]
    # At the second optimiser step the trained weights differ from the published ones.
    assert second[0].behaviour is not None
    with torch.no_grad():
        next(world.trained.parameters()).view(-1)[0] += 1e-6
    (first,) = _known(world, samples)
    assert all(k.behaviour is not None and not k.behaviour.requires_grad for k in first)


def test_weights_in_training_come_back_after_others_stood_in(model_folder: Path) -> None:
    world, samples = World(model_folder), _samples(2, 3)
    own = {name: value.clone() for name, value in named_weights(world.trained).items()}
    places = [parameter.data_ptr() for parameter in world.trained.parameters()]
    (known,) = _known(world, samples, with_reference=True)
    (batch, *_) = world.passes.pack(samples)
    reference = [known[i].reference for i in batch.order]
    torch.testing.assert_close(
        torch.cat([r for r in reference if r is not None]), world.passes.current(batch)
    )
    assert places == [parameter.data_ptr() for parameter in world.trained.parameters()]
    assert all(torch.equal(own[n], value) for n, value in named_weights(world.trained).items())


def test_weights_in_training_come_back_when_a_version_does_not_fit(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    own = {name: value.clone() for name, value in named_weights(model).items()}
    other = {name: value[..., :1] for name, value in own.items()}
    with pytest.raises(RuntimeError, match="shapes"), standing_in(model, other):
        model(torch.tensor([[1, 2]]))
    assert all(torch.equal(own[n], value) for n, value in named_weights(model).items())
    other.popitem()
    with pytest.raises(ValueError, match="weights differ"), standing_in(model, other):
        pass


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def _named_otherwise(weights: Weights, *, twice: bool) -> dict[str, torch.Tensor]:
    """Weights whose tied head is stored as the head too, or as the head alone."""
    found = {**weights, HEAD: weights[EMBEDDING]}
    if not twice:
        del found[EMBEDDING]
    return found


@pytest.mark.parametrize("twice", [True, False])
def test_tied_head_may_be_stored_under_either_name(
    model_folder: Path, base: Weights, twice: bool
) -> None:
    world, samples = World(model_folder), _samples(0, 0)
    own = {name: value.clone() for name, value in named_weights(world.trained).items()}
    stored = _named_otherwise(base, twice=twice)
    with torch.no_grad():
        for weight in world.trained.parameters():
            weight *= 2
        with standing_in(world.trained, stored):
            _same(world.trained, own)
        load_base(world.trained, stored)
    _same(world.trained, own)
    # No pass is needed for weights that are those of the model.
    world.passes = Passes(world.trained, lambda _: stored, temperature=0.8, micro_batch_tokens=1000)
    (known,) = _known(world, samples)
    assert [each.behaviour for each in known] == [None, None]
    del stored[HEAD]
    if twice:
        load_base(world.trained, stored)
    else:
        with pytest.raises(ValueError, match=r"weights differ in \['model.embed_tokens.weight'\]"):
            load_base(world.trained, stored)


def _same(model: Any, expected: Weights) -> None:
    found = named_weights(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _backward(world: World, samples: list[TrainingSample]) -> torch.Tensor:
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


class _Kept:
    """Counts the bytes that are kept for a backward pass, without weights."""

    def __init__(self, model: Any) -> None:
        self._weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._storages: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def size(self) -> int:
        return sum(self._storages.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputing_gives_the_same_gradient_and_keeps_less(
    model_folder: Path, dtype: ComputeType
) -> None:
    samples, found = _samples(0, 1, 0, 1), {}
    for kind in get_args(Recompute):
        world = World(model_folder, dtype=dtype, recomputed=kind)
        world.passes.refresh()
        (batch,) = world.passes.pack(samples)
        kept = _Kept(world.passes._computing.model)
        with saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            logp_N, _ = world.passes.logprobs(batch)
        logp_N.sum().backward()  # type: ignore[no-untyped-call]  # torch's stub
        gradient = torch.cat([p.grad.flatten() for p in world.trained.parameters()])
        found[kind] = gradient, kept.size
    for kind in ("selective", "full", "host"):
        assert torch.equal(found[kind][0], found["none"][0])
    assert found["selective"][1] < 0.7 * found["none"][1]
    assert found["full"][1] < 0.6 * found["selective"][1]
    assert found["host"][1] < found["full"][1]


@pytest.mark.parametrize("kind", ["selective", "full", "host"])
def test_model_without_blocks_cannot_recompute(kind: Recompute) -> None:
    with pytest.raises(ConfigError, match=f"Linear can be computed again \\({kind}\\)"):
        recompute(torch.nn.Linear(2, 2), kind)
