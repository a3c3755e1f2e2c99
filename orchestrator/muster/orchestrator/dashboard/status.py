"""The run's status: all of `/v1/status`, and on every page, which adds its own (`routes.py`)."""

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from muster.api.answers import PartStatus, RunStatus, SlashStatus, SubmissionStatus, WorkerStatus
from muster.chain import MemberView, SlashView
from muster.orchestrator.dashboard.training import TrainingMetrics
from muster.orchestrator.db import Database, statements
from muster.orchestrator.db.statements import SubmissionRow
from muster.orchestrator.intake.batching import Batching
from muster.orchestrator.leases.leases import Leases
from muster.orchestrator.leases.life import Heartbeats, Lives
from muster.orchestrator.outcomes.outcomes import ValidatorCalls
from muster.orchestrator.projection import Projection, slot_of
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Step
from muster.protocol.messages import OutcomeRecord, Reason
from muster.protocol.mixture import PartRecipe
from muster.protocol.recipe import Recipe

SHOWN_WORKERS = 200
SHOWN_SUBMISSIONS = 20
SHOWN_SLASHES = 20
SHOWN_POINTS = 500
MAX_AGE_S = 0.2
"""A status is reused for this many seconds, however many clients ask."""


def reason_name(code: int) -> str:
    """Return a reason's name; its number when the name is unknown to this version."""
    return Reason(code).name.lower() if code in set(Reason) else str(code)


@dataclass(eq=False, repr=False, kw_only=True)
class StatusBuilder:
    """Builds the status."""

    database: Database
    projection: Projection
    batching: Batching
    leases: Leases
    heartbeats: Heartbeats
    lives: Lives
    caller: ValidatorCalls
    training: TrainingMetrics
    recipe: Recipe
    now: Callable[[], int]
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._building = asyncio.Lock()
        self._latest: tuple[float, RunStatus | None] = (0.0, None)

    async def latest(self) -> RunStatus:
        """Return a shared status that is at most MAX_AGE_S old."""
        async with self._building:
            built_at, status = self._latest
            if status is None or self.monotonic() - built_at > MAX_AGE_S:
                status = await self.build()
                self._latest = (self.monotonic(), status)
            return status

    async def build(self) -> RunStatus:
        """Return the status as of now."""
        projection, run = self.projection, self.projection.run
        leasing_step = await self.leases.collecting_step()
        [[(received,)], latest] = await self.database.ask(
            statements.received_submissions(),
            statements.latest_submissions(SHOWN_SUBMISSIONS),
        )
        committed, judged = projection.batch_counts
        return RunStatus(
            run_id=projection.run_id,
            name=self.recipe.name,
            phase=self.phase(),
            step=self.step(),
            steps=self.recipe.training.steps,
            policy_version=run.latest_version,
            filled=projection.progress.filled,
            submissions_per_step=self.recipe.training.submissions_per_step,
            dropped=projection.progress.dropped,
            leasing_step=leasing_step,
            received=int(received),
            batches_committed=committed,
            batches_judged=judged,
            validators=list(run.validators),
            quorum=run.config.terms.quorum,
            absent_validators=list(self.caller.absent),
            funded_wei=str(run.funded_wei),
            paid_wei=str(run.paid_wei),
            workers_total=len(projection.run.members),
            workers=self._workers(),
            reward=_thin(self.training.series("reward")),
            eval_reward=_thin(self.training.series("eval_reward")),
            parts=[self._part(part, leasing_step) for part in self.recipe.tasks.parts],
            slashes=[self.slash(s) for s in projection.slashes[: -SHOWN_SLASHES - 1 : -1]],
            submissions=[self._submission(SubmissionRow(*row)) for row in latest],
            **self._pause(),
        )

    def _part(self, part: PartRecipe, step: Step) -> PartStatus:
        latest = self.training.latest
        return PartStatus(
            name=part.name,
            weight=part.weight_at(step),
            reward=latest(f"part_{part.name}_reward"),
            kept=latest(f"part_{part.name}_kept"),
            length=latest(f"part_{part.name}_length"),
            eval_reward=latest(f"eval_part_{part.name}_reward"),
        )

    def _pause(self) -> dict[str, Any]:
        run = self.projection.run
        if not run.is_slashing_paused(self.now()):
            return {}
        last = run.pauses[-1]
        reason = f": {reason_name(last.reason)}" if last.reason else ""
        return {"slashing_paused_until": last.until, "slashing_paused_for": f"{last.cause}{reason}"}

    def step(self) -> Step:
        """Return the training step whose submissions are being collected; the last one at the
        end."""
        step, steps = self.projection.progress.step, self.recipe.training.steps
        return Step(min(step, steps)) if steps else step

    def phase(self) -> str:
        """Return what the run is doing."""
        run, steps = self.projection.run, self.recipe.training.steps
        if run.latest_version is None:
            return "waiting for the base model"
        if steps and run.latest_version >= steps:
            return "finished"
        if self.batching.is_unfunded:
            return "waiting for funds"
        return "paused" if run.paused else "collecting"

    def _workers(self) -> list[WorkerStatus]:
        tally = self.projection.tally
        leading = heapq.nsmallest(
            SHOWN_WORKERS,
            self.projection.run.members.values(),
            key=lambda w: (-tally(w.worker_id).units, w.worker_id),
        )
        return [self.worker(worker) for worker in leading]

    def worker(self, worker: MemberView) -> WorkerStatus:
        """Return one worker's status."""
        tally = self.projection.tally(worker.worker_id)
        beat = self.heartbeats.latest.get(worker.node)
        return WorkerStatus(
            worker=worker.address,
            worker_id=worker.worker_id,
            node=worker.node,
            status=worker.status.lower(),
            stake_wei=str(worker.active_wei),
            accepted=tally.accepted,
            incomplete=tally.incomplete,
            rejected=tally.rejected,
            fraud=tally.fraud,
            units=tally.units,
            earned_wei=str(tally.units * self.projection.run.config.terms.price_per_unit),
            paid_wei=str(self.projection.paid_wei(worker.address)),
            policy_version=None if beat is None else beat.policy_version,
            state=None if beat is None else beat.state,
            seen_at=None if beat is None else beat.seen_at,
            life=self.lives.state(worker).value,
        )

    def slash(self, slash: SlashView) -> SlashStatus:
        """Return one slash's status."""
        record = self._judged_by(slash)
        return SlashStatus(
            worker=slash.owner,
            amount_wei=str(slash.amount_wei),
            reason=record.reason.name if record else slash.offence.name,
            state=slash.state.lower(),
            tx_hash=slash.tx_hash,
            settled_tx=slash.settled_tx,
            submission_id=hex0x(record.file_hash) if record else None,
        )

    def _judged_by(self, slash: SlashView) -> OutcomeRecord | None:
        batch = None if slash.batch_id is None else self.projection.view.batches[slash.batch_id]
        if batch is None or not batch.records or slash.position is None:
            return None
        return batch.records[slash.position]

    def _submission(self, row: SubmissionRow) -> SubmissionStatus:
        claim = row.claim
        judged = self.projection.judged(slot_of(claim), row.file_hash)
        verdict, reason = self.projection.standing(judged) if judged else (None, None)
        batch = row.batch_root and self.projection.batch_with_root(row.batch_root)
        batch_id = judged.batch_id if judged else batch.batch_id if batch else None
        return SubmissionStatus(
            submission_id=hex0x(row.file_hash),
            worker=row.worker,
            step=claim.step,
            index=claim.index,
            state="judged" if judged else "committed" if batch else "received",
            batch_id=batch_id,
            verdict=verdict.name if verdict else None,
            reason=reason.name if reason else None,
        )


def to_json(status: RunStatus) -> str:
    """Return the status as one line of JSON."""
    return status.model_dump_json()


def _thin(series: list[tuple[int, float]]) -> list[tuple[int, float]]:
    # Every n-th point and the last, so that a long run's page stays small.
    stride = len(series) // SHOWN_POINTS + 1
    return series[:-1:stride] + series[-1:]
