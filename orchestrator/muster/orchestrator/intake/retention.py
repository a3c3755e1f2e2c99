"""Retention: files are deleted some time after nobody can need them any more.

A file is evidence while its outcome can be challenged, a case about it is open, or stake slashed
for it is in escrow. It is training data while a step may still train on it. If nobody judged its
batch, jurors may need it until they can no longer be called and the batch is void. The sidecars are
kept, so a deleted file's submission and outcome are still known.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import bindparam, false, select, update

from muster.chain import SlashState
from muster.orchestrator.db import Database
from muster.orchestrator.db.query import Query
from muster.orchestrator.db.tables import submissions
from muster.orchestrator.intake.files import FileStore
from muster.orchestrator.ports import Constants
from muster.orchestrator.projection import Judged, Projection, Slot
from muster.protocol.ids import Hash32
from muster.protocol.messages import Verdict

logger = logging.getLogger(__name__)

PAGE = 500
"""Submissions examined in one query."""
_PAGE = Query(
    select(
        *(submissions.c.sequence, submissions.c.file_hash),
        *(submissions.c.worker, submissions.c.step, submissions.c.index),
        *(submissions.c.leaf, submissions.c.batch_root),
    )
    .where(submissions.c.has_file, submissions.c.sequence > bindparam("after"))
    .order_by(submissions.c.sequence)
    .limit(bindparam("limit"))
)
_DROPPED = Query(
    update(submissions)
    .where(submissions.c.file_hash == bindparam("file_hash"))
    .values(has_file=false())
)


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A submission whose file is kept."""

    sequence: int
    """Order of upload."""
    file_hash: Hash32
    slot: Slot
    roots: frozenset[Hash32]
    """Roots of the batches that it can be in: its batch, and a batch of it alone."""


@dataclass(eq=False, repr=False, kw_only=True)
class Retention:
    """Decides which files may be deleted, and deletes them."""

    database: Database
    files: FileStore
    projection: Projection
    constants: Constants
    max_async_level: int
    keep_s: int
    now: Callable[[], int]

    async def collect(self) -> int:
        """Delete the files that may be deleted; return their number."""
        dropped, last = 0, 0
        while page := await self._page(after=last):
            last = page[-1].sequence
            going = [held.file_hash for held in page if self.may_go(held)]
            for file_hash in going:
                await self.files.drop(file_hash)
            await self._note(going)
            dropped += len(going)
        if dropped:
            logger.info("files dropped", extra={"count": dropped})
        return dropped

    def may_go(self, held: KeptFile) -> bool:
        """Return whether nobody has needed a file for the retention time."""
        judged = self.projection.judged(held.slot, held.file_hash)
        if judged is None:
            return self._is_past_appeal(held)
        batch = self.projection.view.batches[judged.batch_id]
        final_at = self.projection.final_at(batch, judged.verdict, self.constants.challenge_s) or 0
        if self.now() < final_at + self.keep_s:
            return False
        return not (self._is_disputed(judged) or self._may_be_trained_on(judged))

    def _is_past_appeal(self, held: KeptFile) -> bool:
        """Return whether all batches of a submission have been void for the retention time."""
        # Two batches can have the same root: a worker may commit what the orchestrator committed.
        if any(batch.root in held.roots for batch in self.projection.unsettled):
            return False
        found = [self.projection.batch_with_root(root) for root in held.roots]
        constants, now = self.constants, self.now()
        batches = [batch for batch in found if batch is not None]
        return bool(batches) and all(
            batch.is_void
            and now >= batch.due_at(constants.outcome_deadline_s) + constants.appeal_s + self.keep_s
            for batch in batches
        )

    def _is_disputed(self, judged: Judged) -> bool:
        place = (judged.batch_id, judged.position)
        return place in self.projection.disputed or any(
            (slash.batch_id, slash.position) == place and slash.state is SlashState.ESCROWED
            for slash in self.projection.view.slashes
        )

    def _may_be_trained_on(self, judged: Judged) -> bool:
        newest = self.projection.run.latest_version or 0
        # A step starts from the newest version, and trains on nothing older than this.
        is_fresh = newest - judged.record.policy_version <= self.max_async_level
        return judged.verdict is Verdict.ACCEPTED and is_fresh

    async def _page(self, *, after: int) -> list[KeptFile]:
        [rows] = await self.database.search(_PAGE(after=after, limit=PAGE))
        return [
            KeptFile(
                number,
                Hash32(name),
                (worker, step, index),
                frozenset(Hash32(root) for root in roots if root),
            )
            for number, name, worker, step, index, *roots in rows
        ]

    async def _note(self, dropped: list[Hash32]) -> None:
        if not dropped:
            return
        async with self.database.transaction() as asked:
            await asked.ask(*(_DROPPED(file_hash=each) for each in dropped))
