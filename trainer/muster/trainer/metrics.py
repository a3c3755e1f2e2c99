"""The trainer's figures: one JSON line each in the state folder, and posted to be shown.

Their names and units are in `muster.trainer.metric_names`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from muster.protocol.errors import MusterError, StorageError
from muster.protocol.ids import PolicyVersion
from muster.protocol.recipe import FilterRecipe
from muster.trainer.evaluate import Evaluation
from muster.trainer.figures import StepFigures
from muster.trainer.filters import named
from muster.trainer.metric_names import flat
from muster.trainer.ports import MetricsSink
from muster.trainer.shares import Share
from muster.trainer.stream import Shortage, StepInput

logger = logging.getLogger(__name__)

WAITING_POSTS = 64
"""Posts that wait while the orchestrator is away; the oldest are given up."""


class MetricsLog:
    """`metrics.jsonl`: one line per training step and per evaluation."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def forget_after(self, version: PolicyVersion) -> None:
        """Remove the lines of steps that are about to be taken again, and a torn last line."""
        if self._path.exists():
            kept = [line for line in self._path.read_text().splitlines() if _is_of(line, version)]
            fresh = self._path.with_name(f".{self._path.name}.part")
            fresh.write_text("".join(f"{line}\n" for line in kept))
            fresh.replace(self._path)

    def append(self, entry: dict[str, Any]) -> None:
        """Write one line; raises StorageError when it cannot be written whole."""
        line = json.dumps(entry, allow_nan=False) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(line)
        except OSError as error:
            raise StorageError(
                f"cannot write {self._path}: {error.strerror}",
                hint="free some space and start the trainer again: the step is taken again",
            ) from error

    def evaluated(self) -> set[int]:
        """Return the versions that were evaluated."""
        if not self._path.exists():
            return set()
        entries = [json.loads(line) for line in self._path.read_text().splitlines()]
        return {entry["eval"]["policy_version"] for entry in entries if "eval" in entry}


def _is_of(line: str, version: PolicyVersion) -> bool:
    try:
        entry = json.loads(line)
        number = entry["eval"]["policy_version"] if "eval" in entry else entry["policy_version"]
        return bool(number <= version)
    except (ValueError, LookupError, TypeError):
        return False


class Unshown:
    """Takes figures of a trainer site whose steps another one reports."""

    async def post_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Let them be."""
        del step, metrics


class MetricsPoster:
    """Posts figures in the background; losing some is harmless, waiting for it is not."""

    def __init__(self, sink: MetricsSink) -> None:
        self._sink = sink
        self._queue: asyncio.Queue[tuple[int, dict[str, float]]] = asyncio.Queue(WAITING_POSTS)

    def post(self, step: int, metrics: dict[str, float]) -> None:
        """Post as soon as possible; never waits, never raises."""
        if self._queue.full():
            self._queue.get_nowait()
            self._queue.task_done()
        self._queue.put_nowait((step, metrics))

    async def run(self) -> None:
        """Post what comes, until cancelled."""
        while True:
            step, metrics = await self._queue.get()
            try:
                await self._sink.post_metrics(step, metrics)
            except MusterError as error:
                logger.warning("metrics not posted", extra={"step": step, "error": str(error)})
            finally:
                self._queue.task_done()

    async def drain(self, timeout_s: float) -> None:
        """Wait until everything is posted, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._queue.join(), timeout_s)


@dataclass(frozen=True, slots=True)
class Durations:
    """Where a training step's time went."""

    wait_s: float
    """Until its records were there."""
    wall_s: float
    """From then until the policy was better."""


def step_entry(
    version: PolicyVersion,
    taken: StepInput,
    figures: StepFigures,
    took: Durations,
    filters: FilterRecipe,
) -> dict[str, Any]:
    """Return the line of a training step; step s makes policy version s.

    Figures of tokens are None where none was trained on: they are unknown, not 0.
    """

    def known(value: float) -> float | None:
        return _finite(value) if figures.tokens else None

    entry: dict[str, Any] = {
        "step": int(version),
        "policy_version": int(version),
        "reward": taken.reward,
        "loss": known(figures.loss),
        "grad_norm": known(figures.grad_norm),
        "entropy": known(figures.entropy),
        "clip_fraction": known(figures.clip_fraction),
        "clip_low": known(figures.clip_low),
        "clip_high": known(figures.clip_high),
        "mean_ratio": known(figures.mean_ratio),
        "max_ratio": known(figures.max_ratio),
        "mismatch_kl": known(figures.mismatch_kl),
        "mismatch_max": known(figures.mismatch_max),
        "kl": known(figures.kl),
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
    }
    if filters.pool_window:
        entry["pools"] = {str(k): n for k, n in taken.pools.sizes(filters).items()}
    return entry


def _ages(version: PolicyVersion, taken: StepInput) -> dict[str, float]:
    """Return how many versions behind the step's start the policies were that sampled."""
    ages = [version - 1 - r.policy_version for group in taken.groups for r in group]
    return {"age_mean": fmean(ages), "age_max": max(ages)} if ages else {}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def evaluation_entry(evaluation: Evaluation) -> dict[str, Any]:
    """Return the line of an evaluation."""
    entry = {
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
    return {"eval": entry}


def _share(name: str, share: Share) -> dict[str, float]:
    return {name: share.value, f"{name}_low": share.low, f"{name}_high": share.high}


def shortage_figures(shortage: Shortage) -> dict[str, float]:
    """Return what the orchestrator must know to lease more work to a step that waits for it."""
    return {"stream_from": float(shortage.stream_from), "refill": float(shortage.refill)}


def posted_figures(entry: dict[str, Any]) -> dict[str, float]:
    """Return an entry's numbers as the orchestrator takes them: flat, names prefixed."""
    return flat(entry)
