"""The trainer's figures for others to collect: a Prometheus endpoint, and Weights & Biases.

Both are told of each entry of the metrics log; neither can stop a training step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from muster.protocol.errors import ConfigError
from muster.trainer.filters import Drop
from muster.trainer.metric_names import PREFIX, STEP, meaning_of

logger = logging.getLogger(__name__)


class Export(Protocol):
    """Somewhere figures go besides the log."""

    def report(self, figures: Mapping[str, float]) -> None:
        """Take the figures of a training step or evaluation."""


class PrometheusExport:
    """Newest figures as gauges, `muster_trainer_<name>`, and what adds up as counters."""

    def __init__(self) -> None:
        self.port = 0
        """Where it is served, once it is."""
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
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
        """Show these figures from now on; those that a step does not know are NaN, a gap."""
        if "step" in figures:
            for name in self._gauges.keys() & STEP.keys() - figures.keys():
                self._gauges[name].set(math.nan)
        for name, value in figures.items():
            reason = name.removeprefix("dropped_")
            if reason != name:
                self._dropped.labels(reason).inc(value)
            else:
                self._gauge(name).set(value)
        self._trained.inc(figures.get("tokens", 0.0))

    def _gauge(self, name: str) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(PREFIX + name, meaning_of(name), registry=self.registry)
        return self._gauges[name]


@contextmanager
def serve_prometheus(host: str, port: int) -> Iterator[PrometheusExport]:
    """Serve an export at `http://host:port/metrics` as long as the block lasts."""
    export = PrometheusExport()
    try:
        server, thread = start_http_server(port, host, registry=export.registry)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}",
            hint="choose another --metrics-port",
        ) from error
    export.port = server.server_port
    logger.info("metrics served", extra={"port": server.server_port})
    try:
        yield export
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class WandbExport:
    """Figures in a Weights & Biases run; `WANDB_MODE=offline` keeps them on disk."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def report(self, figures: Mapping[str, float]) -> None:
        """Log the figures at their training step."""
        self._run.log({"step": figures.get("eval_policy_version", 0.0), **figures})


@contextmanager
def log_to_wandb(project: str, name: str, config: Mapping[str, Any]) -> Iterator[WandbExport]:
    """Open a run of a W&B project as long as the block lasts; it resumes under the same name.

    Raises ConfigError when wandb is not installed.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ConfigError(
            "wandb is not installed", hint="pip install 'muster-rl[wandb]'"
        ) from error
    run = wandb.init(project=project, id=name, name=name, config=dict(config), resume="allow")
    # Evaluations belong to a version whose step is already logged, so steps are a figure.
    run.define_metric("*", step_metric="step")
    try:
        yield WandbExport(run)
    finally:
        run.finish()
