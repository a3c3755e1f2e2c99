"""Workers on the dashboard: a ranking, and one of them in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from muster.api.answers import WorkerStatus
from muster.chain import Loss, MemberView, PaymentView, loss_of
from muster.orchestrator.leases.life import WorkerState
from muster.orchestrator.projection import VerdictTally
from muster.orchestrator.services import Services
from muster.protocol.ids import Address
from muster.protocol.messages import Reason

PAGE = 100
"""Workers of one page."""
SHOWN_PAYMENTS = 50
"""Latest payments of one worker's page."""
STATES = tuple(state.value for state in WorkerState)
"""What workers can be filtered by."""


@dataclass(frozen=True, slots=True)
class RankingKey:
    """A way to rank workers."""

    title: str
    """Its name."""
    key: Callable[[Services, MemberView], int]
    """Ranks the largest first."""


def _tally(services: Services, worker: MemberView) -> VerdictTally:
    return services.projection.tally(worker.worker_id)


def _seen_at(services: Services, worker: MemberView) -> int:
    beat = services.heartbeats.latest.get(worker.node)
    return 0 if beat is None else beat.seen_at


ORDERS: dict[str, RankingKey] = {
    "units": RankingKey("units", lambda s, w: _tally(s, w).units),
    "accepted": RankingKey("accepted", lambda s, w: _tally(s, w).accepted),
    "rejected": RankingKey(
        "rejected", lambda s, w: _tally(s, w).rejected + _tally(s, w).incomplete
    ),
    "fraud": RankingKey("fraud", lambda s, w: _tally(s, w).fraud),
    "paid": RankingKey("paid", lambda s, w: s.projection.paid_wei(w.address)),
    "stake": RankingKey("stake", lambda _, w: w.active_wei),
    "seen": RankingKey("last seen", _seen_at),
    "joined": RankingKey("newest", lambda _, w: w.worker_id),
}
"""What workers can be ranked by."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """A page of workers."""

    lines: list[WorkerStatus]
    """In order."""
    first: int
    """Rank of the first of them, from 0."""
    total: int
    """Workers that pass the filter."""
    counts: dict[str, int]
    """Workers by state."""

    @property
    def after(self) -> int | None:
        """Rank with which the next page begins; None at the end."""
        end = self.first + len(self.lines)
        return end if end < self.total else None


@dataclass(frozen=True, slots=True)
class WorkerDetail:
    """One worker."""

    status: WorkerStatus
    """What the ranking shows."""
    view: MemberView
    """What the chain says."""
    software: str | None
    """What it says it runs."""
    reasons: list[tuple[Reason, int]]
    """Why submissions of it were not accepted, the most frequent first."""
    loss: Loss | None
    """What its stake lost; None when it was never slashed."""
    payments: list[PaymentView]
    """Payments by this run, latest first."""


def rank_workers(
    services: Services, *, order: str, state: str | None, first: int, limit: int = PAGE
) -> Ranking:
    """Return a page of workers; ties go to whoever registered first."""
    everyone = services.projection.run.members.values()
    key = ORDERS[order].key
    states = {w.worker_id: services.lives.state(w).value for w in everyone}
    chosen = [w for w in everyone if state in (None, states[w.worker_id])]
    chosen.sort(key=lambda w: (-key(services, w), w.worker_id))
    counts = dict.fromkeys(STATES, 0) | Counter(states.values())
    shown = chosen[first : first + limit]
    lines = [services.status.worker(worker) for worker in shown]
    return Ranking(lines, first, len(chosen), counts)


def find_worker(services: Services, address: Address) -> WorkerDetail | None:
    """Return one worker; None when nobody joined the run under this address."""
    view = services.projection.run.members.get(address)
    if view is None:
        return None
    beat = services.heartbeats.latest.get(view.node)
    reasons = services.projection.tally(view.worker_id).reasons
    return WorkerDetail(
        status=services.status.worker(view),
        view=view,
        software=None if beat is None else beat.software,
        reasons=[(reason, count) for reason, count in reasons.most_common() if count > 0],
        loss=loss_of(services.projection.view, services.run_id, address),
        payments=_payments_of(services, address),
    )


def _payments_of(services: Services, worker: Address) -> list[PaymentView]:
    found: list[PaymentView] = []
    for payment in reversed(services.projection.view.payments):
        if payment.worker == worker and payment.run_id == services.run_id:
            found.append(payment)
            if len(found) == SHOWN_PAYMENTS:
                break
    return found
