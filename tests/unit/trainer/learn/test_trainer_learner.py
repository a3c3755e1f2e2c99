"""A training step: deterministic, invariant to micro-batches, moved by each of its terms."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainer_fakes import make_recipe, make_rollouts, with_reward

from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.advantages import keep_informative
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.persistence import load_weights, named_weights
from muster.trainer.stream.filters import Drop

Weights = Mapping[str, Tensor]


def _learner(
    folder: Path, base: Weights, recipe: Recipe, *, budget: int = 10_000, noise: float = 0.0
) -> Learner:
    """A learner whose policy may differ from all published ones by some noise."""
    learner = Learner(folder, recipe, published=lambda _: base, micro_batch_tokens=budget)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return learner


def _groups(*seeds: int) -> list[list[Rollout]]:
    rollouts = [rollout for seed in seeds for rollout in make_rollouts(seed)]
    return [rollouts[i : i + 4] for i in range(0, len(rollouts), 4)]


def _flat(learner: Learner) -> Tensor:
    return torch.cat([weight.flatten() for weight in learner.weights().values()])


def test_step_is_bit_identical_when_repeated(model_folder: Path, base: Weights) -> None:
    ends = []
    for _ in range(2):
        learner = _learner(model_folder, base, make_recipe(optimizer_steps=2))
        figures = learner.step(Step(1), _groups(1, 2, 3))
        ends.append((_flat(learner), figures))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_behaviour_is_the_version_that_sampled(model_folder: Path, base: Weights) -> None:
    asked: list[int] = []
    shifted = {name: weight + 0.02 for name, weight in base.items()}

    def published(version: PolicyVersion) -> Weights:
        asked.append(version)
        return base if version == 3 else shifted

    rows = [[replace(r, policy_version=3) for r in group] for group in _groups(1)]
    same = Learner(model_folder, make_recipe(), published=published).step(Step(4), rows)
    rows[1] = [replace(r, policy_version=2) for r in rows[1]]
    mixed = Learner(model_folder, make_recipe(), published=published).step(Step(4), rows)
    assert sorted(set(asked)) == [2, 3]
    assert same.max_ratio == pytest.approx(1.0, abs=1e-5)
    assert mixed.max_ratio > 1.05


def test_rewarded_samples_become_more_likely(model_folder: Path, base: Weights) -> None:
    learner = _learner(model_folder, base, make_recipe(learning_rate=3e-4))
    groups = _groups(1, 2)
    ratios = []
    for step in range(1, 6):
        learner.step(Step(step), groups)
    kept = keep_informative(groups, make_recipe().training).samples
    for good in (True, False):
        samples = [s for group in kept for s in group if (s.advantage > 0) == good]
        (batch,) = learner._passes.pack(samples)
        now = learner._passes.current(batch)
        (known,) = learner._passes.read_policies([samples], with_reference=True)
        before = [known[i].reference for i in batch.order]
        ratios.append(float((now - torch.cat([b for b in before if b is not None])).mean()))
    assert ratios[0] > 0.01 > -0.01 > ratios[1]


@pytest.mark.parametrize("term", ["kl_coefficient", "entropy_coefficient"])
def test_coefficient_moves_the_parameters(model_folder: Path, base: Weights, term: str) -> None:
    ends = []
    for value in (0.0, 0.5):
        learner = _learner(model_folder, base, make_recipe(**{term: value}), noise=0.02)
        learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=0.1)  # type: ignore[assignment]
        learner.step(Step(1), _groups(1))
        ends.append(_flat(learner))
    assert float((ends[0] - ends[1]).abs().max()) > 1e-5


def test_groups_without_a_preference_are_dropped_and_counted(
    model_folder: Path, base: Weights
) -> None:
    groups = [*_groups(1), with_reward(_groups(2)[0], 1.0), with_reward(_groups(3)[0], 0.0)]
    figures = _learner(model_folder, base, make_recipe()).step(Step(1), groups)
    assert figures.dropped == {Drop.ZERO_ADVANTAGE: 8}
    assert figures.samples == 8
    assert figures.reward == pytest.approx(0.5)


def test_step_without_any_preference_changes_nothing(model_folder: Path, base: Weights) -> None:
    learner = _learner(model_folder, base, make_recipe(weight_decay=0.1))
    before = _flat(learner).clone()
    figures = learner.step(Step(1), [with_reward(group, 1.0) for group in _groups(1)])
    assert torch.equal(_flat(learner), before)
    assert (figures.tokens, figures.loss, figures.reward) == (0, 0.0, 1.0)


def test_length_reward_decides_inside_a_group_that_the_task_reward_kept() -> None:
    group = [replace(r, target_length=2) for r in _groups(1)[0]]
    (with_alpha,) = keep_informative([group], make_recipe(length_alpha=0.1).training).samples
    (without,) = keep_informative([group], make_recipe(length_alpha=0.0).training).samples
    assert [s.advantage for s in with_alpha] != [s.advantage for s in without]
    assert not keep_informative(
        [with_reward(group, 1.0)], make_recipe(length_alpha=0.1).training
    ).samples


def test_non_finite_gradient_skips_the_step(model_folder: Path, base: Weights) -> None:
    learner = _learner(model_folder, base, make_recipe())
    groups = _groups(1)
    learner.step(Step(1), groups)
    before = _flat(learner).clone()
    state = learner.optimizer.state_dict()["state"][0]["step"].clone()
    inner = learner.model.model.layers[0].mlp.up_proj.weight
    hook = inner.register_hook(lambda gradient: gradient * float("nan"))
    figures = learner.step(Step(2), groups)
    hook.remove()
    assert figures.skipped == 1
    assert torch.equal(_flat(learner), before)
    assert torch.equal(learner.optimizer.state_dict()["state"][0]["step"], state)


def test_learning_rate_warms_up(model_folder: Path, base: Weights) -> None:
    learner = _learner(model_folder, base, make_recipe(warmup_steps=4, learning_rate=0.008))
    rates = [learner.step(Step(s), _groups(1)).learning_rate for s in (1, 2, 4, 9)]
    assert rates == pytest.approx([0.002, 0.004, 0.008, 0.008])


def test_samples_are_dealt_to_the_optimiser_steps(model_folder: Path, base: Weights) -> None:
    learner = _learner(model_folder, base, make_recipe(optimizer_steps=3))
    figures = learner.step(Step(1), _groups(1, 2))
    assert learner.optimizer.state_dict()["state"][0]["step"] == 3
    assert figures.tokens == sum(len(r.completion_tokens) for g in _groups(1, 2) for r in g)


def test_weights_of_another_architecture_are_refused(model_folder: Path, base: Weights) -> None:
    learner = _learner(model_folder, base, make_recipe())
    fewer = dict(list(base.items())[1:])
    with pytest.raises(ValueError, match="weights differ"):
        load_weights(learner.model, fewer)


def test_tied_weights_are_named_once(model_folder: Path, base: Weights) -> None:
    learner = _learner(model_folder, base, make_recipe())
    assert named_weights(learner.model).keys() == base.keys()
    assert "lm_head.weight" not in base
