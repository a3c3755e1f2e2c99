"""The tensors of a training step: policy, optimiser, behaviour and reference policies.

Owns torch and nothing else: no network, no chain. Blocking; the loop runs it in a thread.

Axes: N completion tokens of a micro-batch, R of them.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from muster.inference.policy_files import keep_caps
from muster.protocol.errors import ConfigError
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.objective import ObjectiveRecipe
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Rollout
from muster.trainer.learn.advantages import Kept, keep_informative, without_mismatch
from muster.trainer.learn.losses import (
    TokenLoss,
    Tokens,
    Totals,
    is_token_level,
    token_loss,
    weights,
)
from muster.trainer.learn.optimizer import SmallAdamW, StateFile, StateType
from muster.trainer.learn.packing import MicroBatch, Sample, balance
from muster.trainer.learn.parallel import ONE_PROCESS, Ranks, Team, whole
from muster.trainer.learn.passes import ComputeType, Known, Passes, require_dense
from muster.trainer.learn.persistence import (
    Weights,
    adapter_weights,
    add_adapter,
    load_weights,
    restore_state,
    start_of,
    state_template,
    trained_weights,
    training_state,
)
from muster.trainer.learn.recompute import Recompute
from muster.trainer.learn.sharded import Blueprint, ShardedPasses, blueprint_of, empty_model
from muster.trainer.measure.figures import PHASES, StepFigures, Sums
from muster.trainer.measure.throughput import Stopwatch

logger = logging.getLogger(__name__)


LARGEST = frozenset({"max_ratio", "mismatch_max", "grad_norm", "skipped"})
"""Fields of `Sums` of which the largest counts: they are not added up over ranks."""
OF_SLOWEST = LARGEST | {*PHASES, "memory_bytes"}
"""Those of which the largest rank's counts."""


RELEASE_LOOK_S = 1.0
"""Seconds after which ranks that wait for one another's disks hear from one another."""


class RankWork(NamedTuple):
    """One rank's share of an optimiser step."""

    samples: list[Sample]
    """The rank's samples; none when there are fewer groups than ranks."""
    totals: Totals
    """Counts over all ranks, by which the loss is divided."""


@dataclass(slots=True)
class _OptimizerStep:
    samples: list[Sample]
    totals: Totals
    batches: list[MicroBatch]
    known: list[Known]
    """What fixed policies say of each sample."""
    proximal: list[Tensor] = field(default_factory=list)
    """Log-probabilities before the training step, per micro-batch; empty where not needed."""


class Learner:
    """A policy in training."""

    def __init__(
        self,
        model: Path | Blueprint,
        recipe: Recipe,
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

        With a team rank 0 has the base model's folder, and the others its blueprint and no weights.
        """
        self._recipe = recipe
        self._device = torch.device(device)
        self._watch = Stopwatch(self._device)
        self.learning_rate_scale = 1.0
        """Factor on the recipe's learning rate."""
        self._ranks: Ranks = team or ONE_PROCESS
        self._held = threading.Event()
        self._held.set()
        if offload is not None and team is not None:
            raise ConfigError(
                "one process alone keeps its optimiser's state in a file",
                hint="--no-offload: ranks share the state",
            )
        own = _load(model, self._device if team is None else torch.device("cpu"))
        if recipe.adapter.rank:
            add_adapter(own, recipe.adapter)
        self.model = own.train()
        options: dict[str, Any] = {
            "temperature": recipe.sampling.temperature,
            "micro_batch_tokens": micro_batch_tokens,
            "compute_dtype": compute_dtype,
            "recomputed": recomputed,
        }

        if team is None:
            self._passes = Passes(self.model, published, **options)
        else:
            blueprint = model if isinstance(model, Blueprint) else blueprint_of(own)
            start = {
                "micro_batch_tokens": micro_batch_tokens,
                "compute_dtype": compute_dtype,
                "recomputed": recomputed,
                "optimizer_state": optimizer_state,
                "offload": offload,
            }
            team.lead("start", (recipe.to_bytes(), blueprint, start))
            self._passes = ShardedPasses(own, blueprint, published, team, **options)
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

    def step(self, step: Step, groups: Sequence[Sequence[Rollout]]) -> StepFigures:
        """Take the optimiser steps of one training step; the same input gives the same weights."""
        looking = Sums()
        with self._watch.during(looking, "policies_s"):
            kept = self._without_mismatch(keep_informative(groups, self._recipe.training))
        rewards = [rollout.task_reward for group in groups for rollout in group]
        mini_batches = _mini_batches(kept.samples, self._recipe.training.optimizer_steps, step)
        rate = self._learning_rate(step)
        sums = self._take_together(rate, mini_batches)
        if sums.skipped and not self._recipe.filters.max_mismatch:
            with self._watch.during(looking, "policies_s"):
                kept = without_mismatch(kept, self._surprise_of(kept), math.inf)
            broken, rest = _parted(mini_batches, kept.samples)
            sums.skipped -= broken
            sums.include(self._take_together(rate, rest), LARGEST | {"memory_bytes"})
        sums.include(looking, LARGEST | {"memory_bytes"})
        return sums.figures(
            reward=sum(rewards) / max(1, len(rewards)),
            samples=sum(map(len, kept.samples)),
            dropped=kept.dropped,
            learning_rate=rate,
        )

    def _take_together(self, rate: float, mini_batches: list[list[list[Sample]]]) -> Sums:
        """Have all ranks take an optimiser step on each mini-batch; returns their sums."""
        work = _dealt(mini_batches, self._ranks.size)
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
        """Return what is trained, live and as it is sharded: the policy's parameters and buffers,
        tied ones once, or its adapter.
        """
        return trained_weights(self.model)

    def pieces(self, formats: Mapping[str, torch.dtype]) -> Iterator[tuple[str, Tensor]]:
        """Return what gives the weights whole on rank 0, in this order and these formats, some
        rows of a tensor at a time; on all ranks, and any thread may draw them.

        While they are drawn the weights must not change: see `hold`.
        """
        self._ranks.lead("pieces", dict(formats))
        weights = self.weights()
        return (
            (name, piece)
            for name, dtype in formats.items()
            for piece in self._ranks.pieces(weights[name], dtype)
        )

    def hold(self) -> Callable[[], None]:
        """Leave what `weights` and `state` returned as it is, until what this returns is called.

        Whatever changes a weight or the optimiser's state waits for that; passes do not, but for
        those of earlier policies over several ranks.
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

        One process has no need to wait: there they stand in as tensors of their own.
        """
        if self._ranks.size > 1:
            self._await_release()

    def start(self, base: Weights) -> dict[str, Tensor]:
        """Return the state, without optimiser, of version 0: the base model's weights."""
        weights = start_of(adapter_weights(self.model)) or base
        return {f"model.{name}": value for name, value in weights.items()}

    def load(self, weights: Weights | None) -> None:
        """Continue from a policy's weights, with the optimiser as it is; rank 0 has them."""
        self._ranks.lead("load")
        self._await_release()
        with self._ranks.watch("taking over a policy"):
            load_weights(self.model, weights)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that the next step depends on, by name; live, not copies."""
        return training_state(self.model, self.optimizer, rank=self._ranks.rank)

    def like(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return tensors to read a saved state of these sizes into."""
        return state_template(self.model, sizes)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state as `state` returned it, also in a process before this one."""
        self._ranks.lead("restore")
        self._await_release()
        restore_state(self.model, self.optimizer, state, rank=self._ranks.rank)

    def surprise(self, samples: Sequence[Sample]) -> list[float]:
        """Return the mismatch of all ranks' samples on rank 0; on all ranks together."""
        with self._ranks.watch("looking for mismatch"):
            self._await_shards()
            parts = self._ranks.gather(self._passes.surprise(samples))
            return [excess for part in parts for excess in part]

    def _without_mismatch(self, kept: Kept) -> Kept:
        limit = self._recipe.filters.max_mismatch
        if not limit:
            return kept
        return without_mismatch(kept, self._surprise_of(kept), limit)

    def _surprise_of(self, kept: Kept) -> list[float]:
        """Return `Passes.surprise` of all samples in order, computed by all ranks."""
        samples = [sample for group in kept.samples for sample in group]
        parts = _even_parts(samples, self._ranks.size)
        self._ranks.lead("surprise", *parts)
        return self.surprise(parts[0])

    def _learning_rate(self, step: Step) -> float:
        training = self._recipe.training
        warm = min(1.0, step / training.warmup_steps) if training.warmup_steps else 1.0
        return training.learning_rate * warm * self.learning_rate_scale

    def _planned(self, work: Sequence[RankWork]) -> list[_OptimizerStep]:
        """Pack each optimiser step's samples; a decoupled objective fixes its proximal policy."""
        self._passes.refresh()
        self._await_shards()
        known = self._passes.read_policies(
            [share.samples for share in work],
            with_reference=self._recipe.training.kl_coefficient > 0,
        )
        steps = [
            _OptimizerStep(share.samples, share.totals, self._passes.pack(share.samples), own)
            for share, own in zip(work, known, strict=True)
        ]
        if self._recipe.training.decoupled:
            # The first optimiser step still has the proximal policy's weights.
            for step in steps[1:]:
                step.proximal = [self._passes.current(batch) for batch in step.batches]
        return steps

    def _optimizer_step(self, step: _OptimizerStep, sums: Sums, *, is_first: bool) -> None:
        self._passes.refresh()
        objective, longest = self._recipe.training, self._recipe.sampling.max_new_tokens
        self.optimizer.zero_grad(set_to_none=True)
        is_finite = True
        for i, batch in enumerate(step.batches):
            if not batch.order:
                self._passes.accompany(batch)
                continue
            advantage_B = torch.tensor([step.samples[j].advantage for j in batch.order])
            given = LossInputs(
                self._behaviour(step, batch),
                advantage_B[batch.row_N].to(self._device),
                batch.row_N.to(self._device),
                step.proximal[i] if step.proximal else None,
                _joined([step.known[j].reference for j in batch.order]),
            )
            with self._watch.during(sums, "forward_s"):
                loss, parts, entropy_N = loss_of(
                    self._passes, batch, given, step.totals, objective, longest
                )
            with self._watch.during(sums, "backward_s"):
                loss.backward()  # type: ignore[no-untyped-call]  # torch's stub
            # A clip has slope 0 where the ratio is nan: the gradient alone would not show it.
            if bool(parts.loss_N.isfinite().all()):
                sums.add(parts, given.advantage_N, entropy_N, is_first=is_first)
            else:
                is_finite = False
        self._descend(sums, is_finite=all(self._ranks.gather(is_finite)))

    def _behaviour(self, step: _OptimizerStep, batch: MicroBatch) -> Tensor | None:
        """Return log-probabilities [N] under the versions that sampled; none for the policy itself.

        In a micro-batch of several versions one may be the policy itself.
        """
        parts = [step.known[j].behaviour for j in batch.order]
        if any(part is not None for part in parts) and any(part is None for part in parts):
            own = torch.split(self._passes.current(batch), batch.row_N.bincount().tolist())
            parts = [o if p is None else p for o, p in zip(own, parts, strict=True)]
        return _joined(parts)

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


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of a micro-batch's loss besides the policy in training; all [N]."""

    behaviour_N: Tensor | None
    """Log-probabilities under the versions that sampled; none when that is the policy itself."""
    advantage_N: Tensor
    """The advantage of each token's sample."""
    sample_N: Tensor
    """Number of the sample that each token belongs to."""
    proximal_N: Tensor | None
    """Log-probabilities before the training step; none when that is the policy itself."""
    reference_N: Tensor | None
    """Log-probabilities under the base model, if the loss has a KL term."""

    def tokens(self, logp_R: Tensor, entropy_R: Tensor, rows: slice = slice(None)) -> Tokens:
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


def loss_of(
    passes: Passes,
    batch: MicroBatch,
    given: LossInputs,
    totals: Totals,
    objective: ObjectiveRecipe,
    longest: int,
) -> tuple[Tensor, TokenLoss, Tensor]:
    """Return a micro-batch's loss with its gradient, its parts, and the entropy [N].

    Losses that look at one token at a time get their slopes while the log-probabilities are made,
    in one pass; losses with a ratio or weight per sample need all of its tokens first, and
    recompute them. Both give the same gradient.

    `longest` is the recipe's max_new_tokens.
    """
    weight_N = weights(given.sample_N, totals, objective, longest).float()
    if is_token_level(objective):

        def of_tokens(logp_R: Tensor, entropy_R: Tensor, rows: slice) -> Tensor:
            tokens = given.tokens(logp_R, entropy_R, rows)
            return token_loss(tokens, objective).loss_N * weight_N[rows]

        loss, logp_N, entropy_N = passes.objective(batch, of_tokens)
        parts = token_loss(given.tokens(logp_N, entropy_N), objective)
    else:
        logp_N, entropy_N = passes.logprobs(batch)
        parts = token_loss(given.tokens(logp_N, entropy_N), objective)
        loss = (parts.loss_N * weight_N).sum()
    return loss, parts, entropy_N.detach()


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return all parts in one tensor; none if there are none."""
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None


def _load(model: Path | Blueprint, device: torch.device) -> Any:
    if isinstance(model, Blueprint):
        return empty_model(model.config)
    require_dense(AutoConfig.from_pretrained(model))
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    keep_caps(loaded)
    return loaded.to(device)


def _mini_batches(groups: list[list[Sample]], count: int, step: Step) -> list[list[list[Sample]]]:
    """Deal whole groups to `count` mini-batches of about equal size; none of them is empty."""
    order = list(groups)
    random.Random(f"step {step}").shuffle(order)
    return [dealt for dealt in (order[i::count] for i in range(count)) if dealt]


def _parted(
    mini_batches: list[list[list[Sample]]], kept: list[list[Sample]]
) -> tuple[int, list[list[list[Sample]]]]:
    """Return how many mini-batches have samples that are not kept, and what is left of those."""
    whole = {id(sample) for group in kept for sample in group}
    left = [[[s for s in group if id(s) in whole] for group in groups] for groups in mini_batches]
    broken = [part for part, all_of in zip(left, mini_batches, strict=True) if part != all_of]
    rest = [[group for group in groups if group] for groups in broken]
    return len(broken), [groups for groups in rest if groups]


def _even_parts(samples: list[Sample], count: int) -> list[list[Sample]]:
    """Cut samples into so many runs of about equal number."""
    ends = [len(samples) * i // count for i in range(count + 1)]
    return [samples[a:b] for a, b in pairwise(ends)]


def _dealt(mini_batches: list[list[list[Sample]]], ranks: int) -> list[list[RankWork]]:
    """Return every rank's share of each optimiser step: whole groups, about equal work."""
    work: list[list[RankWork]] = [[] for _ in range(ranks)]
    for groups in mini_batches:
        lengths = [sample.sampled for group in groups for sample in group]
        totals = Totals(tokens=sum(lengths), samples=len(lengths))
        for rank, own in enumerate(balance(groups, ranks)):
            work[rank].append(RankWork([sample for group in own for sample in group], totals))
    return work
