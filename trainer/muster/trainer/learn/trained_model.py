"""A model in training, whatever its loss is: weights, optimiser, passes, ranks, state.

Owns torch and nothing else: no network, no chain. Blocking; the flow runs it in a thread.
Subclasses define the samples of an optimiser step and their loss: `learner` for reinforcement
learning, `sft_learner` for supervised fine-tuning.

Axes: N completion tokens of a micro-batch.
"""

import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from muster.inference.policy_files import keep_caps, require_fixed_positions
from muster.protocol.errors import ConfigError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe
from muster.protocol.sft import SftRecipe
from muster.trainer.learn.context import ContextPasses
from muster.trainer.learn.losses import TokenLoss, Totals
from muster.trainer.learn.optimizer import SmallAdamW, StateFile, StateType
from muster.trainer.learn.packing import MicroBatch, TrainingSample, balance
from muster.trainer.learn.parallel import ONE_PROCESS, Ranks, Team, is_finite, whole
from muster.trainer.learn.passes import ComputeType, Passes, require_dense
from muster.trainer.learn.persistence import (
    Weights,
    add_adapter,
    forget_state,
    load_weights,
    restore_state,
    state_template,
    trained_weights,
    training_state,
)
from muster.trainer.learn.recompute import Recompute
from muster.trainer.learn.sharded import Blueprint, ShardedPasses, blueprint_of, empty_model
from muster.trainer.measure.figures import PHASES, Sums
from muster.trainer.measure.throughput import Stopwatch

logger = logging.getLogger(__name__)


LARGEST = frozenset({"max_ratio", "mismatch_max", "grad_norm", "skipped"})
"""Fields of `Sums` that combine by maximum, not by sum."""
OF_SLOWEST = LARGEST | {*PHASES, "memory_bytes"}
"""Fields that combine by maximum over ranks."""


LOGITS = "logits"
"""What is not finite where every weight is."""
RELEASE_LOOK_S = 1.0
"""Seconds between checks of ranks that wait for one another's disks."""


class RankWork(NamedTuple):
    """One rank's share of an optimiser step; ranks that share rows have the same."""

    samples: list[TrainingSample]
    """The rank's samples; empty when there are fewer groups than ranks."""
    totals: Totals
    """Counts over all ranks, by which the loss is divided."""


@dataclass(slots=True)
class PackedStep:
    """An optimiser step of this rank, packed."""

    samples: list[TrainingSample]
    """The rank's samples."""
    totals: Totals
    """Counts over all ranks."""
    batches: list[MicroBatch]
    """The samples as they go through the model."""


class BatchLoss(NamedTuple):
    """A micro-batch's part of an optimiser step's loss."""

    loss: Tensor
    """The sum to differentiate; the gradients of all micro-batches and ranks add up."""
    parts: TokenLoss
    """The loss of each token, and its parts."""
    advantage_N: Tensor
    """The advantage of each token's sample."""
    entropy_N: Tensor
    """Entropy of the policy at each token, detached."""


RecipeType = TypeVar("RecipeType", Recipe, SftRecipe)
StepType = TypeVar("StepType", bound=PackedStep)


class TrainedModel(ABC, Generic[RecipeType, StepType]):
    """A model in training by one kind of recipe."""

    def __init__(
        self,
        model: Path | Blueprint,
        recipe: RecipeType,
        *,
        published: Callable[[PolicyVersion], Weights | None],
        micro_batch_tokens: int = 16_384,
        device: str = "cpu",
        compute_dtype: ComputeType = "float32",
        recomputed: Recompute = "none",
        optimizer_state: StateType = "float32",
        offload: Path | None = None,
        team: Team | None = None,
    ) -> None:
        """`published` gives a published version's weights, exactly as workers got them. The
        optimiser's state is in a file of the folder `offload`, if there is one.

        `model` is the base model's folder; with a team, ranks other than 0 get its blueprint.
        """
        self._recipe: RecipeType = recipe
        self._device = torch.device(device)
        self._watch = Stopwatch(self._device)
        self._ranks: Ranks = team or ONE_PROCESS
        self._held = threading.Event()
        self._held.set()
        if offload is not None and team is not None:
            raise ConfigError(
                "--offload works with one process only",
                hint="use --no-offload: ranks share the optimiser's state",
            )
        with self._ranks.beating():
            own = _load(model, self._device if team is None else torch.device("cpu"))
        if recipe.adapter.rank:
            add_adapter(own, recipe.adapter)
        self.model = own.train()
        options: dict[str, Any] = {
            "temperature": self._temperature(),
            "micro_batch_tokens": micro_batch_tokens,
            "compute_dtype": compute_dtype,
            "recomputed": recomputed,
        }
        if team is None:
            self._passes = Passes(self.model, published, **options)
        else:
            blueprint = model if isinstance(model, Blueprint) else blueprint_of(own)
            require_parts(own, blueprint, team)
            start = {
                "micro_batch_tokens": micro_batch_tokens,
                "compute_dtype": compute_dtype,
                "recomputed": recomputed,
                "optimizer_state": optimizer_state,
                "offload": offload,
            }
            team.lead("start", (type(self), recipe, blueprint, start))
            kind = ShardedPasses if team.context_group is None else ContextPasses
            self._passes = kind(own, blueprint, published, team, **options)
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self._optimizer(optimizer_state, offload)

    def _optimizer(self, state: StateType, folder: Path | None) -> torch.optim.Optimizer:
        training = self._recipe.training
        options: dict[str, Any] = {
            "lr": training.learning_rate,
            "betas": (training.adam_beta1, training.adam_beta2),
            "weight_decay": training.weight_decay,
        }
        if state == "float32" and folder is None:
            fused = self._ranks is ONE_PROCESS
            return torch.optim.AdamW(self._trained, fused=fused, **options)
        file = None if folder is None else StateFile(folder)
        rank = self._ranks.rank
        return SmallAdamW(self._trained, dtype=state, file=file, rank=rank, **options)

    def _take_together(self, rate: float, mini_batches: list[list[list[TrainingSample]]]) -> Sums:
        """Have all ranks take an optimiser step on each mini-batch; returns their sums."""
        work = dealt(mini_batches, self._ranks.groups)
        self._ranks.lead("take", *((rate, share) for share in work))
        return self.take(rate, work[0])

    def take(self, rate: float, work: Sequence[RankWork]) -> Sums:
        """Take a training step's optimiser steps on this rank's work; on all ranks together.

        Returns the sums over all ranks.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums = Sums()
        with self._ranks.watch("a training step"):
            with self._watch.during(sums, "policies_s"):
                planned = self._planned(work)
            for i, step in enumerate(planned):
                self._optimizer_step(step, sums, is_first=i == 0)
            # Nothing needs the last gradient, and the next step's policies take as much memory.
            self.optimizer.zero_grad(set_to_none=True)
            sums.flops, sums.memory_bytes = self._passes.spent(), self._watch.memory_bytes()
            self._ranks.merge(sums, OF_SLOWEST)
        return sums

    def weights(self) -> dict[str, Tensor]:
        """Return what is trained, live, each rank its shards: the policy's parameters and buffers,
        tied ones once, or its adapter.
        """
        return trained_weights(self.model)

    def pieces(self, formats: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator that yields the whole weights on rank 0, in the order and formats of
        `formats`, some rows of a tensor at a time; on all ranks, and any thread may consume it.

        Until it ends the weights must not change: see `hold`.
        """
        self._ranks.lead("pieces", dict(formats))
        weights = self.weights()
        return (
            (name, piece)
            for name, dtype in formats.items()
            for piece in self._ranks.pieces(weights[name], dtype)
        )

    def fault(self, formats: Mapping[str, torch.dtype]) -> str | None:
        """Return what of the model is not finite: the name of a weight that holds NaN or infinity,
        or would in its format of `formats`, or LOGITS when a short pass gives some; None when all
        is finite. On all ranks together.
        """
        self._ranks.lead("fault", dict(formats))
        with self._ranks.watch("looking for what is not finite"):
            if found := list(filter(None, self._ranks.gather(self._own_fault(formats)))):
                return found[0]
            self._passes.refresh()
            return None if self._passes.is_finite() else LOGITS

    def _own_fault(self, formats: Mapping[str, torch.dtype]) -> str | None:
        """Return which of this rank's weights is not finite."""
        for name, value in self.weights().items():
            if not is_finite(value):
                return name
            if name in formats and not is_finite(value, formats[name]):
                return f"{name} in {formats[name]}"
        return None

    def hold(self) -> Callable[[], None]:
        """Keep the tensors of `weights` and `state` as they are until the result is called.

        Everything that changes a weight or the optimiser's state waits for that call. Passes do not
        wait, except those of earlier policies over several ranks.
        """
        held = threading.Event()
        self._held = held
        return held.set

    def _await_release(self) -> None:
        """Return when no rank's tensors are held any more; on all ranks together."""
        # In short turns, so that a rank whose disk is slow is not taken for one that is gone.
        while not all(self._ranks.gather(self._held.wait(RELEASE_LOOK_S))):
            pass

    def _await_shards(self) -> None:
        """Return when earlier policies may be read into the tensors of a sharded model.

        One process has no need to wait: there earlier policies have tensors of their own.
        """
        if self._ranks.size > 1:
            self._await_release()

    def load(self, weights: Weights | None, *, is_fresh: bool = False) -> None:
        """Continue from a policy's weights, with a fresh optimiser or as it is; rank 0 has them."""
        self._ranks.lead("load", is_fresh)
        self._await_release()
        with self._ranks.watch("taking over a policy"):
            load_weights(self.model, weights)
        for parameter in self._trained if is_fresh else ():
            forget_state(self.optimizer, parameter)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that the next step depends on, by name; live, not copies."""
        return training_state(self.model, self.optimizer, rank=self._ranks.rank)

    def like(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return the tensors to read a saved state of these sizes into: the live ones, which are
        nobody's state until all of it is read. Raises ValueError for another architecture's sizes.
        """
        self._await_release()
        return state_template(self.model, self.optimizer, sizes)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that `state` returned, perhaps in an earlier process."""
        self._ranks.lead("restore")
        self._await_release()
        restore_state(self.model, self.optimizer, state, rank=self._ranks.rank)

    @abstractmethod
    def _temperature(self) -> float:
        """Return the softmax temperature of log-probabilities."""

    @abstractmethod
    def _planned(self, work: Sequence[RankWork]) -> list[StepType]:
        """Return the optimiser steps of a training step, packed; on all ranks together."""

    @abstractmethod
    def _loss(self, step: StepType, number: int) -> BatchLoss:
        """Return the loss of one of a step's micro-batches, with its gradient."""

    def _packed(self, share: RankWork) -> PackedStep:
        return PackedStep(share.samples, share.totals, self._passes.pack(share.samples))

    def _optimizer_step(self, step: StepType, sums: Sums, *, is_first: bool) -> None:
        self._passes.refresh()
        self.optimizer.zero_grad(set_to_none=True)
        is_finite = True
        for i, batch in enumerate(step.batches):
            if not batch.order:
                self._passes.accompany(batch)
                continue
            with self._watch.during(sums, "forward_s"):
                found = self._loss(step, i)
            with self._watch.during(sums, "backward_s"):
                found.loss.backward()  # type: ignore[no-untyped-call]  # torch's stub
            # A clip has slope 0 where the ratio is nan: the gradient alone would not show it.
            if not bool(found.parts.loss_N.isfinite().all()):
                is_finite = False
            elif self._ranks.is_first:
                sums.add(found.parts, found.advantage_N, found.entropy_N, is_first=is_first)
        self._descend(sums, is_finite=all(self._ranks.gather(is_finite)))

    def _descend(self, sums: Sums, *, is_finite: bool) -> None:
        """Take the optimiser step, unless the loss or the gradient is not finite."""
        most = self._recipe.training.max_grad_norm
        with self._watch.during(sums, "optimizer_s"):
            norm = float(whole(torch.nn.utils.clip_grad_norm_(self._trained, most)))
        if not (is_finite and math.isfinite(norm)):
            sums.skipped += 1
            logger.error("optimiser step skipped: loss or gradient is not finite")
            self.optimizer.zero_grad(set_to_none=True)
            return
        sums.grad_norm = max(sums.grad_norm, norm)
        with self._watch.during(sums, "held_s"):
            self._await_release()
        with self._watch.during(sums, "optimizer_s"):
            self.optimizer.step()


def _load(model: Path | Blueprint, device: torch.device) -> Any:
    if isinstance(model, Blueprint):
        return empty_model(model.config)
    config = AutoConfig.from_pretrained(model)
    require_dense(config)
    require_fixed_positions(config)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    keep_caps(loaded)
    return loaded.to(device)


def require_parts(model: Any, blueprint: Blueprint, ranks: Ranks) -> None:
    """Raise ConfigError when ranks are to share rows of a model that cannot pack rows."""
    if ranks.context > 1 and not blueprint.is_packed:
        raise ConfigError(
            f"{type(model).__name__} has its own kind of attention, which ranks cannot share",
            hint="use --context-ranks 1",
        )


def even_parts(samples: list[TrainingSample], count: int) -> list[list[TrainingSample]]:
    """Cut samples into `count` runs of about equal length."""
    ends = [len(samples) * i // count for i in range(count + 1)]
    return [samples[a:b] for a, b in pairwise(ends)]


def dealt(mini_batches: list[list[list[TrainingSample]]], ranks: int) -> list[list[RankWork]]:
    """Return every rank's share of each optimiser step: whole groups, about equal work."""
    work: list[list[RankWork]] = [[] for _ in range(ranks)]
    for groups in mini_batches:
        lengths = [sample.sampled for group in groups for sample in group]
        totals = Totals(tokens=sum(lengths), samples=len(lengths))
        for rank, own in enumerate(balance(groups, ranks)):
            work[rank].append(RankWork([sample for group in own for sample in group], totals))
    return work
