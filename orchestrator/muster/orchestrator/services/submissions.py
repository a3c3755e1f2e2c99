"""How far a submission has come."""

from __future__ import annotations

from sqlalchemy import select

from muster.api.answers import SubmissionState
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.models import SubmissionRow
from muster.orchestrator.services.projection import Projection
from muster.orchestrator.services.refusals import refuse
from muster.protocol.ids import Hash32


async def state_of(
    file_hash: Hash32, database: Database, projection: Projection
) -> SubmissionState:
    """Return a submission's state; an outcome is known even if the file never came through here."""
    judged = projection.judged(file_hash)
    if judged is not None:
        return SubmissionState(
            state="judged",
            batch_id=judged.batch_id,
            position=judged.position,
            verdict=judged.verdict,
            reason=judged.reason,
        )
    async with database.read() as session:
        row = await session.scalar(
            select(SubmissionRow).where(SubmissionRow.file_hash == file_hash)
        )
    if row is None:
        raise refuse("submission_unknown", "no submission with this file hash was received")
    batch = row.batch_root and projection.batch_with_root(Hash32(row.batch_root))
    if not batch:
        return SubmissionState(state="received")
    return SubmissionState(state="committed", batch_id=batch.batch_id, position=row.position)
