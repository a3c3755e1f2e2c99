"""A recipe has its whole objective, and no field that its loss would ignore."""

from typing import Any

import pytest
from pydantic import ValidationError

from muster.protocol.objective import LOSS_DEFAULTS, ObjectiveRecipe
from muster.protocol.recipe import Recipe, SamplingRecipe, TrainingRecipe


def _recipe(**training: Any) -> Recipe:
    sampling = SamplingRecipe(
        problems_per_submission=1,
        samples_per_problem=2,
        temperature=1.0,
        max_new_tokens=8,
        target_lengths=(4, 8),
    )
    return Recipe(
        name="x", sampling=sampling, training=TrainingRecipe(submissions_per_step=1, **training)
    )


@pytest.mark.parametrize("loss", LOSS_DEFAULTS)
def test_document_says_the_parameters_of_its_loss(loss: str) -> None:
    objective = ObjectiveRecipe.model_validate({"loss": loss})
    for name, value in LOSS_DEFAULTS[loss].items():
        assert getattr(objective, name) == value
    recipe = _recipe(loss=loss)
    assert Recipe.from_bytes(recipe.to_bytes()) == recipe


@pytest.mark.parametrize(
    ("given", "high"),
    [
        ({}, 0.2),
        ({"clip_epsilon": 0.3}, 0.3),
        ({"clip_epsilon": 0.3, "clip_epsilon_high": 0.4}, 0.4),
        ({"loss": "dapo", "clip_epsilon": 0.1}, 0.28),
    ],
)
def test_upper_epsilon_follows_the_lower(given: dict[str, Any], high: float) -> None:
    assert ObjectiveRecipe.model_validate(given).clip_epsilon_high == high


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "ppo"}, "two_sided"),
        ({"loss": "grpo", "clip_delta": 3.0}, "clip_delta 3.0 has no effect with loss 'grpo'"),
        ({"loss": "masked_is", "clip_epsilon": 0.1}, "clip_epsilon 0.1 has no effect"),
        ({"ratio_high": 3.0}, "ratio_high 3.0 has no effect with loss 'two_sided'"),
        ({"loss": "gspo", "aggregation": "token"}, "set aggregation to 'sequence'"),
        ({"clip_epsilon_high": 3.5}, "must exceed 1 \\+ clip_epsilon_high"),
        ({"correction": "mask"}, "not decoupled"),
        ({"length_delta": 0.1}, "length_reward 'exact'"),
        ({"length_weight": 2.0}, "length_advantage 'joint'"),
        ({"clip_epsilon": 0.0}, "greater than 0"),
        ({"kl_coefficient": float("nan")}, "finite"),
    ],
)
def test_objective_that_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ObjectiveRecipe.model_validate(given)


def test_max_rl_refuses_rewards_that_can_be_negative() -> None:
    with pytest.raises(ValidationError, match="set length_advantage"):
        _recipe(advantage="max_rl")
    assert _recipe(advantage="max_rl", length_advantage="mean").training.advantage == "max_rl"
    assert _recipe(advantage="max_rl", length_reward="max").training.length_reward == "max"
