"""The destinations of figures: a log in the state folder, the orchestrator, Prometheus, W&B.

Their names and contents are in `muster.trainer.measure.figures`. Only the log can stop a step.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from muster.lifecycle.files import write_durably
from muster.protocol.errors import ConfigError, MusterError, install_hint, storage_error_of
from muster.protocol.ids import PolicyVersion
from muster.trainer.measure.figures import PREFIX, STEP, meaning_of, split_part
from muster.trainer.ports import MetricsSink
from muster.trainer.stream.filters import Drop

logger = logging.getLogger(__name__)

WAITING_POSTS = 64
"""Posts queued while the orchestrator is unreachable; beyond that the oldest are dropped."""
Export = Callable[[Mapping[str, float]], None]
"""Receives the figures of a training step or evaluation, as the log does."""


class MetricsLog:
    """`metrics.jsonl`: one line per training step and per evaluation."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def forget_after(self, version: PolicyVersion) -> None:
        """Remove the lines of steps that will be taken again, and an incomplete last line."""
        if self._path.exists():
            kept = [line for line in self._path.read_text().splitlines() if _is_of(line, version)]
            write_durably(self._path, "".join(f"{line}\n" for line in kept).encode())

    def forget_unfinished(self) -> None:
        """Remove an incomplete last line, which a kill or a full disk left."""
        if self._path.exists():
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)

    def append(self, entry: dict[str, Any]) -> None:
        """Write one line; raises StorageError when it cannot be written whole."""
        line = json.dumps(entry, allow_nan=False) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(line)
        except OSError as error:
            raise storage_error_of(
                error,
                f"cannot write {self._path}: {error.strerror}",
                hint="free some disk space and start again: the step or evaluation is repeated",
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
    """Drops the figures of a trainer site, because site 0 reports its steps."""

    async def post_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Do nothing."""
        del step, metrics


class MetricsPoster:
    """Posts figures in the background; a lost post is harmless, a delayed step is not."""

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
        """Post queued figures, until cancelled."""
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


class PrometheusExport:
    """Newest figures as gauges, `muster_trainer_<name>`, and sums as counters."""

    def __init__(self) -> None:
        self.port = 0
        """Port of the endpoint; 0 before it is served."""
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._of_parts: dict[str, Gauge] = {}
        self._dropped = Counter(
            f"{PREFIX}dropped_samples",
            "Samples left out since the process started, by reason.",
            ("reason",),
            registry=self.registry,
        )
        self._trained = Counter(
            f"{PREFIX}trained_tokens",
            "Completion tokens trained on since the process started.",
            registry=self.registry,
        )
        for reason in Drop:
            self._dropped.labels(str(reason))

    def report(self, figures: Mapping[str, float]) -> None:
        """Show these figures from now on; an unknown figure is NaN, a gap in a chart."""
        for name in self._gauges.keys() - figures.keys():
            if ("step" if split_part(name)[0] in STEP else "eval_policy_version") in figures:
                self._gauges[name].set(math.nan)
        for name, value in figures.items():
            reason = name.removeprefix("dropped_")
            if reason != name:
                self._dropped.labels(reason).inc(value)
            else:
                self._gauge(name).set(value)
        self._trained.inc(figures.get("tokens", 0.0))

    def _gauge(self, name: str) -> Gauge:
        """Return a figure's gauge; figures of parts share one gauge, with the part as label."""
        if name in self._gauges:
            return self._gauges[name]
        generic, part = split_part(name)
        shown = PREFIX + generic.replace("_P_", "_")
        if not part:
            self._gauges[name] = Gauge(shown, meaning_of(name), registry=self.registry)
            return self._gauges[name]
        if generic not in self._of_parts:
            labels, registry = ("part",), self.registry
            self._of_parts[generic] = Gauge(shown, meaning_of(name), labels, registry=registry)
        self._gauges[name] = self._of_parts[generic].labels(part)
        return self._gauges[name]


@contextmanager
def serve_prometheus(host: str, port: int) -> Iterator[PrometheusExport]:
    """Serve an export at `http://host:port/metrics` until the block ends."""
    export = PrometheusExport()
    try:
        server, thread = start_http_server(port, host, registry=export.registry)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}",
            hint="choose another port with --metrics-port",
        ) from error
    export.port = server.server_port
    logger.info("metrics served", extra={"port": server.server_port})
    try:
        yield export
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def log_to_wandb(project: str, name: str, config: Mapping[str, Any]) -> Iterator[Export]:
    """Open a run of a W&B project until the block ends; the same name resumes it.

    `WANDB_MODE=offline` keeps the figures on disk.

    Raises ConfigError when wandb is not installed.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ConfigError("wandb is not installed", hint=install_hint("wandb")) from error
    run = wandb.init(project=project, id=name, name=name, config=dict(config), resume="allow")
    # An evaluation belongs to a step that is already logged, so W&B gets the step as a figure.
    run.define_metric("*", step_metric="step")
    try:
        yield lambda figures: run.log({"step": figures.get("eval_policy_version", 0.0), **figures})
    finally:
        run.finish()
