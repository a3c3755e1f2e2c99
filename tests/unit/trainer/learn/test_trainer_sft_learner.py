"""The step of supervised fine-tuning: its loss, its gradient and its rate, written a second way."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from muster.protocol.ids import Step
from muster.protocol.sft import SftRecipe
from muster.trainer.learn.packing import TrainingSample
from muster.trainer.learn.recompute import Lane
from muster.trainer.learn.sft_learner import SftLearner, rate_of
from muster.trainer.publish.policies import BASE, PolicyShelf

SAMPLES = [
    TrainingSample((3, 4, 5), (6, 7, 8, 1)),
    TrainingSample((3, 4, 5), (9, 1)),
    TrainingSample((12, 4), (3, 10, 11, 7, 3, 2, 1), replies=((2, 4),)),
    TrainingSample((13,), (5, 1)),
]
"""Two that share a prompt, one with a reply."""
TARGETS = [4, 2, 5, 2]
"""Tokens of each that are trained on."""


def make_recipe(**training: Any) -> SftRecipe:
    values = {"batch_tokens": 64, "learning_rate": 1e-3, "warmup_steps": 0, "max_grad_norm": 1e9}
    return SftRecipe.model_validate(
        {"name": "test", "rows": {"max_tokens": 64}, "training": {**values, **training}}
    )


@pytest.fixture
def make(model_folder: Path, tmp_path: Path) -> Any:
    shelf = PolicyShelf(tmp_path / "policies")
    shelf.adopt(model_folder)

    def made(**options: Any) -> SftLearner:
        recipe = options.pop("recipe", make_recipe())
        return SftLearner(shelf.path(BASE), recipe, published=shelf.weights, **options)

    return made


def labelled(sample: TrainingSample) -> tuple[Tensor, Tensor]:
    """Return a row and its labels as transformers takes them: -100 is not trained on."""
    tokens = torch.tensor([[*sample.prompt_tokens, *sample.completion_tokens]])
    labels, start = tokens.clone(), len(sample.prompt_tokens)
    labels[:, :start] = -100
    for a, b in sample.replies:
        labels[:, start + a : start + b] = -100
    return tokens, labels


def reference(folder: Path, samples: list[TrainingSample]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradient by transformers' own loss, each row alone and unpacked."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = torch.zeros(()), sum(sample.sampled for sample in samples)
    for sample in samples:
        tokens, labels = labelled(sample)
        total = total + model(input_ids=tokens, labels=labels).loss * sample.sampled
    (total / count).backward()
    return float(total.detach()) / count, {n: p.grad for n, p in model.named_parameters()}


def gradients(learner: SftLearner) -> dict[str, Tensor]:
    """Return the gradient of the first step, out of AdamW's mean of gradients."""
    named = learner.model.named_parameters()
    return {name: learner.optimizer.state[p]["exp_avg"] / 0.1 for name, p in named}


@pytest.mark.parametrize("micro_batch_tokens", [4, 64])
def test_loss_and_gradient_are_transformers_own(
    make: Any, model_folder: Path, micro_batch_tokens: int
) -> None:
    learner = make(micro_batch_tokens=micro_batch_tokens)
    figures = learner.step(Step(1), Step(9), SAMPLES)
    loss, expected = reference(model_folder, SAMPLES)
    assert figures.loss == pytest.approx(loss, abs=1e-6)
    assert figures.tokens == sum(TARGETS)
    for name, gradient in gradients(learner).items():
        assert float((gradient - expected[name]).abs().max()) < 1e-6, name


def test_gradient_is_the_same_when_inputs_of_blocks_wait_on_the_host(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners = make(), make(recomputed="host"), make(recomputed="host")
    for learner in learners[:2]:
        learner.step(Step(1), Step(9), SAMPLES)
    monkeypatch.setattr(Lane, "copy", lambda _, source, target: target.copy_(source.roll(1, 1)))
    learners[2].step(Step(1), Step(9), SAMPLES)
    kept, sent, wrong = (
        torch.cat([value.flatten() for value in gradients(learner).values()])
        for learner in learners
    )
    assert torch.equal(sent, kept)
    assert not torch.equal(wrong, kept)


def test_loss_is_the_mean_of_minus_log_p_by_hand(make: Any, model_folder: Path) -> None:
    sample = SAMPLES[1]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[3, 4, 5, 9]])).logits[0].tolist()

    def surprise(row: list[float], token: int) -> float:
        return math.log(sum(math.exp(z) for z in row)) - row[token]

    by_hand = (surprise(logits[2], 9) + surprise(logits[3], 1)) / 2
    assert make().held_out([sample]).loss == pytest.approx(by_hand, abs=1e-6)


def test_rows_of_a_batch_do_not_see_one_another(make: Any) -> None:
    learner = make()
    alone = [learner.held_out([sample]) for sample in SAMPLES]
    together = learner.held_out(SAMPLES)
    assert [found.tokens for found in alone] == TARGETS
    mean = sum(found.loss * found.tokens for found in alone) / together.tokens
    assert together.loss == pytest.approx(mean, abs=1e-6)


def test_a_reply_changes_what_follows_it_and_is_not_trained_on(make: Any) -> None:
    learner, (_, _, replied, _) = make(), SAMPLES
    other = TrainingSample(replied.prompt_tokens, (3, 10, 4, 4, 3, 2, 1), replies=replied.replies)
    trained = TrainingSample(replied.prompt_tokens, replied.completion_tokens)
    assert learner.held_out([other]).tokens == learner.held_out([replied]).tokens == 5
    assert learner.held_out([other]).loss != learner.held_out([replied]).loss
    assert learner.held_out([trained]).tokens == 7


def test_the_same_steps_give_the_same_bits(make: Any) -> None:
    one, two = make(), make()
    for learner in (one, two):
        for step in (1, 2):
            learner.step(Step(step), Step(2), SAMPLES)
    weights = two.weights()
    assert all(torch.equal(value, weights[name]) for name, value in one.weights().items())


def test_an_adapter_alone_is_trained(make: Any) -> None:
    recipe = make_recipe().model_copy(
        update={"adapter": make_recipe().adapter.model_copy(update={"rank": 2})}
    )
    learner = make(recipe=recipe)
    before = learner.held_out(SAMPLES).loss
    base = {n: p.clone() for n, p in learner.model.named_parameters() if not p.requires_grad}
    for step in range(1, 4):
        learner.step(Step(step), Step(3), SAMPLES)
    assert learner.held_out(SAMPLES).loss < before
    assert all(torch.equal(p, base[n]) for n, p in learner.model.named_parameters() if n in base)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        # After the warm-up of 2: a cosine from 0 in steps of pi / 4, down to a rate of 0.2.
        ("cosine", [0.5, 1.0, 1.0, 0.8828427, 0.6, 0.3171573]),
    ],
)
def test_rates_are_those_by_hand(schedule: str, rates: list[float]) -> None:
    training = make_recipe(
        learning_rate=1.0, warmup_steps=2, schedule=schedule, final_rate=0.2
    ).training
    found = [rate_of(training, Step(step), Step(6)) for step in range(1, 7)]
    assert found == pytest.approx(rates, abs=1e-6)
