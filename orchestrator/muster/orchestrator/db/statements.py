"""The statements of several services, in SQL that SQLite and PostgreSQL take, `?` for values.

An index alone answers those of leases and uploads. Statements of one service stand beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from muster.api.answers import BatchEntry
from muster.protocol.ids import Address, Hash32, Step
from muster.protocol.messages import Submission, Ticket

Statement = tuple[str, tuple[object, ...]]
"""SQL, and its values."""
Rows = Sequence[tuple[Any, ...]]
"""The answer to a statement; empty for one that answers nothing."""


class Asked(Protocol):
    """A transaction, or a connection."""

    async def ask(self, *statements: Statement) -> list[Rows]:
        """Run statements in order, in one round trip; return the rows of each."""


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
    """JSON."""
    ticket_signature: bytes
    received_at: int
    """Chain time at which the upload was complete."""
    size_bytes: int
    batch_root: Hash32 | None
    """The batch it was put into."""
    position: int | None
    """Its place in that batch."""

    @property
    def claim(self) -> Submission:
        """What the node signed."""
        return Submission.from_json(json.loads(self.submission))


def submissions(condition: str, *values: object) -> Statement:
    """Submissions that meet a condition, which may also order and limit them: SubmissionRows."""
    return (
        "SELECT sequence, file_hash, worker, submission, signature, ticket, ticket_signature,"
        f" received_at, size_bytes, batch_root, position FROM submissions {condition}",
        values,
    )


def in_slot(claim: Submission) -> Statement:
    """The submission that has the same slot."""
    slot = (claim.worker, claim.step, claim.index)
    return submissions('WHERE worker = ? AND step = ? AND "index" = ?', *slot)


def in_batch(root: Hash32) -> Statement:
    """The submissions of a batch, in order."""
    return submissions("WHERE batch_root = ? ORDER BY position", root)


def open_leases(*, now: int, oldest: int) -> Statement:
    """How many tickets wait for their submission, of policies from `oldest` on."""
    return (
        "SELECT count(*) FROM leases"
        " WHERE is_filled = false AND deadline >= ? AND policy_version >= ?",
        (now, oldest),
    )


def unfilled(*, now: int) -> Statement:
    """How many tickets wait for their submission, of whatever policy."""
    return "SELECT count(*) FROM leases WHERE is_filled = false AND deadline >= ?", (now,)


def holders(*, now: int, oldest: int) -> Statement:
    """The workers that hold those tickets, and how many each."""
    return (
        "SELECT worker, count(*) FROM leases"
        " WHERE is_filled = false AND deadline >= ? AND policy_version >= ? GROUP BY worker",
        (now, oldest),
    )


def waiting_workers() -> Statement:
    """The workers whose submissions are in no batch, and how many each."""
    return "SELECT worker, count(*) FROM submissions WHERE batch_root IS NULL GROUP BY worker", ()


def received_submissions() -> Statement:
    """How many submissions were received; batches know their sizes, so few rows are read."""
    return (
        "SELECT (SELECT coalesce(sum(count), 0) FROM batches)"
        " + (SELECT count(*) FROM submissions WHERE batch_root IS NULL)",
        (),
    )


def waiting_submissions() -> Statement:
    """How many submissions are in no batch."""
    return "SELECT count(*) FROM submissions WHERE batch_root IS NULL", ()


def unfilled_leases(worker: Address, *, since: int) -> Statement:
    """A worker's tickets that wait for their submission and are due at `since` or later."""
    return (
        "SELECT deadline, policy_version, ticket, signature FROM leases"
        " WHERE worker = ? AND is_filled = false AND deadline >= ? ORDER BY id",
        (worker, since),
    )


def waiting_units(worker: Address) -> Statement:
    """The units of a worker's submissions that are in no batch."""
    return "SELECT sum(units) FROM submissions WHERE worker = ? AND batch_root IS NULL", (worker,)


def units_in_batch(root: Hash32) -> Statement:
    """The units of every worker in a batch."""
    return (
        "SELECT worker, sum(units) FROM submissions WHERE batch_root = ? GROUP BY worker",
        (root,),
    )


def slots(worker: Address, *, since: Step) -> Statement:
    """The steps and numbers of a worker's slots, of steps from `since` on."""
    return (
        'SELECT step, "index" FROM leases WHERE worker = ? AND step >= ?'
        " UNION ALL "
        'SELECT step, "index" FROM submissions WHERE worker = ? AND step >= ?',
        (worker, since, worker, since),
    )


def new_lease(node: Address, ticket: Ticket, text: str, signature: bytes) -> Statement:
    """Write a ticket down; `text` is its JSON form."""
    return (
        'INSERT INTO leases (node, worker, step, "index", deadline, ticket, signature,'
        " is_filled, policy_version) VALUES (?, ?, ?, ?, ?, ?, ?, false, ?)",
        (
            node,
            ticket.worker,
            ticket.step,
            ticket.index,
            ticket.deadline,
            text,
            signature,
            ticket.policy_version,
        ),
    )


def open_batches() -> Statement:
    """Batches whose outcomes are not known to be on chain."""
    return "SELECT root, count, units FROM batches WHERE is_judged = false", ()


def batches() -> Statement:
    """All batches that were composed."""
    return "SELECT root, count, units FROM batches", ()


def judge_batch(root: Hash32) -> Statement:
    """Write down that a batch's outcomes are on chain."""
    return "UPDATE batches SET is_judged = true WHERE root = ?", (root,)


def set_unfunded(is_unfunded: bool) -> Statement:
    """Write down whether the run could pay for the batch that was to be committed last."""
    return "UPDATE identity SET is_unfunded = ?", (is_unfunded,)


def is_unfunded() -> Statement:
    """Whether the run could not pay for the batch that was to be committed last."""
    return "SELECT is_unfunded FROM identity", ()


def claim_in_slot(claim: Submission) -> Statement:
    """The claim, as JSON text, that a submission's slot has."""
    return (
        'SELECT submission FROM submissions WHERE worker = ? AND step = ? AND "index" = ?',
        (claim.worker, claim.step, claim.index),
    )


def slot_of_file(claim: Submission) -> Statement:
    """The slot that has a submission's file."""
    return (
        'SELECT worker, step, "index" FROM submissions WHERE file_hash = ?',
        (claim.file_hash,),
    )


def ticket_for(claim: Submission) -> Statement:
    """The ticket that a submission fills, as JSON text, with its signature."""
    return (
        'SELECT ticket, signature FROM leases WHERE worker = ? AND step = ? AND "index" = ?',
        (claim.worker, claim.step, claim.index),
    )


def fill(claim: Submission) -> Statement:
    """Write down that a submission's ticket waits no more."""
    return (
        'UPDATE leases SET is_filled = true WHERE worker = ? AND step = ? AND "index" = ?',
        (claim.worker, claim.step, claim.index),
    )


def new_submission(entry: BatchEntry, size_bytes: int, sequence: int | None = None) -> Statement:
    """Write a submission down, unless its slot or its file is taken; answers its number, the next
    one if none is given.
    """
    claim, ticket = entry.submission, entry.ticket
    assert ticket is not None  # who has none commits its work itself
    numbered = ("sequence, ", "?, ", (sequence,)) if sequence else ("", "", ())
    return (
        f'INSERT INTO submissions ({numbered[0]}file_hash, worker, step, "index", units, leaf,'
        " submission, signature, ticket, ticket_signature, received_at, size_bytes)"
        f" VALUES ({numbered[1]}?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT DO NOTHING RETURNING sequence",
        (
            *numbered[2],
            claim.file_hash,
            claim.worker,
            claim.step,
            claim.index,
            claim.units,
            claim.leaf(),
            json.dumps(claim.to_json()),
            entry.signature,
            json.dumps(ticket.to_json()),
            entry.ticket_signature,
            entry.received_at,
            size_bytes,
        ),
    )


def continue_numbers() -> Statement:
    """Let PostgreSQL number the next submission after those that were written with their numbers;
    SQLite counts from the highest there is.
    """
    return (
        "SELECT setval(pg_get_serial_sequence('submissions', 'sequence'), max(sequence))"
        " FROM submissions",
        (),
    )


def first_waiting(count: int) -> Statement:
    """The claims that wait longest for a batch, as JSON text."""
    return (
        "SELECT submission FROM submissions WHERE batch_root IS NULL ORDER BY sequence LIMIT ?",
        (count,),
    )


def new_batch(root: Hash32, *, count: int, units: int) -> Statement:
    """Write a composition down."""
    return (
        "INSERT INTO batches (root, count, units, is_judged) VALUES (?, ?, ?, false)",
        (root, count, units),
    )


def put_into_batch(claim: Submission, root: Hash32, position: int) -> Statement:
    """Write down a submission's place in a batch."""
    return (
        "UPDATE submissions SET batch_root = ?, position = ? WHERE file_hash = ?",
        (root, position, claim.file_hash),
    )


def hardware_report(node: Address) -> Statement:
    """What a node said that its machine has."""
    return "SELECT report FROM hardware WHERE node = ?", (node,)


def last_tickets(worker: Address, *, count: int) -> Statement:
    """A worker's last tickets, newest first: slots, when they were due and filled, and by what."""
    return (
        'SELECT leases.step, leases."index", leases.deadline, received_at, units, file_hash'
        " FROM leases LEFT JOIN submissions"
        " ON submissions.worker = leases.worker AND submissions.step = leases.step"
        ' AND submissions."index" = leases."index"'
        " WHERE leases.worker = ? ORDER BY leases.deadline DESC, leases.id DESC LIMIT ?",
        (worker, count),
    )
