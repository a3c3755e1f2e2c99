"""Every objective through a real model: packing, optimiser steps, the policies it is relative to.

Each test is a defect of the code that INTELLECT-2 ran (docs/losses.md lists them), turned around.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainer_fakes import make_recipe, make_rollouts

from muster.protocol.ids import Step
from muster.protocol.objective import LOSS_DEFAULTS
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.learner import Learner
from muster.trainer.measure.figures import StepFigures

Weights = Mapping[str, Tensor]


def _groups(*seeds: int, version: int = 0) -> list[list[Rollout]]:
    rollouts = [replace(r, policy_version=version) for s in seeds for r in make_rollouts(s)]
    return [rollouts[i : i + 4] for i in range(0, len(rollouts), 4)]


def _moved(base: Weights, noise: float, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: w + noise * torch.randn(w.shape, generator=generator) for n, w in base.items()}


def _step(
    folder: Path,
    base: Weights,
    *,
    budget: int = 10_000,
    noise: float = 0.05,
    rate: float = 0.05,
    **objective: object,
) -> tuple[Tensor, StepFigures]:
    """Take one training step by plain gradient descent; return how the weights moved."""
    recipe = make_recipe(max_grad_norm=1e9, learning_rate=rate, **objective)
    learner = Learner(folder, recipe, published=lambda _: base, micro_batch_tokens=budget)
    learner.load(_moved(base, noise))
    before = torch.cat([w.flatten() for w in learner.weights().values()]).clone()
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=rate)  # type: ignore[assignment]
    figures = learner.step(Step(1), _groups(1, 2, 3))
    return torch.cat([w.flatten() for w in learner.weights().values()]) - before, figures


TERMS = {"kl_coefficient": 0.05, "entropy_coefficient": 0.01, "drift_coefficient": 0.01}


@pytest.mark.parametrize("loss", LOSS_DEFAULTS)
@pytest.mark.parametrize("decoupled", [False, True])
def test_gradient_does_not_depend_on_packing(
    model_folder: Path, base: Weights, loss: str, decoupled: bool
) -> None:
    """Defect: the loss was divided by the padded micro-batch size, so packing changed it."""
    values = {**TERMS, "loss": loss, "decoupled": decoupled, "optimizer_steps": 2}
    whole, whole_figures = _step(model_folder, base, **values)
    parts, figures = _step(model_folder, base, budget=25, **values)
    assert float(whole.abs().max()) > 1e-4
    # The weights themselves are rounded to 6e-8 of their size.
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=3e-7)
    assert float((parts - whole).norm() / whole.norm()) < 2e-5
    assert figures.loss == pytest.approx(whole_figures.loss, rel=1e-4)
    assert figures.clip_fraction == whole_figures.clip_fraction
    for name in ("grad_norm", "entropy", "kl"):
        expected = getattr(whole_figures, name)
        assert getattr(figures, name) == pytest.approx(expected, rel=1e-4), name


def test_aggregations_differ(model_folder: Path, base: Weights) -> None:
    moves = [
        _step(model_folder, base, aggregation=kind)[0] for kind in ("token", "sequence", "constant")
    ]
    assert float((moves[0] - moves[1]).norm() / moves[0].norm()) > 0.01
    # "constant" divides by six tokens per sample: the token mean, scaled.
    scale = moves[2].norm() / moves[0].norm()
    torch.testing.assert_close(moves[2], scale * moves[0], rtol=1e-3, atol=1e-6)
    assert float(scale) < 1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_weighted"])
def test_kl_coefficient_moves_the_parameters(
    model_folder: Path, base: Weights, estimator: str
) -> None:
    """Defect: KL between two stored policies has no gradient, whatever its coefficient."""
    without, _ = _step(model_folder, base)
    with_kl, figures = _step(model_folder, base, kl_coefficient=0.5, kl_estimator=estimator)
    assert float((with_kl - without).norm() / without.norm()) > 0.05
    assert figures.kl != 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_weighted"])
def test_kl_alone_brings_the_policy_back(model_folder: Path, base: Weights, estimator: str) -> None:
    recipe = make_recipe(
        kl_coefficient=1.0, kl_estimator=estimator, max_grad_norm=100.0, learning_rate=1e-3
    )
    learner = Learner(model_folder, recipe, published=lambda _: base)
    learner.load(_moved(base, 0.03))
    found = [learner.step(Step(s), _groups(1, 2)) for s in range(1, 9)]
    assert found[-1].mismatch_kl < 0.6 * found[0].mismatch_kl


def test_ratio_is_to_the_policy_that_sampled(model_folder: Path, base: Weights) -> None:
    """Defect: behaviour recomputed with the step's weights makes the first ratio 1 for any row."""
    _, moved = _step(model_folder, base, noise=0.05)
    assert moved.max_ratio > 1.05
    assert moved.mismatch_kl > 1e-4
    assert moved.mismatch_max > 0.05
    _, same = _step(model_folder, base, noise=0.0)
    assert (same.max_ratio, same.mismatch_max) == pytest.approx((1.0, 0.0), abs=1e-5)


def test_decoupled_ratio_is_to_the_weights_before_the_step(
    model_folder: Path, base: Weights
) -> None:
    far = {"clip_epsilon": 0.01, "noise": 0.1, "optimizer_steps": 1}
    _, coupled = _step(model_folder, base, **far)  # type: ignore[arg-type]
    _, decoupled = _step(model_folder, base, decoupled=True, **far)  # type: ignore[arg-type]
    assert coupled.clip_fraction > 0.3
    # With one optimiser step the proximal policy is the policy itself: every ratio is 1.
    assert decoupled.clip_fraction == 0
    assert decoupled.max_ratio == pytest.approx(coupled.max_ratio)
    _, second = _step(
        model_folder, base, decoupled=True, **{**far, "optimizer_steps": 2, "rate": 0.5}
    )
    assert 0 < second.clip_fraction <= 0.6


def test_decoupled_objective_weighs_by_how_likely_the_sampler_was(
    model_folder: Path, base: Weights
) -> None:
    plain, _ = _step(model_folder, base, decoupled=True, correction_high=1e6)
    masked, _ = _step(
        model_folder, base, decoupled=True, correction="mask", correction_high=1.0 + 1e-6
    )
    assert float((plain - masked).norm() / plain.norm()) > 0.05
