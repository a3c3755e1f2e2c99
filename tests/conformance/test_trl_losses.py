"""Losses that TRL has too equal TRL's: values and gradients, to float64's precision."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from muster.protocol.objective import ObjectiveRecipe
from muster.trainer.learn.losses import Tokens, Totals, token_loss, total

VECTORS = json.loads((Path(__file__).parent / "vectors" / "trl_losses.json").read_text())
MASK = torch.tensor(VECTORS["inputs"]["mask"], dtype=torch.bool)


def _flat(name: str) -> Tensor:
    """The real tokens of a padded input."""
    return torch.tensor(VECTORS["inputs"][name], dtype=torch.float64)[MASK]


def _tokens(*, decoupled: bool) -> Tokens:
    sample_N = MASK.nonzero()[:, 0]
    advantages = torch.tensor(VECTORS["inputs"]["advantages"], dtype=torch.float64)
    return Tokens(
        _flat("logp").requires_grad_(),
        _flat("sampler" if decoupled else "old"),
        advantages[sample_N],
        sample_N,
        proximal_N=_flat("old"),
        entropy_N=_flat("entropy").requires_grad_(),
        reference_N=_flat("reference"),
    )


def _computed(recipe: dict[str, Any]) -> tuple[float, Tensor, Tensor | None]:
    bare = {"kl_coefficient": 0.0, "entropy_coefficient": 0.0}
    objective = ObjectiveRecipe.model_validate({**bare, **recipe})
    tokens = _tokens(decoupled=objective.decoupled)
    parts = token_loss(tokens, objective)
    totals = Totals(int(MASK.sum()), len(MASK))
    loss = total(parts.loss_N, tokens.sample_N, totals, objective, VECTORS["longest"])
    assert tokens.entropy_N is not None
    leaves = [tokens.logp_N, tokens.entropy_N]
    by_logp, by_entropy = torch.autograd.grad(loss, leaves, allow_unused=True)
    return float(loss.detach()), by_logp, by_entropy


@pytest.mark.parametrize("name", VECTORS["cases"])
def test_loss_and_gradient_are_those_of_trl(name: str) -> None:
    case = VECTORS["cases"][name]
    loss, by_logp, by_entropy = _computed(case["recipe"])
    assert loss == pytest.approx(case["loss"], rel=1e-12)
    theirs = torch.tensor(case["by_logp"], dtype=torch.float64)
    torch.testing.assert_close(by_logp, theirs[MASK], rtol=1e-12, atol=1e-15)
    if case["by_entropy"] is not None:
        assert by_entropy is not None
        theirs = torch.tensor(case["by_entropy"], dtype=torch.float64)
        torch.testing.assert_close(by_entropy, theirs[MASK], rtol=1e-12, atol=1e-15)


def test_cases_differ_from_one_another() -> None:
    """The comparison fails for a wrong loss: otherwise it would prove nothing."""
    losses = [case["loss"] for case in VECTORS["cases"].values()]
    assert len({round(loss, 9) for loss in losses}) == len(losses)
