"""A micro-batch's gradient: the same in one pass as by recomputing, for every loss."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from muster.protocol.objective import LossName, ObjectiveRecipe
from muster.trainer.learn import learner
from muster.trainer.learn.learner import LossInputs, loss_of
from muster.trainer.learn.losses import Totals, is_token_level
from muster.trainer.learn.packing import TrainingSample
from muster.trainer.learn.passes import Passes
from muster.trainer.learn.persistence import named_weights

VARIANTS: dict[str, Mapping[str, Any]] = {
    **{name: {"loss": name} for name in get_args(LossName)},
    "decoupled": {"decoupled": True},
    "decoupled by sample": {"decoupled": True, "correction_level": "sequence"},
    "everything": {
        "kl_estimator": "k3_weighted",
        "drift_coefficient": 0.1,
        "entropy_coefficient": 0.1,
    },
}


def _gradient(folder: Path, objective: ObjectiveRecipe, *, is_own: bool) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    base = named_weights(AutoModelForCausalLM.from_pretrained(folder))
    passes = Passes(model, lambda _: base, temperature=1.0, micro_batch_tokens=1000)
    samples = [
        TrainingSample((3, 4), tuple(5 + (i * j) % 7 for j in range(3 + i)), 1.0, 0)
        for i in range(4)
    ]
    (batch,) = passes.pack(samples)
    generator = torch.Generator().manual_seed(0)
    noise_N = torch.randn(len(batch.targets_N), generator=generator)
    given = LossInputs(
        None if is_own else passes.current(batch) + 0.3 * noise_N,
        torch.tensor([1.0, -2.0, 0.5, -0.1])[batch.row_N],
        batch.row_N,
        None if is_own else passes.current(batch) + 0.1 * noise_N.flip(0),
        passes.current(batch) + 0.1,
    )
    loss, parts, entropy_N = loss_of(
        passes, batch, given, Totals(len(noise_N), len(samples)), objective, 20
    )
    loss.backward()
    assert len(parts.loss_N) == len(entropy_N) == len(noise_N)
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_pass_and_recomputing_agree(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, variant: str, is_own: bool
) -> None:
    objective = ObjectiveRecipe(**VARIANTS[variant])
    found = _gradient(model_folder, objective, is_own=is_own)
    monkeypatch.setattr(learner, "is_token_level", lambda _: False)
    expected = _gradient(model_folder, objective, is_own=is_own)
    assert float(expected.norm()) > 1e-3
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_only_losses_with_something_per_sample_are_not_token_level() -> None:
    by_sample = [n for n, v in VARIANTS.items() if not is_token_level(ObjectiveRecipe(**v))]
    assert by_sample == ["gspo", "decoupled by sample"]
