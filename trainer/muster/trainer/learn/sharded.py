"""Forward passes whose models are sharded over ranks.

Gathering a block's weights takes all ranks, so all run the same number of passes. A rank that has
fewer micro-batches, or none, computes fillers, whose gradient is zero and which count for nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from muster.inference.policy_files import keep_caps
from muster.protocol.ids import PolicyVersion
from muster.trainer.learn.attention import MASKED, NAME, fastest, understands_packing
from muster.trainer.learn.logprob import Objective
from muster.trainer.learn.packing import MicroBatch, TrainingSample
from muster.trainer.learn.parallel import Team, inside, shard
from muster.trainer.learn.passes import BASE, FILLER, ComputeType, Passes
from muster.trainer.learn.persistence import Weights, load_base
from muster.trainer.learn.recompute import Recompute


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Description from which a rank builds its part of a model, without weights."""

    config: Any
    """The architecture, as transformers describes it."""
    is_packed: bool
    """Whether samples share rows."""


class ShardedPasses(Passes):
    """Forward passes of sharded models over this rank's samples."""

    def __init__(
        self,
        trained: Any,
        blueprint: Blueprint,
        published: Callable[[PolicyVersion], Weights | None],
        team: Team,
        *,
        temperature: float,
        micro_batch_tokens: int,
        compute_dtype: ComputeType = "float32",
        recomputed: Recompute = "none",
    ) -> None:
        """Shards `trained` in place; on rank 0 it has the base model's weights."""
        # Weights are converted as they are gathered, not in a copy.
        super().__init__(
            trained,
            published,
            temperature=temperature,
            micro_batch_tokens=micro_batch_tokens,
            recomputed=recomputed,
            is_packed=blueprint.is_packed,
            is_whole=False,
        )
        self._team = team
        for buffer in trained.buffers():
            team.share(buffer)
        dtype = getattr(torch, compute_dtype)
        shard(trained, team, dtype)
        if self.is_packed:
            # All ranks take the same: those that share rows exchange keys and values in it.
            found = team.gather(fastest(trained, trained.device, dtype))
            trained.set_attn_implementation(MASKED if MASKED in found else NAME)
        load_base(trained, published(BASE))

    def pack(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        """Return the micro-batches of some samples, as many on every rank."""
        batches = super().pack(samples)
        missing = max(self._team.gather(len(batches))) - len(batches)
        if not missing:
            return batches
        (filler,) = super().pack([FILLER])
        return [*batches, *[replace(filler, order=())] * missing]

    def objective(self, batch: MicroBatch, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
        """As `Passes.objective`; on all ranks."""
        model = self._computing.model
        found: tuple[Tensor, Tensor, Tensor] = inside(model, super().objective, batch, objective)
        return found

    def logprobs(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """As `Passes.logprobs`; on all ranks."""
        values: tuple[Tensor, Tensor] = inside(self._computing.model, super().logprobs, batch)
        return values

    def _versions(
        self, samples: Sequence[TrainingSample], more: set[PolicyVersion]
    ) -> list[PolicyVersion]:
        """As `Passes._versions`; those of any rank's samples."""
        own = super()._versions(samples, more)
        return sorted(set().union(*self._team.gather(own)))

    def _is_asked(self, samples: Sequence[TrainingSample]) -> bool:
        """As `Passes._is_asked`, of any rank."""
        return any(self._team.gather(bool(samples)))

    def _is_current(self, weights: Weights | None) -> bool:
        del weights
        # Ranks would have to agree about their shards; they compute the pass instead.
        return False


def blueprint_of(model: Any) -> Blueprint:
    """Return the blueprint from which other ranks build the same model."""
    return Blueprint(model.config, understands_packing(model))


def empty_model(config: Any) -> Any:
    """Return a model in main memory whose weights and buffers are uninitialised.

    Pages that nobody writes to take no memory, so every rank can afford one.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        keep_caps(model)
    model.to_empty(device="cpu")
    model.tie_weights()
    return model
