"""Retention: files are dropped some time after nobody can need them any more.

A file is evidence while its outcome can be challenged, a case about it is open, or stake slashed
for it is in escrow; and it is training data while a step may still take it. What the database is
rebuilt from stays, so a dropped file's submission and outcome are still known.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sqlalchemy import select, update

from muster.chain import SlashState
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.models import SubmissionRow
from muster.orchestrator.services.files import FileStore
from muster.orchestrator.services.projection import Judged, Projection
from muster.protocol.ids import Hash32
from muster.protocol.messages import Verdict

logger = logging.getLogger(__name__)

PAGE = 500
"""Submissions looked at together."""


class Retention:
    """Says which files may go, and drops them."""

    def __init__(
        self,
        *,
        database: Database,
        files: FileStore,
        projection: Projection,
        challenge_window_s: int,
        max_async_level: int,
        keep_s: int,
        now: Callable[[], int],
    ) -> None:
        self._database = database
        self._files = files
        self._projection = projection
        self._challenge_window_s = challenge_window_s
        self._max_async_level = max_async_level
        self._keep_s = keep_s
        self._now = now

    async def collect(self) -> int:
        """Drop the files that may go; return how many."""
        dropped, last = 0, 0
        while page := await self._page(after=last):
            last = page[-1][0]
            going = [file_hash for _, file_hash in page if self.may_go(file_hash)]
            for file_hash in going:
                await self._files.drop(file_hash)
            await self._note(going)
            dropped += len(going)
        if dropped:
            logger.info("files dropped", extra={"count": dropped})
        return dropped

    def may_go(self, file_hash: Hash32) -> bool:
        """Return whether nobody can need a file any more, for as long as files are kept then."""
        judged = self._projection.judged(file_hash)
        if judged is None:
            return False
        if self._now() < self._final_at(judged) + self._keep_s:
            return False
        return not (self._is_disputed(judged) or self._may_be_trained_on(judged))

    def _final_at(self, judged: Judged) -> int:
        posted_at = self._projection.view.batches[judged.batch_id].posted_at or 0
        if judged.verdict is Verdict.FRAUD:
            return self._projection.run.fraud_closes_at(posted_at, self._challenge_window_s)
        return posted_at + self._challenge_window_s

    def _is_disputed(self, judged: Judged) -> bool:
        view, place = self._projection.view, (judged.batch_id, judged.position)
        is_open = any(
            (case.batch_id, case.position) == place and not case.closed
            for case in view.cases.values()
        )
        return is_open or any(
            (slash.batch_id, slash.position) == place and slash.state is SlashState.ESCROWED
            for slash in view.slashes
        )

    def _may_be_trained_on(self, judged: Judged) -> bool:
        newest = self._projection.run.latest_version or 0
        # A step starts from the newest version, and takes nothing older than this.
        is_fresh = newest - judged.record.policy_version <= self._max_async_level
        return judged.verdict is Verdict.ACCEPTED and is_fresh

    async def _page(self, *, after: int) -> list[tuple[int, Hash32]]:
        async with self._database.read() as session:
            rows = await session.execute(
                select(SubmissionRow.sequence, SubmissionRow.file_hash)
                .where(SubmissionRow.has_file.is_(True), SubmissionRow.sequence > after)
                .order_by(SubmissionRow.sequence)
                .limit(PAGE)
            )
            return [(sequence, Hash32(file_hash)) for sequence, file_hash in rows]

    async def _note(self, dropped: list[Hash32]) -> None:
        if not dropped:
            return
        async with self._database.write() as session:
            await session.execute(
                update(SubmissionRow)
                .where(SubmissionRow.file_hash.in_(dropped))
                .values(has_file=False)
            )
