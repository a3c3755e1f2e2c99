"""A micro-batch's part of an optimiser step's gradient.

Losses that look at one token at a time get their slopes while the log-probabilities are made (one
pass); losses with a ratio or weight per sample need all of its tokens first (recompute). Both give
the same gradient.

Axes: N completion tokens of a micro-batch, R of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from muster.protocol.objective import ObjectiveRecipe
from muster.trainer.losses import TokenLoss, Tokens, Totals, is_token_level, token_loss, weights
from muster.trainer.packing import MicroBatch
from muster.trainer.passes import Passes

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Given:
    """What a micro-batch's loss is computed from besides the policy in training; all [N]."""

    behaviour_N: Tensor | None
    """Log-probabilities under the versions that sampled; none when that is the policy itself."""
    advantage_N: Tensor
    """The advantage of each token's sample."""
    sample_N: Tensor
    """Which sample each token belongs to."""
    proximal_N: Tensor | None
    """Log-probabilities before the training step; none when that is the policy itself."""
    reference_N: Tensor | None
    """Log-probabilities under the base model, if the loss has a KL term."""

    def tokens(self, logp_R: Tensor, entropy_R: Tensor, rows: slice = ALL) -> Tokens:
        """Return some tokens as a loss takes them."""
        own_R = logp_R.detach()
        return Tokens(
            logp_R,
            own_R if self.behaviour_N is None else self.behaviour_N[rows],
            self.advantage_N[rows],
            self.sample_N[rows],
            proximal_N=own_R if self.proximal_N is None else self.proximal_N[rows],
            entropy_N=entropy_R,
            reference_N=None if self.reference_N is None else self.reference_N[rows],
        )


def accumulate(
    passes: Passes,
    batch: MicroBatch,
    given: Given,
    totals: Totals,
    objective: ObjectiveRecipe,
    longest: int,
) -> tuple[TokenLoss, Tensor]:
    """Add a micro-batch's gradient to the weights'; returns its loss parts and entropy [N].

    `longest` is the recipe's max_new_tokens.
    """
    weight_N = weights(given.sample_N, totals, objective, longest).float()
    if is_token_level(objective):

        def loss_of(logp_R: Tensor, entropy_R: Tensor, rows: slice) -> Tensor:
            tokens = given.tokens(logp_R, entropy_R, rows)
            return token_loss(tokens, objective).loss_N * weight_N[rows]

        loss, logp_N, entropy_N = passes.objective(batch, loss_of)
        parts = token_loss(given.tokens(logp_N, entropy_N), objective)
    else:
        logp_N, entropy_N = passes.logprobs(batch)
        parts = token_loss(given.tokens(logp_N, entropy_N), objective)
        loss = (parts.loss_N * weight_N).sum()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's stub
    return parts, entropy_N.detach()
