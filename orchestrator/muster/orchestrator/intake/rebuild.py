"""Rebuilds an empty database from the files folder and the chain; refuses one of another run.

Submissions, signatures and tickets come from the sidecars, compositions from the batches folder. Of
compositions that share a submission the committed one counts, or else the latest. Open leases are
lost with the database; their nodes request new ones. Second signatures come from the doubles
folder; the chain says which of them were reported.
"""

import logging
from collections.abc import Iterable

from sqlalchemy import select

from muster.orchestrator.dashboard.training import keep_figures
from muster.orchestrator.db import Database, statements
from muster.orchestrator.db.query import Query, Queryable, new_row
from muster.orchestrator.db.statements import OutcomesRow, keep
from muster.orchestrator.db.tables import identity, submissions
from muster.orchestrator.intake.batching import composition_rows
from muster.orchestrator.intake.files import FileStore, StoredBatch, StoredSubmission
from muster.orchestrator.outcomes.doubles import keep_double
from muster.orchestrator.projection import Projection
from muster.protocol.errors import StorageError
from muster.protocol.ids import Hash32
from muster.protocol.merkle import batch_root
from muster.protocol.messages import Submission

logger = logging.getLogger(__name__)

_OWNER = ("run_id", "chain_id", "ledger", "deploy_hash")
_IDENTITY = Query(select(identity.c.created_at, *(identity.c[name] for name in _OWNER)))()
_ANY = Query(select(submissions.c.sequence).limit(1))()
_CLAIM = Query(new_row(identity, *_OWNER, "created_at"))
TOGETHER = 1000
"""Submissions inserted in one round trip."""


async def claim_database(
    database: Database, *, run_id: int, chain_id: int, ledger: str, deploy_hash: Hash32, now: int
) -> int:
    """Mark a database as this run's; return its time of creation, which is `now` if it is new.

    Raises StorageError when it belongs to another run, chain or deployment.
    """
    wanted = (run_id, chain_id, ledger, deploy_hash)
    async with database.transaction() as asked:
        [held] = await asked.ask(_IDENTITY)
        if not held:
            owner = dict(zip(_OWNER, wanted, strict=True))
            await asked.ask(_CLAIM(**owner, created_at=now))
            return now
    created_at, *found = held[0]
    if tuple(found[:3]) != wanted[:3]:
        raise _foreign(f"it belongs to run {found[0]} on chain {found[1]}")
    if tuple(found) != wanted:
        raise _foreign("this chain has another block where its contracts were deployed")
    return int(created_at)


async def fill_database(database: Database, files: FileStore, projection: Projection) -> int:
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
            logger.warning(
                "stored submission ignored: wrong run, or a second one for its slot",
                extra={"file": submission.file_hash.hex()},
            )
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
        if batch_root([s.leaf() for s in members]) != batch.root:
            logger.warning(
                "stored batch ignored: its submissions do not give its root",
                extra={"root": batch.root.hex()},
            )
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
        and projection.is_anchored(ticket)
    )


def _foreign(reason: str) -> StorageError:
    return StorageError(
        f"the database is of another run: {reason}",
        hint="choose another --database, or delete it: the chain and the files folder rebuild it",
    )
