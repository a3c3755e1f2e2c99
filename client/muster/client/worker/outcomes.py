"""The outcomes of a worker's submissions, step 10 of its loop: read from the chain, noted in its
journal, or handed to the duty that acts on them.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from muster.chain import BatchView, ChainView
from muster.client.worker.context import WorkerContext
from muster.client.worker.journal import SignedSubmission, SubmissionJournal
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import OutcomeRecord, Verdict

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Judged:
    """Work with an outcome."""

    signed: SignedSubmission
    """The submission."""
    batch: BatchView
    """The batch that holds it."""
    position: int
    """Its place in the batch."""

    @property
    def record(self) -> OutcomeRecord:
        """The outcome."""
        return (self.batch.records or ())[self.position]

    @property
    def case_id(self) -> Hash32:
        """The name of the case about its outcome: the same work may be judged in several places."""
        return self.record.leaf(self.batch.batch_id, self.position)


class Outcomes:
    """Notes the outcomes of one worker's submissions."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._posted = deque[int](maxlen=100_000)
        self._noting = asyncio.Lock()
        self.earned: list[tuple[int, int]] = []
        """Time and price in wei of each acceptance."""
        self.refused = 0
        """Number of outcomes other than acceptances."""

    def read(self, batch_ids: Iterable[int]) -> None:
        """Have the outcomes of batches noted by the next call of `note`."""
        self._posted.extend(batch_ids)

    async def note(self) -> None:
        """Note the outcomes of this worker's submissions in batches posted since the last call."""
        context, view = self._context, self._context.view
        async with self._noting:
            account = view.workers.get(context.worker)
            while self._posted and account is not None:
                batch = view.batches.get(self._posted[0])
                if batch is not None and batch.run_id == context.run_id:
                    own = [
                        (position, record)
                        for position, record in enumerate(batch.records or ())
                        if record.worker_id == account.worker_id
                    ]
                    for position, record in own:
                        await self._take_in(batch, position, record)
                    self._count(batch, [record for _, record in own])
                self._posted.popleft()

    def _count(self, batch: BatchView, records: Iterable[OutcomeRecord]) -> None:
        for record in records:
            if record.verdict is Verdict.ACCEPTED:
                self.earned.append((batch.posted_at or 0, record.units * batch.price_per_unit))
            else:
                self.refused += 1

    async def _take_in(self, batch: BatchView, position: int, record: OutcomeRecord) -> None:
        context, journal, silence = self._context, self._context.journal, self._context.held.silence
        signed = journal.judged(context.run_id, context.worker, record)
        if signed is None:
            return
        judged = Judged(signed, batch, position)
        if record.verdict is Verdict.FRAUD and silence is not None:
            # Disputed whatever was noted before: a slot may be judged in several places.
            if await asyncio.to_thread(journal.accuse, signed, judged.case_id):
                _say(judged)
                silence.accused[judged.case_id] = judged
        elif signed.slot in journal.unfinished():
            await self._finish(judged)
        elif record.verdict is Verdict.ACCEPTED and signed.slot in journal.accepted() and silence:
            silence.accepted[signed.slot] = judged  # after a restart, or a reorganisation

    async def _finish(self, judged: Judged) -> None:
        """Note the outcome of an unfinished submission, unless another batch decides about it."""
        signed, record, silence = judged.signed, judged.record, self._context.held.silence
        is_refused = record.verdict in (Verdict.REJECTED, Verdict.INCOMPLETE)
        if is_refused and silence is not None and silence.has_another(signed, judged.batch):
            silence.note_copy(judged)
            return  # the batch that held it first decides: a later copy is late, or its slot used
        if silence is not None and silence.is_left_free(judged.batch, record.reason):
            # The same work is submitted directly, unless it already was.
            silence.refused[signed.slot] = record.reason.name
            return
        _say(judged)
        await asyncio.to_thread(self._context.journal.finish, signed, record.verdict.name)
        if record.verdict is Verdict.ACCEPTED and silence is not None:
            silence.accepted[signed.slot] = judged


def _say(judged: Judged) -> None:
    record = judged.record
    fields = {**judged.signed.fields, "units": record.units}
    if record.verdict is Verdict.ACCEPTED:
        logger.info("submission accepted", extra=fields)
    else:
        said = {"verdict": record.verdict.name, "reason": record.reason.name}
        logger.warning("submission not accepted", extra={**fields, **said})


def recall_accusations(
    journal: SubmissionJournal, view: ChainView, run_id: RunId, worker: Address
) -> None:
    """Tell the journal which of its work the chain calls fraud, so that it keeps what a dispute
    needs before the loop disputes it.
    """
    member = view.member(run_id, worker)
    worker_id = member.worker_id if member else None
    frauds = (
        (batch, position, record)
        for batch in view.batches.values()
        if batch.run_id == run_id
        for position, record in enumerate(batch.records or ())
        if record.verdict is Verdict.FRAUD
    )
    for batch, position, record in frauds:
        signed = journal.judged(run_id, worker, record)
        if signed is not None and record.worker_id == worker_id:
            journal.accuse(signed, Judged(signed, batch, position).case_id)
