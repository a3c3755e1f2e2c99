"""The dashboard's lists: submissions by cursor, the full history of one submission, workers.

Lists without a verdict filter come from the database, in order of upload; those with one come from
the chain, in order of judgement. The cost of a page does not grow with the list.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import bindparam, select

from muster.api.answers import WorkerStatus
from muster.chain import BatchView, Loss, MemberView, PaymentView, SubmissionPlace, loss_of
from muster.orchestrator.db.query import Query
from muster.orchestrator.db.statements import (
    SubmissionRow,
    at_position,
    by_file,
    latest_submissions,
)
from muster.orchestrator.db.tables import submissions
from muster.orchestrator.leases.life import WorkerState
from muster.orchestrator.projection import Judged, VerdictTally, slot_of
from muster.orchestrator.services import Services
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import Reason, Ticket, Verdict

PAGE = 50
"""Submissions of one page."""
SCAN = 20_000
"""Most outcomes examined for one page."""
MAX_RECEIVED = 100
"""Most received files examined by a search for leading digits."""
_FILE_HASH = submissions.c.file_hash
_RECEIVED = Query(
    select(_FILE_HASH)
    .where(_FILE_HASH.between(bindparam("first"), bindparam("last")))
    .order_by(_FILE_HASH)
    .limit(bindparam("limit"))
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Filter and page of a list of submissions."""

    worker: Address | None = None
    """Only those of this worker."""
    verdict: Verdict | None = None
    """Only those with this standing verdict."""
    step: int | None = None
    """Only those of this rollout step."""
    before: int | None = None
    """Cursor: only those before this upload or, with a verdict filter, before this outcome."""
    limit: int = PAGE
    """Most submissions of the page."""


@dataclass(frozen=True, slots=True)
class SubmissionLine:
    """One submission in a list."""

    submission_id: str
    """Its file hash."""
    worker: Address
    step: int
    """Rollout step."""
    index: int
    """Slot number."""
    policy_version: int
    """The policy it names."""
    rollouts: int
    """Samples that it claims, or that validators counted."""
    units: int
    """Units that it claims, or that validators counted."""
    received_at: int | None
    """Chain time of the upload; None when it did not come through this orchestrator."""
    state: str
    """Received, committed or judged."""
    batch_id: int | None
    verdict: Verdict | None
    """The verdict after disputes."""
    reason: Reason | None
    """Its reason, if it is not Accepted."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A page of submissions."""

    lines: list[SubmissionLine]
    """Latest first."""
    older: int | None
    """Cursor of the next page; None at the end."""


@dataclass(frozen=True, slots=True)
class SubmissionDetail:
    """Everything known about one submission."""

    line: SubmissionLine
    """The submission's line in lists."""
    position: int | None
    """Its place in the batch."""
    size_bytes: int | None
    """Size of its file."""
    deadline: int | None
    """Its ticket's deadline."""
    batch: BatchView | None
    recorded: Verdict | None
    """The verdict as recorded, before any dispute."""
    signers: list[Address]
    """Validators whose signatures were posted."""
    final_at: int | None
    """Chain time from which nobody can challenge the outcome."""
    price_wei: int
    """Price of its units if it is accepted."""
    is_paid: bool | None
    """Whether its slot was paid; None while it cannot be paid yet."""


async def list_submissions(services: Services, wanted: Wanted) -> Listing:
    """Return a page of submissions."""
    if wanted.verdict is not None:
        return _list_judged(services, wanted, wanted.verdict)
    latest = latest_submissions(
        wanted.limit + 1, worker=wanted.worker, step=wanted.step, before=wanted.before
    )
    [found] = await services.database.search(latest)
    rows = [SubmissionRow(*row) for row in found]
    shown = rows[: wanted.limit]
    older = shown[-1].sequence if len(rows) > len(shown) else None
    return Listing([_line_of_row(services, row) for row in shown], older)


def _list_judged(services: Services, wanted: Wanted, verdict: Verdict) -> Listing:
    projection = services.projection
    judged: Sequence[Judged] = projection.judged_with(verdict)
    if wanted.worker is not None:
        worker = projection.view.workers.get(wanted.worker)
        judged = () if worker is None else projection.judged_of(worker.worker_id)
    at = len(judged) if wanted.before is None else min(wanted.before, len(judged))
    stop, lines = max(0, at - SCAN), list[SubmissionLine]()
    while at > stop and len(lines) < wanted.limit:
        at -= 1
        outcome = judged[at]
        if wanted.step not in (None, outcome.record.step):
            continue
        if wanted.worker is None or projection.standing_verdict(outcome) is verdict:
            lines.append(_line_of_outcome(services, outcome))
    return Listing(lines, at or None)


async def find_submission(services: Services, file_hash: Hash32) -> SubmissionDetail | None:
    """Return one submission; None when neither the database nor the chain has it."""
    [rows] = await services.database.ask(by_file(file_hash=file_hash))
    row = SubmissionRow(*rows[0]) if rows else None
    outcome = None if row else next(iter(services.projection.naming(file_hash)), None)
    if row is not None:
        outcome = services.projection.judged(slot_of(row.claim), file_hash)
        line = _line_of_row(services, row)
    elif outcome is not None:
        line = _line_of_outcome(services, outcome)
    else:
        return None
    batch = None if line.batch_id is None else services.projection.batch(line.batch_id)
    position = outcome.position if outcome else row.position if row else None
    for own, submission in batch.split_off.items() if batch else ():
        # Its worker withdrew it from a batch that nobody judged.
        if submission.file_hash == file_hash:
            batch, position = services.projection.batch(own), 0
    return SubmissionDetail(
        line=line,
        position=position,
        size_bytes=row.size_bytes if row else None,
        deadline=Ticket.from_json(json.loads(row.ticket)).deadline if row else None,
        batch=batch,
        recorded=outcome.verdict if outcome else None,
        signers=batch.signed_by(services.projection.run.seats) if batch else [],
        final_at=services.projection.final_at(
            batch, line.verdict, services.settlement.challenge_window_s
        ),
        price_wei=line.units * batch.price_per_unit if batch else 0,
        is_paid=await _is_paid(services, line),
    )


async def received_files(services: Services, digits: str) -> list[Hash32]:
    """Return some received files whose hashes begin with these digits."""
    first, last = (Hash32(bytes.fromhex(digits.ljust(64, fill))) for fill in "0f")
    [rows] = await services.database.search(_RECEIVED(first=first, last=last, limit=MAX_RECEIVED))
    return [Hash32(found) for (found,) in rows]


async def lines_at(services: Services, places: Sequence[SubmissionPlace]) -> list[SubmissionLine]:
    """Return the submissions at these places; those without an outcome come from the database."""
    lines = []
    for place in places[:PAGE]:
        batch = place.batch
        if batch.records is not None:
            outcome = Judged(batch.batch_id, place.position, batch.records[place.position])
            lines.append(_line_of_outcome(services, outcome))
            continue
        [rows] = await services.database.search(
            at_position(root=batch.root, position=place.position)
        )
        lines += [_line_of_row(services, SubmissionRow(*row)) for row in rows]
    return lines


async def _is_paid(services: Services, line: SubmissionLine) -> bool | None:
    if line.verdict is not Verdict.ACCEPTED:
        return None
    return await services.payments.is_paid(line.worker, line.step, line.index)


def _line_of_row(services: Services, row: SubmissionRow) -> SubmissionLine:
    claim = row.claim
    outcome = services.projection.judged(slot_of(claim), row.file_hash)
    verdict, reason = services.projection.standing(outcome) if outcome else (None, None)
    batch = row.batch_root and services.projection.batch_with_root(row.batch_root)
    return SubmissionLine(
        submission_id=hex0x(row.file_hash),
        worker=row.worker,
        step=claim.step,
        index=claim.index,
        policy_version=claim.policy_version,
        rollouts=outcome.record.rollouts if outcome else claim.rollouts,
        units=outcome.record.units if outcome else claim.units,
        received_at=row.received_at,
        state="judged" if outcome else "committed" if batch else "received",
        batch_id=outcome.batch_id if outcome else batch.batch_id if batch else None,
        verdict=verdict,
        reason=reason,
    )


def _line_of_outcome(services: Services, outcome: Judged) -> SubmissionLine:
    record, view = outcome.record, services.projection.view
    verdict, reason = services.projection.standing(outcome)
    return SubmissionLine(
        submission_id=hex0x(record.file_hash),
        worker=view.worker_by_id[record.worker_id].address,
        step=record.step,
        index=record.index,
        policy_version=record.policy_version,
        rollouts=record.rollouts,
        units=record.units,
        received_at=view.batches[outcome.batch_id].committed_at,
        state="judged",
        batch_id=outcome.batch_id,
        verdict=verdict,
        reason=reason,
    )


# Workers on the dashboard: a ranking, and one of them in full.

WORKERS_PAGE = 100
"""Workers of one page."""
SHOWN_PAYMENTS = 50
"""Latest payments of one worker's page."""
STATES = tuple(state.value for state in WorkerState)
"""States by which workers can be filtered."""


@dataclass(frozen=True, slots=True)
class RankingKey:
    """A way to rank workers."""

    title: str
    """Its name."""
    key: Callable[[Services, MemberView], int]
    """Sort key; the largest comes first."""


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
"""The orders of the ranking, by name."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """A page of workers."""

    lines: list[WorkerStatus]
    """The workers in order."""
    first: int
    """Rank of the first of them, from 0."""
    total: int
    """Workers that pass the filter."""
    counts: dict[str, int]
    """Workers by state."""

    @property
    def after(self) -> int | None:
        """Rank at which the next page begins; None at the end."""
        end = self.first + len(self.lines)
        return end if end < self.total else None


@dataclass(frozen=True, slots=True)
class WorkerDetail:
    """One worker."""

    status: WorkerStatus
    """The worker's line in the ranking."""
    view: MemberView
    """The worker's data on chain."""
    software: str | None
    """Software that the node reports."""
    reasons: list[tuple[Reason, int]]
    """Reasons why its submissions were not accepted, with counts, the most frequent first."""
    loss: Loss | None
    """Loss of its stake; None when it was never slashed."""
    payments: list[PaymentView]
    """Payments by this run, latest first."""


def rank_workers(
    services: Services, *, order: str, state: str | None, first: int, limit: int = WORKERS_PAGE
) -> Ranking:
    """Return a page of workers; on ties the earlier registration comes first."""
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
