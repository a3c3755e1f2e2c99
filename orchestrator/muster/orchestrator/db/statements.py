"""The statements that several services share. Statements of one service are in its module.

Those of leases and uploads read only an index.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    bindparam,
    delete,
    false,
    func,
    literal_column,
    null,
    select,
    true,
    update,
)

from muster.api.answers import BatchEntry
from muster.chain import BatchView
from muster.orchestrator.db import Database
from muster.orchestrator.db.query import Query, Statement, columns, given, latest_row, new_row
from muster.orchestrator.db.tables import (
    IS_UNFILLED,
    IS_WAITING,
    batches,
    hardware,
    heartbeats,
    identity,
    leases,
    nonces,
    outcomes,
    submissions,
)
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import Submission, Ticket


@dataclass(frozen=True, slots=True)
class SubmissionRow:
    """A received submission."""

    sequence: int
    file_hash: Hash32
    worker: Address
    submission: str
    """The signed claim, JSON."""
    signature: bytes
    ticket: str
    """The ticket, JSON."""
    ticket_signature: bytes
    received_at: int
    """Chain time at which the upload was complete."""
    size_bytes: int
    batch_root: Hash32 | None
    """Root of its batch; None while it is in none."""
    position: int | None
    """Its place in that batch."""

    @property
    def claim(self) -> Submission:
        """The submission that the node signed."""
        return Submission.from_json(json.loads(self.submission))


_SUBMISSION = select(*columns(submissions, SubmissionRow))
_OF_FILE = submissions.c.file_hash == bindparam("file_hash")
_IN_BATCH = submissions.c.batch_root == bindparam("root")
_OF_SLOT, _LEASE_OF_SLOT = (
    given(each, "worker", "step", "index") for each in (submissions, leases)
)
_IS_DUE_LATER = leases.c.deadline >= bindparam("now")
_IS_FRESH = leases.c.policy_version >= bindparam("oldest")
_NEVER: ColumnElement[int] = literal_column(str(-(1 << 31)))
"""Policy version of closed leases: no step trains on work for them."""

by_file = Query(_SUBMISSION.where(_OF_FILE))
"""The submission with a `file_hash`. This statement and the next ones return SubmissionRows."""
by_leaf = Query(_SUBMISSION.where(submissions.c.leaf == bindparam("leaf")))
"""The submission with a `leaf`."""
in_batch = Query(_SUBMISSION.where(_IN_BATCH).order_by(submissions.c.position))
"""The submissions of the batch with a `root`, in order."""
at_position = Query(_SUBMISSION.where(_IN_BATCH, submissions.c.position == bindparam("position")))
"""The submission at a `position` of the batch with a `root`."""
_in_slot = Query(_SUBMISSION.where(*_OF_SLOT))


def in_slot(claim: Submission) -> Statement:
    """The submission that has the same slot."""
    return _in_slot(worker=claim.worker, step=claim.step, index=claim.index)


def latest_submissions(
    limit: int,
    *,
    worker: Address | None = None,
    step: int | None = None,
    before: int | None = None,
) -> Statement:
    """The latest submissions, optionally of one worker, of one step, or with numbers below
    `before`."""
    given = {"worker": worker, "step": step, "before": before}
    filters = {name: value for name, value in given.items() if value is not None}
    return _latest(tuple(filters))(limit=limit, **filters)


@lru_cache
def _latest(filters: tuple[str, ...]) -> Query:
    conditions: dict[str, ColumnElement[bool]] = {
        "worker": submissions.c.worker == bindparam("worker"),
        "step": submissions.c.step == bindparam("step"),
        "before": submissions.c.sequence < bindparam("before"),
    }
    found = _SUBMISSION.where(*(conditions[name] for name in filters))
    return Query(found.order_by(submissions.c.sequence.desc()).limit(bindparam("limit")))


_count_leases = select(func.count()).select_from(leases)
open_leases = Query(_count_leases.where(IS_UNFILLED, _IS_DUE_LATER, _IS_FRESH))
"""Number of tickets that wait for their submission, of policy versions from `oldest` on."""
unfilled = Query(_count_leases.where(IS_UNFILLED, _IS_DUE_LATER))
"""Number of tickets that wait for their submission, of any policy version."""
holders = Query(
    select(leases.c.worker, func.count())
    .where(IS_UNFILLED, _IS_DUE_LATER, _IS_FRESH)
    .group_by(leases.c.worker)
)
"""The workers that hold the tickets of `open_leases`, with their numbers."""
unfilled_leases = Query(
    select(
        *(leases.c.step, leases.c.index, leases.c.deadline, leases.c.policy_version),
        *(leases.c.ticket, leases.c.signature),
    )
    .where(
        leases.c.worker == bindparam("worker"),
        IS_UNFILLED,
        leases.c.deadline >= bindparam("since"),
    )
    .order_by(leases.c.id)
)
"""A `worker`'s tickets that wait for their submission and are due at `since` or later."""
due_tickets = Query(select(leases.c.ticket).where(IS_UNFILLED, _IS_DUE_LATER, _IS_FRESH))
"""The tickets of `open_leases`, as JSON text."""
unfilled_tickets = Query(
    select(leases.c.id, leases.c.ticket, leases.c.signature).where(IS_UNFILLED, _IS_DUE_LATER)
)
"""The tickets of `unfilled`: number, JSON text, signature."""
sign_lease = Query(
    update(leases).where(leases.c.id == bindparam("number")).values(signature=bindparam("signed"))
)
"""Store another `signed` signature of the ticket with a `number`."""
_TICKET_OF = select(submissions.c.sequence, submissions.c.ticket, submissions.c.ticket_signature)
waiting_tickets = Query(_TICKET_OF.where(IS_WAITING))
"""The tickets of submissions that are in no batch: number, JSON text, signature."""
tickets_in_batch = Query(_TICKET_OF.where(_IN_BATCH))
"""The same of the submissions of the batch with a `root`."""
sign_submission = Query(
    update(submissions)
    .where(submissions.c.sequence == bindparam("number"))
    .values(ticket_signature=bindparam("signed"))
)
"""Store another `signed` signature of the ticket of the submission with a `number`."""
last_tickets = Query(
    select(
        *(leases.c.step, leases.c.index, leases.c.deadline),
        *(submissions.c.received_at, submissions.c.units, submissions.c.file_hash),
    )
    .select_from(
        leases.outerjoin(
            submissions,
            (submissions.c.worker == leases.c.worker)
            & (submissions.c.step == leases.c.step)
            & (submissions.c.index == leases.c.index),
        )
    )
    .where(leases.c.worker == bindparam("worker"), leases.c.policy_version != _NEVER)
    .order_by(leases.c.deadline.desc(), leases.c.id.desc())
    .limit(bindparam("limit"))
)
"""A `worker`'s last tickets, newest first: slot, deadline, upload time and file; no closed ones."""
slots = Query(
    select(leases.c.step, leases.c.index)
    .where(leases.c.worker == bindparam("worker"), leases.c.step >= bindparam("since"))
    .union_all(
        select(submissions.c.step, submissions.c.index).where(
            submissions.c.worker == bindparam("worker"), submissions.c.step >= bindparam("since")
        )
    )
)
"""The steps and numbers of a `worker`'s slots, of steps from `since` on."""
hardware_report = Query(select(hardware.c.report).where(hardware.c.node == bindparam("node")))
"""A `node`'s report about its machine."""

_count_waiting = select(func.count()).select_from(submissions).where(IS_WAITING)
waiting_submissions = Query(_count_waiting)
"""Number of submissions that are in no batch."""
waiting_workers = Query(
    select(submissions.c.worker, func.count()).where(IS_WAITING).group_by(submissions.c.worker)
)
"""The workers with submissions in no batch, and the number of these."""
waiting_units = Query(
    select(func.sum(submissions.c.units)).where(
        submissions.c.worker == bindparam("worker"), IS_WAITING
    )
)
"""The units of a `worker`'s submissions that are in no batch."""
received_submissions = Query(
    select(
        select(func.coalesce(func.sum(batches.c.count), literal_column("0"))).scalar_subquery()
        + _count_waiting.scalar_subquery()
    )
)
"""Number of received submissions; it adds up the sizes of batches, so few rows are read."""
units_in_batch = Query(
    select(submissions.c.worker, func.sum(submissions.c.units))
    .where(_IN_BATCH)
    .group_by(submissions.c.worker)
)
"""The units of every worker in the batch with a `root`."""
first_waiting = Query(
    select(submissions.c.submission, submissions.c.signature)
    .where(IS_WAITING)
    .order_by(submissions.c.sequence)
    .limit(bindparam("limit"))
)
"""The submissions that have waited longest for a batch: JSON text, signature."""

_BATCH = select(batches.c.root, batches.c.count, batches.c.units)
all_batches = Query(_BATCH)
"""All batches that were composed."""
open_batches = Query(_BATCH.where(~batches.c.is_judged))
"""Batches whose outcomes are not known to be on chain."""
judge_batch = Query(
    update(batches).where(batches.c.root == bindparam("root")).values(is_judged=true())
)
"""Mark the outcomes of the batch with a `root` as on chain."""
set_unfunded = Query(update(identity).values(is_unfunded=bindparam("is_unfunded")))
"""Store whether the run could not pay for the last batch to commit."""
is_unfunded = Query(select(identity.c.is_unfunded))
"""Whether the run could not pay for the last batch to commit."""

_new_lease = Query(
    new_row(leases, *(c.name for c in leases.c if c.name not in ("id", "is_filled")))
    .values(is_filled=false())
    .inline()
)
_claim_in_slot = Query(select(submissions.c.submission, submissions.c.signature).where(*_OF_SLOT))
_slot_of_file = Query(
    select(submissions.c.worker, submissions.c.step, submissions.c.index).where(_OF_FILE)
)
_ticket = Query(select(leases.c.ticket, leases.c.signature).where(*_LEASE_OF_SLOT))
_fill = Query(update(leases).where(*_LEASE_OF_SLOT).values(is_filled=true()))
_close = Query(update(leases).where(*_LEASE_OF_SLOT).values(policy_version=_NEVER))
close_missed = Query(
    update(leases)
    .where(
        IS_UNFILLED, leases.c.deadline > bindparam("since"), leases.c.deadline < bindparam("now")
    )
    .values(policy_version=_NEVER)
    .returning(leases.c.id)
)
"""Close the leases without a submission that fell due after `since` and before `now`; returns their
numbers.
"""
last_requests = Query(
    select(
        *(
            select(func.coalesce(func.max(column), literal_column("0"))).scalar_subquery()
            for column in (nonces.c.seen_at, heartbeats.c.seen_at)
        )
    )
)
"""Wall clock of the last signed request, while it is stored, and of the last heartbeat; 0 for none.
"""
_SUBMITTED = [
    *("file_hash", "worker", "step", "index", "units", "leaf", "submission", "signature"),
    *("ticket", "ticket_signature", "received_at", "size_bytes"),
]


def new_lease(node: Address, ticket: Ticket, text: str, signature: bytes) -> Statement:
    """Store a ticket; `text` is its JSON form."""
    return _new_lease(
        node=node,
        worker=ticket.worker,
        step=ticket.step,
        index=ticket.index,
        deadline=ticket.deadline,
        ticket=text,
        signature=signature,
        policy_version=ticket.policy_version,
    )


def close_lease(ticket: Ticket) -> Statement:
    """Let no step train on a ticket: it uses no capacity, is not given out again, is no lapse."""
    return _close(worker=ticket.worker, step=ticket.step, index=ticket.index)


def claim_in_slot(claim: Submission) -> Statement:
    """The submission stored for the same slot, as JSON text, with its signature."""
    return _claim_in_slot(worker=claim.worker, step=claim.step, index=claim.index)


def slot_of_file(claim: Submission) -> Statement:
    """The slot whose submission has the same file."""
    return _slot_of_file(file_hash=claim.file_hash)


def ticket_for(claim: Submission) -> Statement:
    """The ticket of a submission, as JSON text, with its signature."""
    return _ticket(worker=claim.worker, step=claim.step, index=claim.index)


def fill(claim: Submission) -> Statement:
    """Mark a submission's ticket as filled."""
    return _fill(worker=claim.worker, step=claim.step, index=claim.index)


def _taking(*names: str) -> Query:
    row = new_row(submissions, *names)
    return Query(row.on_conflict_do_nothing().returning(submissions.c.sequence))


_new_submission, _numbered_submission = _taking(*_SUBMITTED), _taking("sequence", *_SUBMITTED)


def new_submission(entry: BatchEntry, size_bytes: int, sequence: int | None = None) -> Statement:
    """Store a submission, unless its slot or its file is taken; returns its number, by default the
    next one.
    """
    claim, ticket = entry.submission, entry.ticket
    assert ticket is not None  # a worker without a ticket commits its work itself
    row: dict[str, object] = {
        "file_hash": claim.file_hash,
        "worker": claim.worker,
        "step": claim.step,
        "index": claim.index,
        "units": claim.units,
        "leaf": claim.leaf(),
        "submission": json.dumps(claim.to_json()),
        "signature": entry.signature,
        "ticket": json.dumps(ticket.to_json()),
        "ticket_signature": entry.ticket_signature,
        "received_at": entry.received_at,
        "size_bytes": size_bytes,
    }
    if sequence is None:
        return _new_submission(**row)
    return _numbered_submission(sequence=sequence, **row)


continue_numbers = Query(
    select(
        func.setval(
            func.pg_get_serial_sequence(
                literal_column("'submissions'"), literal_column("'sequence'")
            ),
            func.max(submissions.c.sequence),
        )
    )
)
"""Let PostgreSQL's sequence continue after rows that were inserted with explicit numbers. SQLite
continues from the highest number by itself.
"""
new_batch = Query(new_row(batches, "root", "count", "units").values(is_judged=false()))
put_into_batch = Query(
    update(submissions)
    .where(_OF_FILE)
    .values(batch_root=bindparam("batch_root"), position=bindparam("position"))
)


_empty_batch = Query(
    update(submissions).where(_IN_BATCH).values(batch_root=null(), position=null())
)
_forget_batch = Query(delete(batches).where(batches.c.root == bindparam("root")))
forget_submission = Query(delete(submissions).where(_OF_FILE))
"""Delete the submission with a `file_hash`."""


def undo_batch(root: Hash32, *, without: Sequence[Hash32]) -> list[Statement]:
    """Let a composition's submissions wait again, and delete those with the files `without`."""
    return [
        _empty_batch(root=root),
        _forget_batch(root=root),
        *(forget_submission(file_hash=each) for each in without),
    ]


# The outcomes that validators handed in, by batch.

_LONGEST = 512
"""Most batches in one statement: SQLite limits the number of variables."""


@dataclass(frozen=True, slots=True)
class OutcomesRow:
    """One validator's signed outcomes of one batch."""

    batch_id: int
    validator: Address
    records: bytes
    """The packed records."""
    signature: bytes
    received_at: int
    """Chain time of their arrival; 0 when it was lost with a database."""
    batch_root: Hash32

    def is_of(self, batch: BatchView) -> bool:
        """Return whether they belong to this batch, not to one that a reorganisation replaced."""
        return self.batch_root == batch.root


_OUTCOMES = select(*columns(outcomes, OutcomesRow))
handed_in_by = Query(_OUTCOMES.where(*given(outcomes, "batch_id", "validator")))
"""A `validator`'s outcomes of a batch: OutcomesRows."""
_KEEP = latest_row(outcomes)


def keep(row: OutcomesRow) -> Statement:
    """Store a validator's outcomes and replace earlier ones."""
    return _KEEP(**asdict(row))


@lru_cache
def _of_batches(count: int) -> Query:
    ids: list[BindParameter[int]] = [bindparam(f"id_{number}") for number in range(count)]
    return Query(_OUTCOMES.where(outcomes.c.batch_id.in_(ids)))


async def outcomes_of(database: Database, batches: Sequence[BatchView]) -> list[OutcomesRow]:
    """Return all outcomes that were handed in for these batches."""
    by_id = {batch.batch_id: batch for batch in batches}
    wanted, found = list(by_id), list[OutcomesRow]()
    for start in range(0, len(wanted), _LONGEST):
        ids = _padded(wanted[start : start + _LONGEST])
        values = {f"id_{number}": batch_id for number, batch_id in enumerate(ids)}
        [rows] = await database.search(_of_batches(len(ids))(**values))
        found += [OutcomesRow(*row) for row in rows]
    return [row for row in found if row.is_of(by_id[row.batch_id])]


def _padded(ids: Sequence[int]) -> list[int]:
    """Return ids, padded with the last one to a power of two.

    Each length of the list makes another statement, and a connection caches only the newest
    hundred.
    """
    length = 1 << (len(ids) - 1).bit_length()
    return [*ids, *[ids[-1]] * (length - len(ids))]
