"""Every loss against hand-computed numbers and a slow reference written a second way."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings, strategies as st
from loss_reference import reference_gradient, reference_loss
from torch import Tensor

from muster.protocol.objective import _USED_BY, LossName, ObjectiveRecipe
from muster.trainer.learn import losses

ALL = list(losses.LOSSES)
BARE = {"kl_coefficient": 0.0, "entropy_coefficient": 0.0}
LONGEST = 40


def _objective(**values: object) -> ObjectiveRecipe:
    return ObjectiveRecipe.model_validate({**BARE, **values})


def _batch(seed: int, lengths: tuple[int, ...] = (7, 1, 12, 4, 9, 3)) -> losses.Tokens:
    """Samples whose ratios to the other policies are between about 0.1 and 10."""
    generator = torch.Generator().manual_seed(seed)
    sample_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def normal(scale: float, count: int = len(sample_N)) -> Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    logp_N = -normal(1.5).abs() - 0.05
    return losses.Tokens(
        logp_N,
        (logp_N + normal(0.8)).clamp(max=-1e-3),
        normal(1.0, len(lengths))[sample_N],
        sample_N,
        proximal_N=(logp_N + normal(0.5)).clamp(max=-1e-3),
        entropy_N=normal(1.0).abs(),
        reference_N=(logp_N + normal(0.5)).clamp(max=-1e-3),
    )


def _differentiated(
    tokens: losses.Tokens, objective: ObjectiveRecipe, totals: losses.Totals | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total and its gradient with respect to log-probabilities and entropies."""
    assert tokens.entropy_N is not None
    leaves = [tokens.logp_N.clone().requires_grad_(), tokens.entropy_N.clone().requires_grad_()]
    tokens = replace(tokens, logp_N=leaves[0], entropy_N=leaves[1])
    totals = totals or losses.Totals(len(tokens.logp_N), len(tokens.sample_N.unique()))
    parts = losses.token_loss(tokens, objective)
    loss = losses.total(parts.loss_N, tokens.sample_N, totals, objective, LONGEST)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return loss.detach(), *(torch.zeros(0) if g is None else g for g in gradients)


def _select(tokens: losses.Tokens, rows: Tensor) -> losses.Tokens:
    """Return some tokens, their samples numbered anew from zero."""
    numbers_N = tokens.sample_N[rows].unique(return_inverse=True)[1]
    found = {
        name: getattr(tokens, name)[rows]
        for name in ("logp_N", "behaviour_N", "advantage_N", "proximal_N", "entropy_N")
    }
    assert tokens.reference_N is not None
    return losses.Tokens(**found, reference_N=tokens.reference_N[rows], sample_N=numbers_N)


class _Noted:
    """An objective that notes which of its fields are read."""

    def __init__(self, objective: ObjectiveRecipe) -> None:
        self.read: set[str] = set()
        self._objective = objective

    def __getattr__(self, name: str) -> object:
        self.read.add(name)
        return getattr(self._objective, name)


@pytest.mark.parametrize("loss", ALL)
def test_a_recipe_refuses_every_parameter_that_its_loss_does_not_read(loss: LossName) -> None:
    tokens, noted = _batch(0), _Noted(_objective(loss=loss))
    losses.LOSSES[loss](tokens, tokens.logp_N - tokens.behaviour_N, noted)  # type: ignore[arg-type]
    assert noted.read == {name for name, users in _USED_BY.items() if loss in users}


# The default, by hand


def _one(ratio: float, advantage: float, **values: object) -> tuple[float, float, losses.TokenLoss]:
    """Return one token's loss, its gradient with respect to the log-probability, and its parts."""
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    tokens = losses.Tokens(
        logp,
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([0]),
    )
    parts = losses.token_loss(tokens, _objective(**values))
    (gradient,) = torch.autograd.grad(parts.loss_N.sum(), logp)
    return float(parts.loss_N.detach()), float(gradient), parts


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
    found = _one(ratio, advantage)
    assert found[:2] == pytest.approx((loss, gradient))


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "gradient"),
    [
        ("grpo", 100.0, -1.0, 100.0),  # delta would bound this
        ("dapo", 1.25, 1.0, -1.25),  # above 1.2, below 1.28
        ("dapo", 1.29, 1.0, 0.0),
        ("dapo", 0.79, -1.0, 0.0),
        ("gspo", 1.0005, 1.0, 0.0),
        ("gspo", 1.0003, 1.0, -1.0003),
        ("cispo", 3.0, 1.0, -3.0),
        ("cispo", 9.0, 1.0, -5.0),  # bounded, not cut
        ("ratio_clamp", 7.0, 1.0, -7.0),
        ("ratio_clamp", 9.0, 1.0, 0.0),  # cut
        ("truncated_is", 9.0, 1.0, -2.0),
        ("masked_is", 0.4, 1.0, 0.0),
        ("masked_is", 0.6, -1.0, 0.6),
        ("masked_is", 5.1, -1.0, 0.0),
    ],
)
def test_gradient_by_hand(name: str, ratio: float, advantage: float, gradient: float) -> None:
    assert _one(ratio, advantage, loss=name)[1] == pytest.approx(gradient)


@pytest.mark.parametrize(
    ("p", "anchor", "advantage", "kept"),
    [
        (0.5, 0.2, 1.0, False),  # rose by more than 0.2 and is pushed up
        (0.5, 0.2, -1.0, True),  # the same, pushed back
        (0.2, 0.5, -1.0, False),
        (0.2, 0.5, 1.0, True),
        (0.35, 0.2, 1.0, True),
        (0.01, 0.0001, 1.0, True),  # a ratio of 100, but of a rare token
    ],
)
def test_dppo_masks_what_moved_too_far(
    p: float, anchor: float, advantage: float, kept: bool
) -> None:
    one = torch.ones(1, dtype=torch.float64)
    logp = (p * one).log().requires_grad_()
    tokens = losses.Tokens(logp, (anchor * one).log(), advantage * one, torch.tensor([0]))
    parts = losses.token_loss(tokens, _objective(loss="dppo"))
    (gradient,) = torch.autograd.grad(parts.loss_N.sum(), logp)
    assert float(gradient) == pytest.approx(-advantage * p / anchor if kept else 0.0)
    assert bool(parts.clipped_N) != kept


# All of them against the reference


def _variants() -> list[dict[str, object]]:
    plain: list[dict[str, object]] = [{"loss": name} for name in ALL]
    weighed: list[dict[str, object]] = [
        {"loss": name, "decoupled": True, "correction": kind, "correction_level": level}
        | {"correction_low": 0.5, "correction_high": 1.5}
        for name in ALL
        for kind, level in (("truncate", "token"), ("mask", "token"), ("truncate", "sequence"))
    ]
    terms: list[dict[str, object]] = [
        {"kl_coefficient": 0.3, "kl_estimator": kind, "entropy_coefficient": 0.2}
        | {"drift_coefficient": 0.1, "aggregation": aggregation}
        for kind in ("k1", "k2", "k3", "k3_weighted")
        for aggregation in ("token", "sequence", "constant")
    ]
    return [*plain, *weighed, *terms, {"loss": "gspo", "clip_epsilon": 0.2}]


@pytest.mark.parametrize("values", _variants(), ids=str)
def test_loss_is_the_reference(values: dict[str, object]) -> None:
    tokens, objective = _batch(3), _objective(**values)
    loss, by_logp, by_entropy = _differentiated(tokens, objective)
    assert float(loss) == pytest.approx(reference_loss(tokens, objective, LONGEST), rel=1e-10)
    slopes = reference_gradient(tokens, objective, LONGEST)
    torch.testing.assert_close(by_logp, slopes.logp_N, rtol=1e-6, atol=1e-9)
    if objective.entropy_coefficient:
        torch.testing.assert_close(by_entropy, slopes.entropy_N, rtol=1e-6, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ALL), st.integers(0, 10**6), st.booleans())
def test_loss_is_the_reference_on_any_batch(name: str, seed: int, decoupled: bool) -> None:
    tokens, objective = _batch(seed), _objective(loss=name, decoupled=decoupled)
    assert float(_differentiated(tokens, objective)[0]) == pytest.approx(
        reference_loss(tokens, objective, LONGEST), rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize("name", ALL)
def test_sample_losses_are_those_in_which_tokens_depend_on_others(name: str) -> None:
    tokens, objective = _batch(4), _objective(loss=name)
    alone = [
        losses.token_loss(_select(tokens, torch.tensor([row])), objective).loss_N
        for row in range(len(tokens.logp_N))
    ]
    is_same = torch.equal(torch.cat(alone), losses.token_loss(tokens, objective).loss_N)
    assert is_same == losses.is_token_level(objective)


def test_every_name_of_a_recipe_has_its_loss() -> None:
    assert set(losses.LOSSES) == set(get_args(LossName))


@given(st.floats(0.01, 50), st.floats(-3, 3).filter(lambda a: abs(a) > 1e-3))
def test_clipped_tokens_are_those_without_gradient(ratio: float, advantage: float) -> None:
    for name in ("two_sided", "grpo", "dapo", "gspo", "ratio_clamp", "masked_is"):
        _, gradient, parts = _one(ratio, advantage, loss=name)
        assert bool(parts.clipped_N) == (gradient == 0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("distance", [-1e4, -90.0, 90.0, 1e4])
def test_absurd_ratios_give_finite_gradients(name: str, distance: float) -> None:
    for advantage in (-1.0, 1.0):
        logp = torch.full((2,), -100.0 + min(0.0, distance), requires_grad=True)
        other = logp.detach() - distance
        tokens = losses.Tokens(
            logp, other, torch.full((2,), advantage), torch.tensor([0, 1]), reference_N=other
        )
        objective = _objective(loss=name, kl_coefficient=0.1)
        (gradient,) = torch.autograd.grad(losses.token_loss(tokens, objective).loss_N.sum(), logp)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("which", ["behaviour_N", "reference_N", "logp_N"])
def test_nan_is_not_laundered(name: str, which: str) -> None:
    """clamp and minimum stop the gradient of a NaN, but the optimiser must see it."""
    tokens, objective = _batch(0), _objective(loss=name, kl_coefficient=0.1)
    broken = getattr(tokens, which).clone()
    broken[3] = math.nan
    gradient = _differentiated(replace(tokens, **{which: broken}), objective)[1]
    assert bool(gradient[3].isnan())


# Aggregation: nothing but global counts


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(ALL),
    st.sampled_from(["token", "sequence", "constant"]),
    st.lists(st.integers(0, 3), min_size=6, max_size=6),
    st.integers(0, 100),
)
def test_gradient_does_not_depend_on_the_division_into_parts(
    name: str, aggregation: str, part_of_sample: list[int], seed: int
) -> None:
    aggregation = "sequence" if name == "gspo" else aggregation
    objective = _objective(
        loss=name, aggregation=aggregation, kl_coefficient=0.1, entropy_coefficient=0.1
    )
    tokens = _batch(seed)
    totals = losses.Totals(len(tokens.logp_N), len(part_of_sample))
    whole = _differentiated(tokens, objective, totals)
    value, gradient = 0.0, torch.zeros_like(tokens.logp_N)
    part_N = torch.tensor(part_of_sample)[tokens.sample_N]
    for part in set(part_of_sample):
        rows = (part_N == part).nonzero().squeeze(1)
        found = _differentiated(_select(tokens, rows), objective, totals)
        value += float(found[0])
        gradient[rows] = found[1]
    assert value == pytest.approx(float(whole[0]), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(gradient, whole[1], rtol=1e-9, atol=1e-12)


@given(st.permutations(range(36)))
@settings(max_examples=20, deadline=None)
def test_order_of_tokens_does_not_matter(order: list[int]) -> None:
    tokens, objective = _batch(5), _objective(loss="gspo", clip_epsilon=0.2)
    rows = torch.tensor(order)
    shuffled = replace(_select(tokens, rows), sample_N=tokens.sample_N[rows])
    expected = _differentiated(tokens, objective)[1]
    torch.testing.assert_close(_differentiated(shuffled, objective)[1], expected[rows])


# KL: values and gradients over a whole distribution


def _kl_gradient(estimator: str, theta: Tensor, behaviour: Tensor, reference: Tensor) -> Tensor:
    """Return the expected gradient of an estimator for logits `theta`, sampled from `behaviour`."""
    leaf = theta.clone().requires_grad_()
    logp = leaf.log_softmax(0)
    found = losses.kl_divergence(logp, reference, logp - behaviour, estimator)
    (gradient,) = torch.autograd.grad((behaviour.exp() * found).sum(), leaf)
    return gradient


def _exact_gradient(theta: Tensor, reference: Tensor, *, reverse: bool) -> Tensor:
    leaf = theta.clone().requires_grad_()
    logp = leaf.log_softmax(0)
    p, q = (logp, reference) if reverse else (reference, logp)
    (gradient,) = torch.autograd.grad((p.exp() * (p - q)).sum(), leaf)
    return gradient


def _logits(seed: int) -> Tensor:
    return torch.randn(30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "reverse"), [("k1", True), ("k2", True), ("k3", False), ("k3_weighted", True)]
)
def test_kl_gradient_on_policy_is_that_of_a_divergence(estimator: str, reverse: bool) -> None:
    theta, reference = _logits(0), _logits(1).log_softmax(0)
    found = _kl_gradient(estimator, theta, theta.log_softmax(0), reference)
    expected = _exact_gradient(theta, reference, reverse=reverse)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3_weighted"])
def test_weighted_kl_gradient_is_exact_off_policy_too(estimator: str) -> None:
    theta, reference = _logits(0), _logits(1).log_softmax(0)
    found = _kl_gradient(estimator, theta, _logits(2).log_softmax(0), reference)
    torch.testing.assert_close(found, _exact_gradient(theta, reference, reverse=True))


@pytest.mark.parametrize("estimator", ["k1", "k3", "k3_weighted"])
def test_kl_value_is_the_divergence_on_average(estimator: str) -> None:
    logp, reference = _logits(0).log_softmax(0), _logits(1).log_softmax(0)
    exact = float((logp.exp() * (logp - reference)).sum())
    found = losses.kl_divergence(logp, reference, torch.zeros_like(logp), estimator)
    assert float((logp.exp() * found).sum()) == pytest.approx(exact)


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_k3_is_never_negative_and_zero_when_equal(logp: float, reference: float) -> None:
    a, b = torch.tensor(logp).double(), torch.tensor(reference).double()
    assert float(losses.kl_divergence(a, b, a, "k3")) >= 0
    assert float(losses.kl_divergence(a, a, a, "k3")) == 0


# Bad input


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"kl_coefficient": 0.1}, "reference_N"),
        ({"entropy_coefficient": 0.1}, "entropy_N"),
        ({"decoupled": True}, "proximal_N"),
    ],
)
def test_missing_tensor_is_named(values: dict[str, object], missing: str) -> None:
    whole = _batch(0)
    bare = losses.Tokens(whole.logp_N, whole.behaviour_N, whole.advantage_N, whole.sample_N)
    with pytest.raises(ValueError, match=missing):
        losses.token_loss(bare, _objective(**values))
