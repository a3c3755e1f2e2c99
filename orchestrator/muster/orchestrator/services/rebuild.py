"""Rebuilds an empty database from the files folder and the chain, and refuses somebody else's.

Submissions, signatures and tickets come from the sidecars, compositions from the batches folder;
of compositions that share a submission the committed one counts, else the latest. Open leases are
lost with the database: their nodes ask again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from muster.orchestrator.db.engine import Database, continue_numbers
from muster.orchestrator.db.models import (
    BatchRow,
    IdentityRow,
    LeaseRow,
    MetricsRow,
    OutcomesRow,
    SubmissionRow,
)
from muster.orchestrator.services.files import FileStore, StoredBatch, StoredSubmission
from muster.orchestrator.services.intake import submission_row
from muster.orchestrator.services.projection import Projection
from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32
from muster.protocol.merkle import merkle_root
from muster.protocol.messages import Submission, Ticket

logger = logging.getLogger(__name__)


async def claim_database(
    database: Database, identity: IdentityRow, projection: Projection
) -> IdentityRow:
    """Return the database's identity, written now if it is new.

    Raises StorageError when it belongs to another run, chain or deployment.
    """
    async with database.write() as session:
        held: IdentityRow | None = await session.scalar(select(IdentityRow))
        if held is None:
            session.add(identity)
            return identity
        first = await session.scalar(select(LeaseRow).order_by(LeaseRow.id).limit(1))
    wanted = (identity.run_id, identity.chain_id, identity.ledger)
    if (held.run_id, held.chain_id, held.ledger) != wanted:
        raise _foreign(f"it belongs to run {held.run_id} on chain {held.chain_id}")
    if first is not None and not _is_anchored(Ticket.from_json(first.ticket), projection):
        raise _foreign("its tickets name blocks that this chain does not have")
    return held


async def rebuild(database: Database, files: FileStore, projection: Projection) -> int:
    """Fill an empty database; returns how many submissions it recovered."""
    async with database.write() as session:
        if await session.scalar(select(func.count()).select_from(SubmissionRow)):
            return 0
        batches = list(files.batches())
        submissions = await _restore_submissions(session, files, batches, projection)
        await _restore_batches(session, batches, submissions, projection)
        _restore_outcomes(session, files, projection)
        await _restore_metrics(session, files)
    if submissions:
        logger.info("database rebuilt", extra={"submissions": len(submissions)})
    return len(submissions)


async def _restore_submissions(
    session: AsyncSession,
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
    for sequence, stored in enumerate(in_order, start=1):
        session.add(submission_row(stored.model_copy(update={"sequence": sequence})))
    await session.flush()
    await continue_numbers(session)
    return {s.submission.file_hash: s.submission for s in in_order}


async def _restore_batches(
    session: AsyncSession,
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
        await _restore_batch(session, batch.root, members)


async def _restore_batch(
    session: AsyncSession, root: Hash32, submissions: list[Submission]
) -> None:
    units = sum(s.units for s in submissions)
    session.add(BatchRow(root=root, count=len(submissions), units=units))
    await session.flush()
    for position, submission in enumerate(submissions):
        await session.execute(
            update(SubmissionRow)
            .where(SubmissionRow.file_hash == submission.file_hash)
            .values(batch_root=root, position=position)
        )


def _restore_outcomes(session: AsyncSession, files: FileStore, projection: Projection) -> None:
    for stored in files.outcomes():
        batch = projection.batch(stored.batch_id)
        if batch is not None and batch.root == stored.root:
            session.add(
                OutcomesRow(
                    batch_id=stored.batch_id,
                    validator=stored.validator,
                    records=stored.records,
                    signature=stored.signature,
                    batch_root=stored.root,
                )
            )


async def _restore_metrics(session: AsyncSession, files: FileStore) -> None:
    merged: dict[int, dict[str, float]] = {}
    for step, figures in files.metrics():
        merged.setdefault(step, {}).update(figures)
    for revision, (step, figures) in enumerate(merged.items()):
        session.add(MetricsRow(step=step, figures=figures, revision=revision))


def _belongs(stored: StoredSubmission, projection: Projection) -> bool:
    ticket = stored.ticket
    return (
        ticket is not None
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
