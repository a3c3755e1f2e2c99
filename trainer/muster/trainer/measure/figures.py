"""The trainer's figures: their names, units and values, and the log lines made of them.

A figure has one name everywhere: in `metrics.jsonl`, at the orchestrator, in Prometheus (with the
prefix `muster_trainer_`) and in W&B. `docs/reference/metrics.md` is generated from the tables here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor

from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import Recipe
from muster.trainer.learn.losses import TokenLoss
from muster.trainer.stream.filters import Drop, PartTally, Pool, named

if TYPE_CHECKING:
    from muster.trainer.measure.evaluate import Estimate, Evaluation
    from muster.trainer.stream.reader import Shortage, StepInput


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of a training step."""

    reward: float
    """Mean task reward of all samples, those left out included."""
    samples: int
    """Samples trained on."""
    tokens: int
    """Completion tokens trained on."""
    dropped: Counter[Drop]
    """Samples left out, by reason."""
    loss: float
    """Mean of the loss over tokens, whatever the aggregation."""
    grad_norm: float
    """Largest gradient norm of the step's optimiser steps, before clipping."""
    entropy: float
    """Mean entropy of the policy at the trained tokens, in nats."""
    clip_fraction: float
    """Share of tokens whose term in the loss was clipped."""
    clip_low: float
    """Share of tokens with negative advantage that were clipped."""
    clip_high: float
    """Share of tokens with positive advantage that were clipped."""
    mean_ratio: float
    """Mean probability ratio to the behaviour policy."""
    max_ratio: float
    """Largest probability ratio to the behaviour policy."""
    mismatch_kl: float
    """KL divergence of the policy before the step from the behaviour policies, per token: the mean
    of ratio - 1 - log(ratio) in the first optimiser step."""
    mismatch_max: float
    """Largest absolute log-ratio to the behaviour policy in the first optimiser step."""
    kl: float
    """Mean estimate of the divergence from the base model; 0 when the recipe has no KL term."""
    learning_rate: float
    """Learning rate of its optimiser steps."""
    skipped: int
    """Optimiser steps skipped because loss or gradient was not finite."""
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Seconds of the slowest rank in each of `PHASES`."""
    flops: float = 0.0
    """Floating-point operations of the model, without recomputation."""
    memory_bytes: float = field(default=0.0, compare=False)
    """Peak memory of the largest process so far, or of its GPU."""


PHASES = ("policies_s", "forward_s", "backward_s", "optimizer_s", "held_s")
"""Parts of a training step whose durations are measured."""


@dataclass(slots=True)
class Sums:
    """Sums and maxima over the tokens of a training step."""

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clip_low: float = 0.0
    clip_high: float = 0.0
    kl: float = 0.0
    ratio: float = 0.0
    max_ratio: float = 0.0
    grad_norm: float = 0.0
    skipped: int = 0
    first_tokens: int = 0
    mismatch_kl: float = 0.0
    mismatch_max: float = 0.0
    policies_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    held_s: float = 0.0
    flops: float = 0.0
    memory_bytes: float = 0.0

    def add(
        self, parts: TokenLoss, advantage_N: Tensor, entropy_N: Tensor, *, is_first: bool
    ) -> None:
        """Count a micro-batch; `is_first` when no optimiser step was taken before it."""
        ratio_N = parts.ratio_N
        self.tokens += len(ratio_N)
        self.loss += float(parts.loss_N.detach().sum())
        self.entropy += float(entropy_N.detach().sum())
        self.clip_low += float((parts.clipped_N & (advantage_N < 0)).sum())
        self.clip_high += float((parts.clipped_N & (advantage_N > 0)).sum())
        self.ratio += float(ratio_N.sum())
        self.max_ratio = max(self.max_ratio, float(ratio_N.max()))
        if parts.kl_N is not None:
            self.kl += float(parts.kl_N.sum())
        if is_first:
            log_ratio_N = ratio_N.log()
            self.first_tokens += len(ratio_N)
            self.mismatch_kl += float((ratio_N - 1 - log_ratio_N).sum())
            self.mismatch_max = max(self.mismatch_max, float(log_ratio_N.abs().max()))

    def include(self, other: Sums, largest: frozenset[str]) -> None:
        """Add the sums of `other`; of the fields named in `largest`, keep the larger value."""
        for name in self.__slots__:
            own, more = getattr(self, name), getattr(other, name)
            setattr(self, name, max(own, more) if name in largest else own + more)

    def figures(
        self, *, reward: float, samples: int, dropped: Counter[Drop], learning_rate: float
    ) -> StepFigures:
        """Return the step's figures; those per token are 0 when nothing was trained on."""
        tokens = max(1, self.tokens)
        return StepFigures(
            reward=reward,
            samples=samples,
            tokens=self.tokens,
            dropped=dropped,
            loss=self.loss / tokens,
            grad_norm=self.grad_norm,
            entropy=self.entropy / tokens,
            clip_fraction=(self.clip_low + self.clip_high) / tokens,
            clip_low=self.clip_low / tokens,
            clip_high=self.clip_high / tokens,
            mean_ratio=self.ratio / tokens,
            max_ratio=self.max_ratio,
            mismatch_kl=self.mismatch_kl / max(1, self.first_tokens),
            mismatch_max=self.mismatch_max,
            kl=self.kl / tokens,
            learning_rate=learning_rate,
            skipped=self.skipped,
            seconds={phase: getattr(self, phase) for phase in PHASES},
            flops=self.flops,
            memory_bytes=self.memory_bytes,
        )


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity."""

    unit: str
    meaning: str
    """One line for people."""


STEP: Mapping[str, Figure] = {
    "step": Figure("steps", "Training step."),
    "policy_version": Figure("version", "Policy version that the step made."),
    "reward": Figure("score", "Mean task reward of all samples consumed, those left out included."),
    "loss": Figure("nats/token", "Mean loss."),
    "grad_norm": Figure("L2", "Largest gradient norm of the step, before clipping."),
    "entropy": Figure("nats/token", "Mean entropy of the policy at the trained tokens."),
    "clip_fraction": Figure("share", "Trained tokens whose term in the loss was clipped."),
    "clip_low": Figure("share", "Trained tokens with negative advantage that were clipped."),
    "clip_high": Figure("share", "Trained tokens with positive advantage that were clipped."),
    "mean_ratio": Figure("ratio", "Mean probability ratio to the policy that sampled."),
    "max_ratio": Figure("ratio", "Largest probability ratio to the policy that sampled."),
    "mismatch_kl": Figure("nats/token", "KL divergence from the policies that sampled."),
    "mismatch_max": Figure("nats", "Largest |log-ratio| to those policies before the step."),
    "kl": Figure("nats/token", "Mean divergence from the base model; 0 without a KL term."),
    "learning_rate": Figure("1", "Learning rate of the step."),
    "samples": Figure("samples", "Samples trained on."),
    "tokens": Figure("tokens", "Completion tokens trained on."),
    "skipped": Figure("steps", "Optimiser steps skipped: gradient not finite."),
    "grad_growth": Figure("ratio", "Level of the gradient norm over its lowest level."),
    "entropy_rise": Figure("share", "Rise of the entropy above its lowest level, over its first."),
    "reward_fall": Figure("share", "Fall of the reward below its highest level, over that level."),
    "alarm_steps": Figure("steps", "Alarming steps in a row, with this one; 0 without alarm."),
    "rolled_back_to": Figure("version", "After a collapse: version whose weights were restored."),
    "refill": Figure("records", "Records consumed beyond the step's share, without stale ones."),
    "stream_from": Figure("records", "Where in the training stream the step began."),
    "stream_to": Figure("records", "Where it ended."),
    "age_mean": Figure("versions", "Mean age of the policies that sampled the trained rollouts."),
    "age_max": Figure("versions", "Largest of them."),
    "wall_s": Figure("seconds", "Duration of the training step without waiting for records."),
    "wait_s": Figure("seconds", "How long the step waited for its records."),
    "policies_s": Figure("seconds", "Of wall_s: passes of earlier and reference policies."),
    "forward_s": Figure("seconds", "Of wall_s: forward passes, with the gradient of the head."),
    "backward_s": Figure("seconds", "Of wall_s: backward passes."),
    "optimizer_s": Figure("seconds", "Of wall_s: clipping and optimiser."),
    "held_s": Figure("seconds", "Of wall_s: waiting until the version before is written."),
    "save_s": Figure("seconds", "Delay of the step by saving the version before."),
    "publish_s": Figure("seconds", "Delay of the step by publishing the version before that."),
    "evaluate_s": Figure("seconds", "Delay of the step by an evaluation."),
    "tokens_per_s": Figure("tokens/s", "Trained completion tokens divided by wall_s."),
    "tflops": Figure("10^12/s", "Operations of all ranks divided by wall_s."),
    "mfu": Figure("share", "tflops divided by the measured or given peak."),
    "memory_gb": Figure("10^9 bytes", "Peak memory so far of the largest process, or of its GPU."),
    **{f"dropped_{drop}": Figure("samples", _) for drop, _ in (
        (Drop.STALE, "Left out: policy too many versions old."),
        (Drop.UNREADABLE, "Left out: file does not match its record."),
        (Drop.MISSING, "Left out: nobody had the file."),
        (Drop.DUPLICATE, "Left out: file or sampling seed was seen before."),
        (Drop.TRUNCATED, "Left out: token limit reached without EOS."),
        (Drop.ZERO_ADVANTAGE, "Left out: all task rewards of the group are equal."),
        (Drop.EASY, "Left out: problem is solved (nearly) always."),
        (Drop.HARD, "Left out: problem is solved (nearly) never."),
        (Drop.NON_FINITE, "Left out: log-probability is not finite."),
        (Drop.MISMATCH, "Left out: does not look sampled from the policy it names."),
    )},
    "pools_active": Figure("problems", "Problems seen that are trained on; with pools only."),
    "pools_easy": Figure("problems", "Problems set aside as too easy."),
    "pools_hard": Figure("problems", "Problems set aside as too hard."),
    "part_P_groups": Figure("groups", "Of part P: groups consumed; in a mixture only."),
    "part_P_reward": Figure("score", "Of part P: mean task reward of its samples."),
    "part_P_kept": Figure("share", "Of part P: groups that are trained on."),
    "part_P_length": Figure("tokens", "Of part P: mean length of a completion."),
    "part_P_easy": Figure("problems", "Of part P: set aside as too easy; with pools only."),
    "part_P_hard": Figure("problems", "Of part P: set aside as too hard."),
}  # fmt: skip
"""Figures of every training step, by name."""

EVALUATION: Mapping[str, Figure] = {
    "eval_policy_version": Figure("version", "Policy version evaluated."),
    "eval_reward": Figure("score", "avg@k: mean score on the held-out problems that were graded."),
    "eval_reward_low": Figure("score", "Lower end of its 95 % interval."),
    "eval_reward_high": Figure("score", "Upper end of its 95 % interval."),
    "eval_pass_at_K": Figure("share", "pass@K, unbiased; K = 1, 2, 4, … up to the samples."),
    "eval_pass_at_K_low": Figure("share", "Lower end of its 95 % interval."),
    "eval_pass_at_K_high": Figure("share", "Upper end of its 95 % interval."),
    "eval_problems": Figure("problems", "Problems that could be graded."),
    "eval_ungraded": Figure("problems", "Problems that could not."),
    "eval_samples": Figure("samples", "Samples per problem."),
    "eval_length": Figure("tokens", "Mean length of a completion."),
    "eval_truncated": Figure("share", "Completions that reached the token limit without EOS."),
    "eval_length_error": Figure("tokens", "Mean |length - target|; with length budgets only."),
    "eval_within_budget": Figure("share", "Completions no longer than their target."),
    "eval_part_P_reward": Figure("score", "Of part P of the held-out set: mean score."),
    "eval_part_P_reward_low": Figure("score", "Of part P: lower end of its 95 % interval."),
    "eval_part_P_reward_high": Figure("score", "Of part P: upper end of its 95 % interval."),
    "eval_part_P_problems": Figure("problems", "Of part P: problems that could be graded."),
}
"""Figures of every evaluation, by name."""

OF_TOKENS = (
    *("loss", "grad_norm", "entropy", "clip_fraction", "clip_low", "clip_high", "mean_ratio"),
    *("max_ratio", "mismatch_kl", "mismatch_max", "kl"),
)
"""Figures that exist only if the step trained on tokens."""
HELD_UP = ("save_s", "publish_s", "evaluate_s")
"""Delays of a training step, besides waiting for records."""
OF_SPEED = ("wall_s", "wait_s", *PHASES, "tokens_per_s", "mfu", "memory_gb")
"""Figures of speed in a training step's log line."""
UNREPEATABLE = frozenset({*OF_SPEED, *HELD_UP, "tflops"})
"""Figures that differ when the same step is taken again."""
PREFIX = "muster_trainer_"
"""Prefix of every name in Prometheus."""


def flat(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return an entry's numbers under the names that the orchestrator accepts: nested keys are
    joined by an underscore.

    Lists, such as `uses`, stay in `metrics.jsonl` only.
    """
    found: dict[str, float] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            found |= {f"{name}_{inner}": number for inner, number in flat(value).items()}
        elif value is not None and not isinstance(value, list):
            found[name] = float(value)
    return found


_OF_PART = re.compile(
    r"^((?:eval_)?part_)([a-z0-9_]+?)(_(?:reward|reward_low|reward_high|[a-z]+))$"
)


def split_part(name: str) -> tuple[str, str]:
    """Return a figure's name with P in place of its part, and the name of the part. A figure
    without a part keeps its name, and the second value is empty.
    """
    found = _OF_PART.match(name)
    if found is None:
        return name, ""
    before, part, after = found.groups()
    return f"{before}P{after}", part


def meaning_of(name: str) -> str:
    """Return the meaning of a figure. pass@k is listed once, with K for the number; figures of a
    mixture's parts are listed once, with P for the part.
    """
    known = {**STEP, **EVALUATION}
    name, _ = split_part(name)
    if name in known:
        return known[name].meaning
    digits = "".join(c for c in name if c.isdigit())
    generic = known.get(name.replace(digits, "K", 1)) if digits else None
    return generic.meaning if generic else ""


# Lines of the log


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of a training step and of the delays before it."""

    wait_s: float
    """Seconds of waiting for its records."""
    wall_s: float
    """Seconds of the step, once its records were there."""
    before: Mapping[str, float] = field(default_factory=dict)
    """Seconds of other delays, by the names of figures."""


def step_entry(
    version: PolicyVersion,
    taken: StepInput,
    figures: StepFigures,
    took: Durations,
    recipe: Recipe,
    *,
    peak_flops: float = 0.0,
) -> dict[str, Any]:
    """Return the line of a training step; step s makes policy version s.

    Figures per token are None when no token was trained on: they are unknown, not 0. `peak_flops`
    is the peak operations per second of all ranks together; 0 when unknown.
    """
    # A clock that stands still must not end the run with a division by zero.
    wall_s = max(took.wall_s, 1e-9)
    entry: dict[str, Any] = {
        "step": int(version),
        "policy_version": int(version),
        "reward": taken.reward,
        **{name: _known(getattr(figures, name), figures.tokens) for name in OF_TOKENS},
        "learning_rate": figures.learning_rate,
        "samples": figures.samples,
        "tokens": figures.tokens,
        "skipped": figures.skipped,
        "dropped": named(taken.dropped + figures.dropped),
        "refill": taken.refill,
        "stream_from": taken.start.position,
        "stream_to": taken.end.position,
        "uses": [use.to_json() for use in taken.uses],
        **_ages(version, taken),
        "wall_s": round(took.wall_s, 4),
        "wait_s": round(took.wait_s, 4),
        **{name: round(s, 4) for name, s in {**took.before, **figures.seconds}.items()},
        "tokens_per_s": figures.tokens / wall_s,
        "tflops": figures.flops / wall_s / 1e12,
        "mfu": figures.flops / wall_s / peak_flops if peak_flops else None,
        "memory_gb": figures.memory_bytes / 1e9,
    }
    names = [part.name for part in recipe.tasks.parts]
    if any(each.filters.pool_window for each in recipe.rules):
        sizes = [Counter(taken.pools.sizes(each)) for each in recipe.rules]
        entry["pools"] = {str(pool): sum(size[pool] for size in sizes) for pool in Pool}
    if names:
        entry["part"] = {name: _of_part(name, taken, recipe) for name in names}
    return entry


def _of_part(name: str, taken: StepInput, recipe: Recipe) -> dict[str, float | None]:
    """Return a part's figures; means over its groups are None when it had no group."""
    tally, rules = taken.parts.get(name, PartTally()), recipe.rules_of(name)
    samples, groups = tally.samples, tally.groups
    found: dict[str, float | None] = {
        "groups": groups,
        "reward": tally.reward / samples if samples else None,
        "kept": tally.kept / groups if groups else None,
        "length": tally.tokens / samples if samples else None,
    }
    if rules.filters.pool_window:
        sizes = taken.pools.sizes(rules)
        found |= {"easy": sizes[Pool.EASY], "hard": sizes[Pool.HARD]}
    return found


def _ages(version: PolicyVersion, taken: StepInput) -> dict[str, float]:
    """Return how many versions behind the step's start the sampling policies were."""
    ages = [version - 1 - r.policy_version for group in taken.groups for r in group]
    return {"age_mean": fmean(ages), "age_max": max(ages)} if ages else {}


def _known(value: float, tokens: int) -> float | None:
    return value if tokens and math.isfinite(value) else None


def evaluation_entry(evaluation: Evaluation) -> dict[str, Any]:
    """Return the line of an evaluation."""
    entry: dict[str, Any] = {
        "policy_version": int(evaluation.policy_version),
        **_share("reward", evaluation.reward),
        "problems": evaluation.problems,
        "ungraded": evaluation.ungraded,
        "samples": evaluation.samples,
        "length": evaluation.length,
        "truncated": evaluation.truncated,
    }
    for k, share in evaluation.pass_at.items():
        entry |= _share(f"pass_at_{k}", share)
    if evaluation.adherence is not None:
        entry["length_error"] = evaluation.adherence.error_tokens
        entry["within_budget"] = evaluation.adherence.within
    if evaluation.parts:
        entry["part"] = {
            name: {**_share("reward", part.reward), "problems": part.problems}
            for name, part in evaluation.parts.items()
        }
    return {"eval": entry}


def _share(name: str, share: Estimate | None) -> dict[str, float | None]:
    value, low, high = (share.value, share.low, share.high) if share else (None, None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def shortage_figures(shortage: Shortage) -> dict[str, float]:
    """Return the figures that make the orchestrator lease more work for a waiting step."""
    return {"stream_from": float(shortage.stream_from), "refill": float(shortage.refill)}
