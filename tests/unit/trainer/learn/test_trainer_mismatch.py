"""Mismatch: a policy's own samples fit it, others do not, and NaN fits no policy."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from torch import Tensor
from trainer_fakes import make_recipe, with_filters
from transformers import AutoModelForCausalLM

from muster.inference import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.advantages import Kept, without_mismatch
from muster.trainer.learn.learner import Learner
from muster.trainer.learn.packing import TrainingSample
from muster.trainer.publish.policies import BASE
from muster.trainer.stream.filters import Drop

Weights = Mapping[str, Tensor]
LIMIT = 1.5


def _recipe(limit: float = LIMIT) -> Recipe:
    return with_filters(make_recipe(), max_mismatch=limit)


def _honest(model_folder: Path, groups: int = 8) -> list[list[Rollout]]:
    """Return groups that the base model sampled; every other sample is rewarded."""
    recipe, engine = make_recipe(), TransformersEngine()
    engine.load_policy(model_folder, BASE)
    requests = [
        Request(engine.encode(f"{1000 + 37 * g}="), 100 * g + i, 1.0, 6)
        for g in range(groups)
        for i in range(4)
    ]
    made = engine.generate(requests, proof=recipe.proof)
    rows = [
        Rollout("p", n // 4, n % 4, n, -1, 0, r.prompt_tokens, c.tokens, b"", float(n % 2))
        for n, (r, c) in enumerate(zip(requests, made, strict=True))
    ]
    return [rows[n : n + 4] for n in range(0, len(rows), 4)]


def _samples(groups: list[list[Rollout]]) -> list[TrainingSample]:
    return [
        TrainingSample(r.prompt_tokens, r.completion_tokens, 0.0, r.policy_version)
        for group in groups
        for r in group
    ]


def _unlikely(folder: Path, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return five tokens, each the least likely one under the policy."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    said: tuple[int, ...] = ()
    for _ in range(5):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *said]])).logits[0, -1]
        said = (*said, int(logits.argmin()))
    return said


def test_surprise_of_honest_samples_is_zero_in_the_mean(model_folder: Path, base: Weights) -> None:
    learner = Learner(model_folder, _recipe(), published=lambda _: base)
    found = learner.surprise(_samples(_honest(model_folder, groups=64)))
    # 256 samples of some 5 tokens; a token's surprise deviates by about one nat.
    assert abs(fmean(found)) < 0.12
    assert sum(abs(value) > LIMIT for value in found) <= 3


def test_surprise_is_computed_by_hand(model_folder: Path, base: Weights) -> None:
    learner = Learner(model_folder, _recipe(), published=lambda _: base)
    (sample,) = _samples(_honest(model_folder, groups=1))[:1]
    tokens = torch.tensor([[*sample.prompt_tokens, *sample.completion_tokens]])
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        logits = model(tokens).logits[0, len(sample.prompt_tokens) - 1 : -1]
    logp = torch.log_softmax(logits.double(), -1)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp[range(len(sample.completion_tokens)), list(sample.completion_tokens)]
    (found,) = learner.surprise([sample])
    assert found == pytest.approx(float((-chosen - entropy).mean()), abs=1e-5)


def test_foreign_sample_is_left_out_and_the_rest_trained_on(
    model_folder: Path, base: Weights
) -> None:
    groups = _honest(model_folder, groups=2)
    honest = Learner(model_folder, _recipe(), published=lambda _: base)
    said = _unlikely(model_folder, groups[1][2].prompt_tokens)
    before = honest.step(Step(1), groups)
    groups[1][2] = replace(groups[1][2], completion_tokens=said)
    after = Learner(model_folder, _recipe(), published=lambda _: base).step(Step(1), groups)
    assert after.dropped[Drop.MISMATCH] == before.dropped[Drop.MISMATCH] + 1
    assert after.samples == before.samples - 1


def test_without_a_limit_nothing_is_looked_at(model_folder: Path, base: Weights) -> None:
    learner = Learner(model_folder, _recipe(0.0), published=lambda _: base)
    groups = _honest(model_folder, groups=1)
    said = _unlikely(model_folder, groups[0][2].prompt_tokens)
    groups[0][2] = replace(groups[0][2], completion_tokens=said)
    assert learner.step(Step(1), groups).samples == 4


def test_policy_that_is_no_number_trains_nothing(model_folder: Path, base: Weights) -> None:
    broken = {name: weight * math.nan for name, weight in base.items()}
    learner = Learner(model_folder, _recipe(), published=lambda v: broken if v == 3 else base)
    groups = _honest(model_folder, groups=2)
    groups[1] = [replace(r, policy_version=3) for r in groups[1]]
    figures = learner.step(Step(4), groups)
    assert figures.dropped[Drop.NON_FINITE] == 4
    assert figures.skipped == 0
    assert all(torch.isfinite(p).all() for p in learner.model.parameters())


def _with_a_broken_policy(model_folder: Path, base: Weights, steps: int) -> Learner:
    """Return a learner without a limit; version 3 has NaN weights."""
    broken = {name: weight * math.nan for name, weight in base.items()}
    recipe = _recipe(0.0)
    training = recipe.training.model_copy(update={"optimizer_steps": steps})
    recipe = recipe.model_copy(update={"training": training})
    return Learner(model_folder, recipe, published=lambda v: broken if v == 3 else base)


def test_policy_that_is_no_number_trains_nothing_without_the_filter(
    model_folder: Path, base: Weights
) -> None:
    learner = _with_a_broken_policy(model_folder, base, 1)
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    groups = [[replace(r, policy_version=3) for r in group] for group in _honest(model_folder, 1)]
    figures = learner.step(Step(4), groups)
    assert (figures.dropped[Drop.NON_FINITE], figures.tokens) == (4, 0)
    assert figures.loss == 0.0
    assert all(torch.equal(weight, before[name]) for name, weight in learner.weights().items())


@pytest.mark.parametrize("steps", [1, 2])
def test_samples_that_are_no_number_do_not_cost_the_others(
    model_folder: Path, base: Weights, steps: int
) -> None:
    groups = _honest(model_folder, groups=3)
    poisoned = [groups[0], [replace(r, policy_version=3) for r in groups[1]], groups[2]]
    learner = _with_a_broken_policy(model_folder, base, steps)
    figures = learner.step(Step(4), poisoned)
    assert figures.dropped[Drop.NON_FINITE] == 4
    assert figures.skipped == 0
    assert figures.samples == 8
    assert math.isfinite(figures.loss)
    if steps == 1:
        clean = _with_a_broken_policy(model_folder, base, 1)
        clean.step(Step(4), [groups[0], groups[2]])
        for name, weight in clean.weights().items():
            torch.testing.assert_close(learner.weights()[name], weight, rtol=1e-5, atol=1e-7)


def test_limit_counts_in_both_directions() -> None:
    samples = [TrainingSample((1,), (2,), float(i), PolicyVersion(0)) for i in range(5)]
    kept = Kept([samples[:3], samples[3:]], Counter({Drop.ZERO_ADVANTAGE: 7}))
    left = without_mismatch(kept, [1.5, -1.6, 0.0, math.nan, 1.6], 1.5)
    assert left.samples == [[samples[0], samples[2]]]
    assert left.dropped == {Drop.ZERO_ADVANTAGE: 7, Drop.MISMATCH: 2, Drop.NON_FINITE: 1}
