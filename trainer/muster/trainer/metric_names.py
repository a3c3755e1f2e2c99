"""Names of everything the trainer measures, all of them, with units, and where they go.

A figure has one name everywhere: in `metrics.jsonl`, at the orchestrator, in Prometheus (with the
prefix `muster_trainer_`) and in W&B. `docs/reference/metrics.md` is generated from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.trainer.filters import Drop


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity."""

    unit: str
    """Its unit."""
    meaning: str
    """What it says, in a line."""


STEP: Mapping[str, Figure] = {
    "step": Figure("steps", "Training step."),
    "policy_version": Figure("version", "Policy version that the step made."),
    "reward": Figure("score", "Mean task reward of all samples consumed, those left out included."),
    "loss": Figure("nats/token", "Mean loss."),
    "grad_norm": Figure("L2", "Largest gradient norm of the step, before clipping."),
    "entropy": Figure("nats/token", "Mean entropy of the policy at the trained tokens."),
    "clip_fraction": Figure("share", "Trained tokens whose part in the loss was bounded."),
    "clip_low": Figure("share", "Those of them with negative advantage."),
    "clip_high": Figure("share", "Those of them with positive advantage."),
    "mean_ratio": Figure("ratio", "Mean probability ratio to the policy that sampled."),
    "max_ratio": Figure("ratio", "Largest probability ratio to the policy that sampled."),
    "mismatch_kl": Figure("nats/token", "Divergence of the policy from those that sampled."),
    "mismatch_max": Figure("nats", "Largest |log-ratio| to them before the step."),
    "kl": Figure("nats/token", "Mean divergence from the base model; 0 without a KL term."),
    "learning_rate": Figure("1", "Learning rate of the step."),
    "samples": Figure("samples", "Samples trained on."),
    "tokens": Figure("tokens", "Completion tokens trained on."),
    "skipped": Figure("steps", "Optimiser steps left out because the gradient was not finite."),
    "grad_growth": Figure("ratio", "Level of the gradient norm over its lowest; for alarms."),
    "entropy_rise": Figure("share", "Level of the entropy above its lowest, of its first."),
    "reward_fall": Figure("share", "Level of the reward below its highest, of that."),
    "alarm_steps": Figure("steps", "Alarming steps in a row, this one included; 0 without alarm."),
    "rolled_back_to": Figure("version", "Whose weights the step's version got; after a collapse."),
    "refill": Figure("records", "Records consumed beyond the step's share, stale ones left out."),
    "stream_from": Figure("records", "Where in the training stream the step began."),
    "stream_to": Figure("records", "Where it ended."),
    "age_mean": Figure("versions", "Mean age of the policies that sampled what was trained on."),
    "age_max": Figure("versions", "Largest of them."),
    "wall_s": Figure("seconds", "Duration of the training step, waiting for records left out."),
    "wait_s": Figure("seconds", "How long the step waited for its records."),
    **{f"dropped_{drop}": Figure("samples", _) for drop, _ in (
        (Drop.STALE, "Left out: policy too many versions old."),
        (Drop.UNREADABLE, "Left out: file is not what its record says."),
        (Drop.DUPLICATE, "Left out: file or sampling seed came before."),
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
}  # fmt: skip
"""Of every training step."""

EVALUATION: Mapping[str, Figure] = {
    "eval_policy_version": Figure("version", "Policy version evaluated."),
    "eval_reward": Figure("score", "avg@k: mean score on the held-out problems."),
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
}
"""Of every evaluation."""

PREFIX = "muster_trainer_"
"""Of every name in Prometheus."""


def flat(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return an entry's numbers by their names: parts of a part are joined by an underscore.

    Lists (`uses`, what became of each record) stay in `metrics.jsonl`.
    """
    found: dict[str, float] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            found |= {f"{name}_{inner}": number for inner, number in flat(value).items()}
        elif value is not None and not isinstance(value, list):
            found[name] = float(value)
    return found


def meaning_of(name: str) -> str:
    """Return what a figure says; pass@k's are listed once, with K for the number."""
    known = {**STEP, **EVALUATION}
    if name in known:
        return known[name].meaning
    digits = "".join(c for c in name if c.isdigit())
    generic = known.get(name.replace(digits, "K", 1)) if digits else None
    return generic.meaning if generic else ""
