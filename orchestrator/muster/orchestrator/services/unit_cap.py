"""The unit cap: a worker has no more units in flight than its stake covers.

In flight is what can still turn out to be fraud: open leases at the most they can bring, what was
uploaded or committed, and what has outcomes that are not final. Whoever commits more can be jailed
for it (`FaultCourt.proveOvercommit`), so such a ticket must not be given out.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.chain import WorkerView
from muster.orchestrator.db import counts
from muster.orchestrator.db.models import SubmissionRow
from muster.orchestrator.services.batching import Batching
from muster.orchestrator.services.projection import Projection
from muster.protocol.ids import Address
from muster.protocol.messages import COMMIT_GRACE_S
from muster.protocol.recipe import SamplingRecipe


@dataclass(frozen=True, slots=True)
class CapTerms:
    """What the deployment fixes about units in flight."""

    stake_per_unit: int
    """Wei of active stake behind one unit."""
    outcome_deadline_s: int
    """Seconds after the commitment by which outcomes are due."""
    challenge_window_s: int
    """Seconds during which an outcome may be challenged."""


def max_units(sampling: SamplingRecipe) -> int:
    """Return the most units that one submission can be worth."""
    return sampling.problems_per_submission * sampling.samples_per_problem * sampling.max_new_tokens


def free_leases(in_flight: int, per_lease: int, active_wei: int, stake_per_unit: int) -> int:
    """Return how many leases of so many units a stake covers beside the units in flight."""
    return max(0, active_wei // stake_per_unit - in_flight) // per_lease


class UnitCap:
    """Says how many more leases are covered by their worker's stake."""

    def __init__(
        self,
        projection: Projection,
        batching: Batching,
        sampling: SamplingRecipe,
        terms: CapTerms,
    ) -> None:
        self._projection = projection
        self._batching = batching
        self._max_units = max_units(sampling)
        self._terms = terms

    async def free(self, session: AsyncSession, worker: WorkerView, now: int) -> int:
        """Return how many more leases the worker's stake covers."""
        in_flight = await self.in_flight(session, worker, now)
        return free_leases(
            in_flight, self._max_units, worker.active_wei, self._terms.stake_per_unit
        )

    async def in_flight(self, session: AsyncSession, worker: WorkerView, now: int) -> int:
        """Return the worker's units in flight, open leases at their maximum."""
        # An upload is taken until the deadline, its batch some time longer.
        leased = await counts.unfilled_leases(session, worker.address, since=now - COMMIT_GRACE_S)
        posted = self._projection.posted_units(
            worker.worker_id, posted_after=now - self._terms.challenge_window_s
        )
        uploaded = await self._without_outcomes(session, worker.address, now)
        return leased * self._max_units + uploaded + posted

    async def _without_outcomes(self, session: AsyncSession, worker: Address, now: int) -> int:
        """Return units that were uploaded or committed, have no outcomes and are not final."""
        final_before = now - self._terms.outcome_deadline_s - self._terms.challenge_window_s
        unjudged = [b for b in self._projection.unjudged if b.committed_at > final_before]
        roots = [batch.root for batch in unjudged] + self._batching.uncommitted_roots
        uploaded = await session.scalar(
            select(func.sum(SubmissionRow.submission["units"].as_integer())).where(
                SubmissionRow.worker == worker,
                or_(SubmissionRow.batch_root.is_(None), SubmissionRow.batch_root.in_(roots)),
            )
        )
        direct = (batch.direct for batch in unjudged if batch.direct is not None)
        return (uploaded or 0) + sum(d.units for d in direct if d.worker == worker)
