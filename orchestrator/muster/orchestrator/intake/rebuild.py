"""Rebuilds an empty database from the files folder and the chain, and refuses somebody else's.

Submissions, signatures and tickets come from the sidecars, compositions from the batches folder. Of
compositions that share a submission the committed one counts, else the latest. Open leases are lost
with the database: their nodes ask again. The doubles folder has the second signatures; the chain
says which of them were reported.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable

from sqlalchemy import select

from muster.orchestrator.dashboard.training import keep_figures
from muster.orchestrator.db import Database, statements
from muster.orchestrator.db.query import Query, Queryable, Statement, new_row
from muster.orchestrator.db.statements import OutcomesRow, keep
from muster.orchestrator.db.tables import identity, leases, submissions
from muster.orchestrator.intake.batching import composition_rows
from muster.orchestrator.intake.files import FileStore, StoredBatch, StoredSubmission
from muster.orchestrator.outcomes.doubles import keep_double
from muster.orchestrator.projection import Projection
from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32
from muster.protocol.merkle import merkle_root
from muster.protocol.messages import Submission, Ticket

logger = logging.getLogger(__name__)

_IDENTITY = Query(
    select(identity.c.created_at, identity.c.run_id, identity.c.chain_id, identity.c.ledger)
)()
_FIRST_TICKET = Query(select(leases.c.ticket).order_by(leases.c.id).limit(1))()
_ANY = Query(select(submissions.c.sequence).limit(1))()
_CLAIM = Query(new_row(identity, "run_id", "chain_id", "ledger", "created_at"))
TOGETHER = 1000
"""Submissions that are written in one round trip."""


async def claim_database(
    database: Database, projection: Projection, *, chain_id: int, ledger: str, now: int
) -> int:
    """Make a database this run's; return when it was created, now if it is new.

    Raises StorageError when it belongs to another run, chain or deployment.
    """
    wanted = (projection.run_id, chain_id, ledger)
    async with database.transaction() as asked:
        held, tickets = await asked.ask(_IDENTITY, _FIRST_TICKET)
        if not held:
            await asked.ask(_claim(*wanted, now))
            return now
    created_at, *found = held[0]
    if tuple(found) != wanted:
        raise _foreign(f"it belongs to run {found[0]} on chain {found[1]}")
    for (ticket,) in tickets:
        if not _is_anchored(Ticket.from_json(json.loads(ticket)), projection):
            raise _foreign("its tickets name blocks that this chain does not have")
    return int(created_at)


def _claim(run_id: int, chain_id: int, ledger: str, created_at: int) -> Statement:
    return _CLAIM(run_id=run_id, chain_id=chain_id, ledger=ledger, created_at=created_at)


async def rebuild(database: Database, files: FileStore, projection: Projection) -> int:
    """Fill an empty database; returns how many submissions it recovered."""
    async with database.transaction() as asked:
        [rows] = await asked.ask(_ANY)
        if rows:
            return 0
        batches = list(files.batches())
        submissions = await _restore_submissions(asked, files, batches, projection)
        if database.is_shared:
            await asked.ask(statements.continue_numbers())
        await _restore_batches(asked, batches, submissions, projection)
        await _restore_outcomes(asked, files, projection)
        await asked.ask(*map(keep_double, files.doubles()))
        await _restore_metrics(asked, files)
    if submissions:
        logger.info("database rebuilt", extra={"submissions": len(submissions)})
    return len(submissions)


async def _restore_submissions(
    asked: Queryable,
    files: FileStore,
    batches: Iterable[StoredBatch],
    projection: Projection,
) -> dict[Hash32, Submission]:
    on_chain = {
        file_hash
        for batch in batches
        if projection.batch_with_root(batch.root) is not None
        for file_hash in batch.file_hashes
    }
    slots: dict[tuple[str, int, int], StoredSubmission] = {}
    # A crash between sidecar and database can leave two files for one slot: what is on chain wins.
    for stored in sorted(files.submissions(), key=lambda s: s.submission.file_hash not in on_chain):
        submission = stored.submission
        slot = (submission.worker, submission.step, submission.index)
        if slot in slots or not _belongs(stored, projection):
            logger.warning("a submission is ignored", extra={"file": submission.file_hash.hex()})
            continue
        slots[slot] = stored
    in_order = sorted(slots.values(), key=lambda s: s.sequence)
    for start in range(0, len(in_order), TOGETHER):
        part = in_order[start : start + TOGETHER]
        await asked.ask(
            *(
                statements.new_submission(stored, stored.size_bytes, start + n)
                for n, stored in enumerate(part, start=1)
            )
        )
    return {s.submission.file_hash: s.submission for s in in_order}


async def _restore_batches(
    asked: Queryable,
    stored: Iterable[StoredBatch],
    submissions: dict[Hash32, Submission],
    projection: Projection,
) -> None:
    def precedence(batch: StoredBatch) -> tuple[bool, int]:
        return projection.batch_with_root(batch.root) is None, -batch.composed_ns

    placed: set[Hash32] = set()
    for batch in sorted(stored, key=precedence):
        members = [submissions[h] for h in batch.file_hashes if h in submissions]
        is_whole = len(members) == len(batch.file_hashes) and bool(members)
        if not is_whole or placed.intersection(batch.file_hashes):
            continue
        if merkle_root([s.leaf() for s in members]) != batch.root:
            logger.warning("a composition is ignored", extra={"root": batch.root.hex()})
            continue
        placed.update(batch.file_hashes)
        await asked.ask(*composition_rows(batch.root, members))


async def _restore_outcomes(asked: Queryable, files: FileStore, projection: Projection) -> None:
    for stored in files.outcomes():
        batch = projection.batch(stored.batch_id)
        if batch is not None and batch.root == stored.root:
            row = OutcomesRow(
                stored.batch_id, stored.validator, stored.records, stored.signature, 0, stored.root
            )
            await asked.ask(keep(row))


async def _restore_metrics(asked: Queryable, files: FileStore) -> None:
    merged: dict[int, dict[str, float | str]] = {}
    for step, figures in files.metrics():
        merged.setdefault(step, {}).update(figures)
    for revision, (step, figures) in enumerate(merged.items()):
        await asked.ask(keep_figures(step, figures, revision))


def _belongs(stored: StoredSubmission, projection: Projection) -> bool:
    ticket = stored.ticket
    return (
        ticket is not None
        and stored.ticket_signature is not None
        and stored.submission.run_id == projection.run_id
        and _is_anchored(ticket, projection)
    )


def _is_anchored(ticket: Ticket, projection: Projection) -> bool:
    checkpoint = projection.run.checkpoints.get(ticket.policy_version)
    member = projection.run.members.get(ticket.worker)
    if checkpoint is None or member is None:
        return False
    return member.beacon_under(checkpoint) == ticket.beacon


def _foreign(reason: str) -> StorageError:
    return StorageError(
        f"the database is not this run's: {reason}",
        hint="give another --database and --files, or delete both",
    )
