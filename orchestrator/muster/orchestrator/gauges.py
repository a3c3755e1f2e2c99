"""Gauges for Prometheus: read off the services when somebody asks, once a second at most."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.chain import SlashState
from muster.orchestrator import metrics
from muster.orchestrator.db import statements
from muster.orchestrator.db.database import Database
from muster.orchestrator.leases.life import WorkerState
from muster.orchestrator.ports import ChainPort
from muster.protocol.errors import ChainError
from muster.protocol.messages import Reason
from muster.protocol.schedule import Stage

if TYPE_CHECKING:
    from muster.orchestrator.dashboard.training import TrainingMetrics
    from muster.orchestrator.services import Services

ALIVE_S = 120
"""A node that was heard of within this time is alive."""
FRESH_S = 1.0
"""Figures are used for this long."""
MAX_PLANNED = 1000
"""Batches whose calls are counted at most."""
TRAINING_FIGURES = (
    *("reward", "eval_reward", "entropy", "grad_norm", "kl", "mismatch_kl", "age_mean", "tokens"),
    *("wall_s", "wait_s", "tokens_per_s", "mfu", "memory_gb"),
    *("alarm_steps", "grad_growth", "entropy_rise", "reward_fall", "skipped"),
)
"""Which of the trainer's figures are passed on: its own endpoint has all of them."""


PART_FIGURES = ("part_{}_reward", "part_{}_kept", "part_{}_length", "eval_part_{}_reward")
"""The same of each part of a mixture."""
OF_TOKENS = frozenset({"entropy", "grad_norm", "kl", "mismatch_kl", "age_mean"})
"""Those of them that a step without trained tokens does not have."""


class Gauges:
    """Keeps the gauges of `muster.orchestrator.metrics`."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._reading = asyncio.Lock()
        self._read_at = float("-inf")

    async def refresh(self, services: Services) -> None:
        """Set every gauge to what holds now."""
        async with self._reading:
            if self._monotonic() - self._read_at < FRESH_S:
                return
            _set_run(services)
            _set_workers(services)
            _set_chain(services)
            await _set_validators(services)
            await _set_queues(services)
            self._read_at = self._monotonic()


async def count_queues(database: Database, now: int) -> tuple[int, int]:
    """Return the open leases, and the submissions that are in no batch."""
    [[(leases,)], [(waiting,)]] = await database.search(
        statements.unfilled(now=now), statements.waiting_submissions()
    )
    return leases, waiting


async def count_pending(chain: ChainPort) -> int | None:
    """Return the transactions that were sent and are not mined; None when nobody can say."""
    try:
        return await chain.pending_transactions()
    except ChainError:
        return None


def _set_run(services: Services) -> None:
    projection, training = services.projection, services.training
    metrics.STEP.set(projection.progress.step)
    metrics.POLICY_VERSION.set(projection.run.latest_version or 0)
    metrics.LISTENERS.set(services.feed.listeners)
    for verdict, count in projection.verdict_counts.items():
        metrics.VERDICTS.labels(verdict=verdict.name.lower()).set(count)
    parts = [part.name for part in services.recipe.tasks.parts]
    of_parts = [pattern.format(name) for name in parts for pattern in PART_FIGURES]
    for figure in (*TRAINING_FIGURES, *of_parts):
        value = _known(training, figure)
        if value is not None:
            metrics.TRAINING.labels(figure=figure).set(value)


def _known(training: TrainingMetrics, figure: str) -> float | None:
    """Return the newest figure; NaN, a gap, of tokens when the newest step trained on none."""
    steps = training.series("tokens")
    if figure in OF_TOKENS and steps and not steps[-1][1]:
        return math.nan
    return training.latest(figure)


def _set_workers(services: Services) -> None:
    projection, now = services.projection, services.clock()
    run = projection.run
    statuses = Counter(worker.status.lower() for worker in run.members.values())
    for status in ("active", "jailed", "exiting", "banned"):
        metrics.WORKERS.labels(status=status).set(statuses[status])
    lives = services.lives.counts()
    for state in WorkerState:
        metrics.WORKER_STATES.labels(state=state.value).set(lives[state])
    beats = services.heartbeats.latest.values()
    metrics.NODES_ALIVE.set(sum(now - beat.seen_at <= ALIVE_S for beat in beats))
    affected: Counter[Reason] = Counter()
    for worker in run.members.values():
        reasons = projection.tally(worker.worker_id).reasons
        affected.update(reason for reason, count in reasons.items() if count > 0)
    for reason in Reason:
        if reason is not Reason.NONE:
            name = reason.name.lower()
            metrics.REASONS.labels(reason=name).set(projection.total.reasons[reason])
            metrics.REASON_WORKERS.labels(reason=name).set(affected[reason])


def _set_chain(services: Services) -> None:
    view, health = services.projection.view, services.chain_health
    states = Counter(slash.state for slash in services.projection.slashes)
    for state in SlashState:
        metrics.SLASHES.labels(state=state.value).set(states[state])
    paused_s = services.projection.run.slashing_paused_until - services.chain_clock.now()
    metrics.SLASHING_PAUSED_SECONDS.set(max(0, paused_s))
    failure = services.breaker.failure
    metrics.CORRELATED_FAILURE.set(failure.check if failure else 0)
    open_cases = (c for c in view.cases.values() if c.run_id == services.run_id and not c.closed)
    metrics.OPEN_CASES.set(sum(1 for _ in open_cases))
    metrics.BLOCK.set(health.head or 0)
    metrics.CHAIN_TIME_SECONDS.set(services.chain_clock.now())
    if health.read_at is not None:
        metrics.CHAIN_READ_SECONDS.set(max(0.0, services.clock() - health.read_at))
    unjudged = services.projection.unjudged
    oldest = min((batch.committed_at for batch in unjudged), default=None)
    metrics.UNJUDGED_BATCHES.set(len(unjudged))
    metrics.OLDEST_UNJUDGED_SECONDS.set(
        0 if oldest is None else max(0, services.chain_clock.now() - oldest)
    )


async def _set_validators(services: Services) -> None:
    seated, outcomes = services.projection.run.validators, services.outcomes
    # A validator that left its seat must not be reported absent for ever.
    metrics.VALIDATOR_SIGNED_SECONDS.clear()
    metrics.VALIDATOR_ABSENT.clear()
    due = await outcomes.calls(limit=MAX_PLANNED)
    stages = Counter(calls.stage for _, calls in due)
    for stage in Stage:
        metrics.CALLED_BATCHES.labels(stage=stage.name.lower()).set(stages[stage])
    for validator in seated:
        since = outcomes.heard_at.get(validator, outcomes.listening_since)
        metrics.VALIDATOR_SIGNED_SECONDS.labels(validator=validator).set(
            max(0.0, services.clock() - since)
        )
        is_absent = validator in outcomes.caller.absent
        metrics.VALIDATOR_ABSENT.labels(validator=validator).set(is_absent)


async def _set_queues(services: Services) -> None:
    leases, waiting = await count_queues(services.database, services.chain_clock.now())
    metrics.OPEN_LEASES.set(leases)
    metrics.WAITING_SUBMISSIONS.set(waiting)
    pending = await count_pending(services.chain)
    if pending is not None:
        metrics.PENDING_TRANSACTIONS.set(pending)
