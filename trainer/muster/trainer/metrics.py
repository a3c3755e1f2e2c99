"""The trainer's figures: one JSON line each in the state folder, and posted to be shown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any

from muster.protocol.errors import MusterError
from muster.protocol.ids import PolicyVersion
from muster.trainer.evaluate import Evaluation
from muster.trainer.figures import StepFigures
from muster.trainer.ports import MetricsSink
from muster.trainer.stream import StepInput

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
        """Write one line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")

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


def step_entry(
    version: PolicyVersion, taken: StepInput, figures: StepFigures, wall_s: float
) -> dict[str, Any]:
    """Return the line of a training step; step s makes policy version s."""
    return {
        "step": int(version),
        "policy_version": int(version),
        "reward": figures.reward,
        "loss": _finite(figures.loss),
        "grad_norm": _finite(figures.grad_norm),
        "entropy": _finite(figures.entropy),
        "clip_fraction": _finite(figures.clip_fraction),
        "clip_low": _finite(figures.clip_low),
        "clip_high": _finite(figures.clip_high),
        "mean_ratio": _finite(figures.mean_ratio),
        "max_ratio": _finite(figures.max_ratio),
        "mismatch_kl": _finite(figures.mismatch_kl),
        "mismatch_max": _finite(figures.mismatch_max),
        "kl": _finite(figures.kl),
        "learning_rate": figures.learning_rate,
        "samples": figures.samples,
        "tokens": figures.tokens,
        "skipped": figures.skipped,
        "dropped": {str(k): n for k, n in sorted((taken.dropped + figures.dropped).items())},
        "stream_from": taken.start.position,
        "stream_to": taken.end.position,
        "wall_s": round(wall_s, 4),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def evaluation_entry(evaluation: Evaluation) -> dict[str, Any]:
    """Return the line of an evaluation."""
    return {
        "eval": {
            "policy_version": int(evaluation.policy_version),
            "reward": evaluation.reward,
            "problems": evaluation.problems,
        }
    }


def posted_figures(entry: dict[str, Any]) -> dict[str, float]:
    """Return an entry's numbers as the orchestrator takes them: flat, names prefixed."""
    figures: dict[str, float] = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            figures |= {f"{name}_{inner}": float(number) for inner, number in value.items()}
        elif value is not None:
            figures[name] = float(value)
    return figures
