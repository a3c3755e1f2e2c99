"""The orchestrator's Prometheus metrics: all names, with units, and the values of gauges."""

from __future__ import annotations

import asyncio
import collections
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from muster.chain import SlashState
from muster.orchestrator.db import Database, statements
from muster.orchestrator.leases.life import WorkerState
from muster.orchestrator.ports import ChainPort
from muster.protocol.errors import ChainError
from muster.protocol.messages import Reason
from muster.protocol.schedule import Stage

if TYPE_CHECKING:
    from muster.orchestrator.dashboard.training import TrainingMetrics
    from muster.orchestrator.services import Services

REGISTRY = CollectorRegistry()
_PREFIX = "muster_orchestrator_"


def _counter(name: str, meaning: str, *labels: str) -> Counter:
    return Counter(f"{_PREFIX}{name}_total", meaning, labels, registry=REGISTRY)


def _gauge(name: str, meaning: str, *labels: str) -> Gauge:
    return Gauge(f"{_PREFIX}{name}", meaning, labels, registry=REGISTRY)


REQUESTS = _counter("requests", "HTTP requests by route and status.", "route", "status")
REQUEST_SECONDS = Histogram(
    "muster_orchestrator_request_seconds",
    "Time to answer a request.",
    ("route",),
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    registry=REGISTRY,
)
HEARTBEATS = _counter("heartbeats", "Verified heartbeats.")
LEASES = _counter(
    "leases", "Requests for work by answer: ticket, none, unit_cap or unfunded.", "answer"
)
SUBMISSIONS = _counter("submissions", "Submissions received.")
UPLOAD_BYTES = _counter("upload_bytes", "Bytes of submissions received.")
OUTCOMES = _counter("outcomes", "Outcomes received from validators.")
REAUDITS = _counter(
    "reaudits",
    "Outcomes received for batches whose outcomes were already posted: agreed or differed.",
    "result",
)
TRANSACTIONS = _counter(
    "transactions", "Transactions by kind and result: mined, refused or lost.", "kind", "result"
)
VERDICTS = _gauge("verdicts", "Submissions with an outcome on chain, by verdict.", "verdict")
REASONS = _gauge(
    "reasons", "Submissions that were not accepted, by reason of the outcome on chain.", "reason"
)
REASON_WORKERS = _gauge(
    "reason_workers",
    "Workers with at least one submission that was not accepted for this reason.",
    "reason",
)
WORKERS = _gauge("workers", "Registered workers by status.", "status")
WORKER_STATES = _gauge(
    "worker_states",
    "Registered workers by the state of their life: discovered, active, unhealthy, dead, jailed, "
    "exiting or banned.",
    "state",
)
NODES_ALIVE = _gauge("nodes_alive", "Nodes that sent a heartbeat within two minutes.")
SLASHES = _gauge("slashes", "Slashes on chain by state.", "state")
SLASHING_PAUSED_SECONDS = _gauge(
    "slashing_paused_seconds", "Time until the pause of slashing ends; 0 while slashing runs."
)
CORRELATED_FAILURE = _gauge(
    "correlated_failure",
    "Number of the check that many independent workers fail, so that their slashes wait, or 0.",
)
OPEN_CASES = _gauge("open_cases", "Disputes that are not closed.")
STEP = _gauge("step", "Training step whose submissions are being collected.")
POLICY_VERSION = _gauge("policy_version", "Newest policy version on chain.")
UNJUDGED_BATCHES = _gauge("unjudged_batches", "Committed batches without outcomes.")
CALLED_BATCHES = _gauge(
    "called_batches",
    "Batches that wait for outcomes, by how many validators they need: quorum, escalated, all.",
    "stage",
)
OLDEST_UNJUDGED_SECONDS = _gauge(
    "oldest_unjudged_seconds",
    "Time since the oldest batch without outcomes was committed; 0 without one.",
)
WAITING_SUBMISSIONS = _gauge(
    "waiting_submissions", "Submissions received that are in no batch yet."
)
OPEN_LEASES = _gauge("open_leases", "Tickets that wait for their submission.")
PENDING_TRANSACTIONS = _gauge("pending_transactions", "Transactions that are sent and not mined.")
VALIDATOR_SIGNED_SECONDS = _gauge(
    "validator_signed_seconds",
    "Time since the last outcomes of each seated validator were received.",
    "validator",
)
VALIDATOR_ABSENT = _gauge(
    "validator_absent",
    "1 if a seated validator missed a call's deadline and sent nothing since, else 0.",
    "validator",
)
TRAINING = _gauge(
    "training",
    "The trainer's newest figures, by their names in docs/reference/metrics.md.",
    "figure",
)
BLOCK = _gauge("block", "Block up to which the chain is read.")
CHAIN_READ_SECONDS = _gauge("chain_read_seconds", "Time since the chain's endpoint answered.")
CHAIN_TIME_SECONDS = _gauge("chain_time_seconds", "Unix time of the latest block read.")
LISTENERS = _gauge("listeners", "Open streams of server-sent events.")
IS_LEADER = _gauge("is_leader", "Whether this replica writes to the chain: 1, or 0.")


# Gauges are computed from the services on request.

ALIVE_S = 120
"""Seconds since its last heartbeat during which a node counts as alive."""
FRESH_S = 5.0
"""Seconds for which the text of all metrics is kept."""
MAX_PLANNED = 1000
"""Most batches whose calls are counted."""
TRAINING_FIGURES = (
    *("reward", "eval_reward", "entropy", "grad_norm", "kl", "mismatch_kl", "age_mean", "tokens"),
    *("wall_s", "wait_s", "tokens_per_s", "mfu", "memory_gb"),
    *("alarm_steps", "grad_growth", "entropy_rise", "reward_fall", "skipped"),
)
"""The trainer's figures that are exported here; its own endpoint has all of them."""


PART_FIGURES = ("part_{}_reward", "part_{}_kept", "part_{}_length", "eval_part_{}_reward")
"""Exported figures of each part of a mixture."""
OF_TOKENS = frozenset({"entropy", "grad_norm", "kl", "mismatch_kl", "age_mean"})
"""Exported figures that a step without trained tokens does not have."""


class MetricsText:
    """The text of all metrics, built once in `FRESH_S` seconds, however many ask for it."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._building = asyncio.Lock()
        self._built_at = float("-inf")
        self._text = b""

    async def read(self, services: Services) -> bytes:
        """Return the metrics in Prometheus' text format."""
        async with self._building:
            if self._monotonic() - self._built_at >= FRESH_S:
                await _set_gauges(services)
                self._text = generate_latest(REGISTRY)
                self._built_at = self._monotonic()
            return self._text


async def _set_gauges(services: Services) -> None:
    _set_run(services)
    _set_workers(services)
    _set_chain(services)
    await _set_validators(services)
    await _set_queues(services)


async def count_queues(database: Database, now: int) -> tuple[int, int]:
    """Return the open leases, and the submissions that are in no batch."""
    [[(leases,)], [(waiting,)]] = await database.search(
        statements.unfilled(now=now), statements.waiting_submissions()
    )
    return leases, waiting


async def count_pending(chain: ChainPort) -> int | None:
    """Return the number of transactions that were sent and are not mined; None when unknown."""
    try:
        return await chain.pending_transactions()
    except ChainError:
        return None


def _set_run(services: Services) -> None:
    projection, training = services.projection, services.training
    STEP.set(projection.progress.step)
    POLICY_VERSION.set(projection.run.latest_version or 0)
    LISTENERS.set(services.feed.listeners)
    for verdict, count in projection.verdict_counts.items():
        VERDICTS.labels(verdict=verdict.name.lower()).set(count)
    parts = [part.name for part in services.recipe.tasks.parts]
    of_parts = [pattern.format(name) for name in parts for pattern in PART_FIGURES]
    for figure in (*TRAINING_FIGURES, *of_parts):
        value = _known(training, figure)
        if value is not None:
            TRAINING.labels(figure=figure).set(value)


def _known(training: TrainingMetrics, figure: str) -> float | None:
    """Return the newest figure; a per-token figure is NaN, a gap, when the newest step trained on
    no tokens."""
    steps = training.series("tokens")
    if figure in OF_TOKENS and steps and not steps[-1][1]:
        return math.nan
    return training.latest(figure)


def _set_workers(services: Services) -> None:
    projection, now = services.projection, services.clock()
    run = projection.run
    statuses = collections.Counter(worker.status.lower() for worker in run.members.values())
    for status in ("active", "jailed", "exiting", "banned"):
        WORKERS.labels(status=status).set(statuses[status])
    lives = services.lives.counts()
    for state in WorkerState:
        WORKER_STATES.labels(state=state.value).set(lives[state])
    beats = services.heartbeats.latest.values()
    NODES_ALIVE.set(sum(now - beat.seen_at <= ALIVE_S for beat in beats))
    affected: collections.Counter[Reason] = collections.Counter()
    for worker in run.members.values():
        reasons = projection.tally(worker.worker_id).reasons
        affected.update(reason for reason, count in reasons.items() if count > 0)
    for reason in Reason:
        if reason is not Reason.NONE:
            name = reason.name.lower()
            REASONS.labels(reason=name).set(projection.total.reasons[reason])
            REASON_WORKERS.labels(reason=name).set(affected[reason])


def _set_chain(services: Services) -> None:
    view, health = services.projection.view, services.chain_health
    states = collections.Counter(slash.state for slash in services.projection.slashes)
    for state in SlashState:
        SLASHES.labels(state=state.value).set(states[state])
    paused_s = services.projection.run.slashing_paused_until - services.chain_clock.now()
    SLASHING_PAUSED_SECONDS.set(max(0, paused_s))
    failure = services.breaker.failure
    CORRELATED_FAILURE.set(failure.check if failure else 0)
    open_cases = (c for c in view.cases.values() if c.run_id == services.run_id and not c.closed)
    OPEN_CASES.set(sum(1 for _ in open_cases))
    BLOCK.set(health.head or 0)
    CHAIN_TIME_SECONDS.set(services.chain_clock.now())
    if health.read_at is not None:
        CHAIN_READ_SECONDS.set(max(0.0, services.clock() - health.read_at))
    unjudged = services.projection.unjudged
    oldest = min((batch.committed_at for batch in unjudged), default=None)
    UNJUDGED_BATCHES.set(len(unjudged))
    OLDEST_UNJUDGED_SECONDS.set(
        0 if oldest is None else max(0, services.chain_clock.now() - oldest)
    )


async def _set_validators(services: Services) -> None:
    seated, outcomes = services.projection.run.validators, services.outcomes
    # Clear first: a validator that left its seat must not be reported absent forever.
    VALIDATOR_SIGNED_SECONDS.clear()
    VALIDATOR_ABSENT.clear()
    due = await outcomes.calls(limit=MAX_PLANNED)
    stages = collections.Counter(calls.stage for _, calls in due)
    for stage in Stage:
        CALLED_BATCHES.labels(stage=stage.name.lower()).set(stages[stage])
    for validator in seated:
        since = outcomes.heard_at.get(validator, outcomes.listening_since)
        VALIDATOR_SIGNED_SECONDS.labels(validator=validator).set(max(0.0, services.clock() - since))
        is_absent = validator in outcomes.caller.absent
        VALIDATOR_ABSENT.labels(validator=validator).set(is_absent)


async def _set_queues(services: Services) -> None:
    leases, waiting = await count_queues(services.database, services.chain_clock.now())
    OPEN_LEASES.set(leases)
    WAITING_SUBMISSIONS.set(waiting)
    pending = await count_pending(services.chain)
    if pending is not None:
        PENDING_TRANSACTIONS.set(pending)
