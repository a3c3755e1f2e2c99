"""What leases and uploads ask of the database. Each is answered by an index alone."""

from __future__ import annotations

import json

from muster.orchestrator.db.direct import Statement
from muster.protocol.ids import Address, Hash32, Step
from muster.protocol.messages import Submission, Ticket


def open_leases(*, now: int, oldest: int) -> Statement:
    """How many tickets wait for their submission, of policies from `oldest` on."""
    return (
        "SELECT count(*) FROM leases"
        " WHERE is_filled = false AND deadline >= ? AND policy_version >= ?",
        (now, oldest),
    )


def holders(*, now: int, oldest: int) -> Statement:
    """The nodes that hold those tickets."""
    return (
        "SELECT node FROM leases WHERE is_filled = false AND deadline >= ? AND policy_version >= ?",
        (now, oldest),
    )


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
        "SELECT node, deadline, policy_version, CAST(ticket AS TEXT), signature FROM leases"
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


def last_slots(worker: Address, *, since: Step) -> Statement:
    """The numbers of a worker's last slots, of each step from `since` on."""
    return (
        'SELECT step, max("index") FROM leases WHERE worker = ? AND step >= ? GROUP BY step'
        " UNION ALL "
        'SELECT step, max("index") FROM submissions WHERE worker = ? AND step >= ? GROUP BY step',
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


def is_unfunded() -> Statement:
    """Whether the run could not pay for the batch that was to be committed last."""
    return "SELECT is_unfunded FROM identity", ()


def claim_in_slot(claim: Submission) -> Statement:
    """The claim, as JSON text, that a submission's slot has."""
    return (
        "SELECT CAST(submission AS TEXT) FROM submissions"
        ' WHERE worker = ? AND step = ? AND "index" = ?',
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
        "SELECT CAST(ticket AS TEXT), signature FROM leases"
        ' WHERE worker = ? AND step = ? AND "index" = ?',
        (claim.worker, claim.step, claim.index),
    )


def fill(claim: Submission) -> Statement:
    """Write down that a submission's ticket waits no more."""
    return (
        'UPDATE leases SET is_filled = true WHERE worker = ? AND step = ? AND "index" = ?',
        (claim.worker, claim.step, claim.index),
    )


def new_submission(
    claim: Submission,
    signature: bytes,
    *,
    ticket: Ticket,
    ticket_signature: bytes,
    received_at: int,
    size_bytes: int,
) -> Statement:
    """Write a submission down, unless its slot or its file is taken; answers its number."""
    return (
        'INSERT INTO submissions (file_hash, worker, step, "index", units, leaf, submission,'
        " signature, ticket, ticket_signature, received_at, size_bytes, has_file)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, true)"
        " ON CONFLICT DO NOTHING RETURNING sequence",
        (
            claim.file_hash,
            claim.worker,
            claim.step,
            claim.index,
            claim.units,
            claim.leaf(),
            json.dumps(claim.to_json()),
            signature,
            json.dumps(ticket.to_json()),
            ticket_signature,
            received_at,
            size_bytes,
        ),
    )


def first_waiting(count: int) -> Statement:
    """The claims that wait longest for a batch, as JSON text."""
    return (
        "SELECT CAST(submission AS TEXT) FROM submissions WHERE batch_root IS NULL"
        " ORDER BY sequence LIMIT ?",
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


def last_tickets(node: Address, *, now: int, count: int) -> Statement:
    """When a node's last tickets that are over were due and filled, and with how many units."""
    return (
        "SELECT leases.deadline, received_at, units FROM leases LEFT JOIN submissions"
        " ON submissions.worker = leases.worker AND submissions.step = leases.step"
        ' AND submissions."index" = leases."index"'
        " WHERE node = ? AND (is_filled = true OR leases.deadline < ?)"
        " ORDER BY leases.deadline DESC, leases.id DESC LIMIT ?",
        (node, now, count),
    )
