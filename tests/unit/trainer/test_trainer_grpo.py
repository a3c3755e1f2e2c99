"""The GRPO loss against hand-computed numbers and a slow reference written a second way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from muster.trainer.grpo import (
    LossWeights,
    group_advantages,
    k3_divergence,
    token_loss,
    total_reward,
)

PLAIN = LossWeights(epsilon=0.2, delta=4.0, kl=0.0, entropy=0.0)
FINITE = st.floats(-3, 3).map(lambda x: round(x, 6))


def _loss_of(ratio: float, advantage: float, weights: LossWeights = PLAIN) -> tuple[float, float]:
    """Return the loss of one token and its gradient with respect to the log-probability."""
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    parts = token_loss(
        logp, torch.zeros(1), torch.tensor([advantage], dtype=torch.float64), weights
    )
    parts.loss_N.sum().backward()
    assert logp.grad is not None
    return float(parts.loss_N.detach()), float(logp.grad)


def _reference(ratio: float, advantage: float, w: LossWeights) -> float:
    """The same objective by cases rather than by minimum."""
    if advantage >= 0:
        return -advantage * min(ratio, 1 + w.epsilon)
    return -advantage * min(max(ratio, 1 - w.epsilon), w.delta)


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1.0, 0.0], [0.70710678, -0.70710678]),
        # Mean 0.25, sample standard deviation 0.5.
        ([1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),
        ([0.3, 0.3, 0.3], [0.0, 0.0, 0.0]),
    ],
)
def test_advantages_are_the_hand_computed_ones(
    rewards: list[float], advantages: list[float]
) -> None:
    assert group_advantages(rewards) == pytest.approx(advantages, abs=1e-5)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16), st.floats(-5, 5))
def test_advantages_sum_to_zero_and_ignore_a_shift(rewards: list[float], shift: float) -> None:
    advantages = group_advantages(rewards)
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    if max(rewards) - min(rewards) > 1e-3:
        moved = group_advantages([reward + shift for reward in rewards])
        assert moved == pytest.approx(advantages, abs=1e-6)


def test_total_reward_charges_the_distance_to_the_target() -> None:
    assert total_reward(1.0, 900, 1000, 0.0003) == pytest.approx(0.97)
    assert total_reward(1.0, 1100, 1000, 0.0003) == pytest.approx(0.97)
    assert total_reward(1.0, 900, -1, 0.0003) == 1.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.3, 2.0, -2.4, 0.0),  # clipped above
        (0.5, 2.0, -1.0, -1.0),  # a preferred token that became rare is still pushed
        (0.9, -2.0, 1.8, 1.8),
        (0.7, -2.0, 1.6, 0.0),  # clipped below
        (1.5, -2.0, 3.0, 3.0),  # plain GRPO leaves this unbounded
        (3.9, -2.0, 7.8, 7.8),
        (4.1, -2.0, 8.0, 0.0),  # the second side of the clip
        (100.0, -2.0, 8.0, 0.0),
        (5.0, 2.0, -2.4, 0.0),
    ],
)
def test_two_sided_clip(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    found, slope = _loss_of(ratio, advantage)
    assert found == pytest.approx(loss)
    assert slope == pytest.approx(gradient)


@given(st.floats(0.01, 50), FINITE, st.floats(1.3, 10))
def test_loss_is_the_reference(ratio: float, advantage: float, delta: float) -> None:
    weights = LossWeights(0.2, delta, 0.0, 0.0)
    assert _loss_of(ratio, advantage, weights)[0] == pytest.approx(
        _reference(ratio, advantage, weights), rel=1e-9, abs=1e-12
    )


@given(st.floats(0.01, 50), FINITE)
def test_delta_only_bites_for_negative_advantages_and_large_ratios(
    ratio: float, advantage: float
) -> None:
    unbounded = LossWeights(0.2, 1e9, 0.0, 0.0)
    bites = _loss_of(ratio, advantage) != _loss_of(ratio, advantage, unbounded)
    assert bites == (advantage < 0 and ratio > 4.0)


@given(st.floats(0.01, 50), FINITE.filter(lambda a: abs(a) > 1e-3))
def test_clipped_tokens_are_those_without_gradient(ratio: float, advantage: float) -> None:
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64)
    parts = token_loss(logp, torch.zeros(1), torch.tensor([advantage]).double(), PLAIN)
    assert bool(parts.clipped_N) == (_loss_of(ratio, advantage)[1] == 0)


def test_full_loss_is_a_double_precision_reference_written_a_second_way() -> None:
    generator = torch.Generator().manual_seed(0)
    logp, behaviour, reference, advantage, entropy = (
        torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(5)
    )
    weights = LossWeights(0.2, 4.0, kl=0.05, entropy=0.02)
    parts = token_loss(
        logp, behaviour, advantage, weights, entropy_N=entropy, reference_N=reference
    )
    for i in range(200):
        ratio = math.exp(logp[i] - behaviour[i])
        kl = math.exp(reference[i]) / math.exp(logp[i]) - 1 - float(reference[i] - logp[i])
        expected = _reference(ratio, float(advantage[i]), weights) + 0.05 * kl - 0.02 * entropy[i]
        assert float(parts.loss_N[i]) == pytest.approx(float(expected), rel=1e-10)


@given(FINITE, FINITE)
def test_k3_is_never_negative_and_zero_when_equal(logp: float, reference: float) -> None:
    found = k3_divergence(torch.tensor(logp).double(), torch.tensor(reference).double())
    assert float(found) >= 0
    assert float(k3_divergence(found, found)) == 0


def test_k3_is_the_divergence_on_average() -> None:
    p, q = _distribution(0), _distribution(1)
    exact = float((p * (p / q).log()).sum())
    estimate = float((p * k3_divergence(p.log(), q.log())).sum())
    assert estimate == pytest.approx(exact, rel=1e-9)


def test_k3_gradient_is_real() -> None:
    logp = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    k3_divergence(logp, torch.tensor([0.2], dtype=torch.float64)).sum().backward()
    assert logp.grad is not None
    assert float(logp.grad) == pytest.approx(1 - math.exp(0.2 - 0.5))


def _distribution(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(50, generator=generator, dtype=torch.float64).softmax(0)
