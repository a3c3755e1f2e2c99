"""What is to be judged: the submissions of batches as claims, with what the chain says of their
workers, policies and slots.

A slot is used when an earlier batch names it, whoever judged that one. Where nobody did yet, the
orchestrator shows what the batch is made of; when it does not for long, that batch is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muster.api import BatchEntry, OrchestratorApi
from muster.client.facts import HistoryView, entry_of, ticket_terms
from muster.client.validator.checks import Claim
from muster.client.validator.elsewhere import Elsewhere
from muster.client.validator.journal import OutcomeJournal
from muster.client.validator.slots import KnownBatch, SlotIndex, SlotOfWorker, slots_of_records
from muster.protocol.eip712 import Domain
from muster.protocol.errors import ApiError
from muster.protocol.ids import BatchName, RunId
from muster.protocol.merkle import merkle_root
from muster.protocol.messages import Submission

if TYPE_CHECKING:
    from muster.chain import BatchView

BATCH_PATIENCE_S = 60.0
"""How long a batch that cannot be had holds up those after it."""


@dataclass(slots=True)
class Docket:
    """The batches of one run, before they are judged."""

    run_id: RunId
    """The run."""
    domain: Domain
    """Of the ContributionLedger."""
    view: HistoryView
    """The chain, kept current by someone else."""
    api: OrchestratorApi
    """Where batches are shown."""
    journal: OutcomeJournal
    """What this validator judged before."""
    failing_since: dict[object, float]
    """Since when what is asked for could not be had, of the clock: batch ids and others."""
    clock: Callable[[], float]
    """Seconds."""
    elsewhere: Elsewhere | None = None
    """Shows what the orchestrator does not."""
    _slots: SlotIndex = field(default_factory=SlotIndex)
    _slots_of: dict[BatchName, tuple[SlotOfWorker, ...]] = field(default_factory=dict)
    """By batch and root, which say what a batch is made of: a run has many, each is read once."""

    async def contents(self, batch: BatchView) -> list[BatchEntry]:
        """Return the batch's submissions, which reproduce the root on chain.

        What its worker committed, or took out of another batch, is on chain with all its proofs.
        """
        if batch.work is not None:
            return [entry_of(batch.work, batch.committed_at)]
        try:
            return await self._contents_at_orchestrator(batch)
        except ApiError as refused:
            if self.elsewhere is None:
                raise
            try:
                return await self.elsewhere.contents(batch)
            except ApiError:
                raise refused from None

    async def _contents_at_orchestrator(self, batch: BatchView) -> list[BatchEntry]:
        entries = (await self.api.batch(batch.batch_id)).submissions
        leaves = [entry.submission.leaf() for entry in entries]
        if len(leaves) != batch.count or merkle_root(leaves) != batch.root:
            raise ApiError(
                f"the submissions of batch {batch.batch_id} do not make up its root",
                status=502,
                code="bad_answer",
                hint="the orchestrator is faulty or dishonest",
            )
        return entries

    async def refresh(self, *, before: int) -> None:
        """Take in which slots the batches before one use; ApiError while one is not shown."""
        self._slots.refresh(await self._known_batches(before=before))

    def claim(self, batch: BatchView, entry: BatchEntry, earlier: Container[SlotOfWorker]) -> Claim:
        """Return a submission as it is to be judged; `earlier` are slots of its own batch."""
        submission = entry.submission
        standing = self.view.standing(batch.run_id, submission.worker, before=batch.block_number)
        slot = self.slot(batch, submission)
        is_active = standing is not None and standing.is_active(batch.block_number)
        return Claim(
            submission=submission,
            signature=entry.signature,
            ticket=entry.ticket,
            ticket_signature=entry.ticket_signature,
            committed_at=batch.committed_at,
            terms=ticket_terms(
                self.view,
                self.run_id,
                self.domain,
                submission.policy_version,
                submission.worker,
                batch.orchestrator,
            ),
            worker_id=slot[0],
            node=standing.node if standing and is_active else None,
            is_slot_used=self._slots.is_used(slot, before=batch.batch_id) or slot in earlier,
        )

    def slot(self, batch: BatchView, submission: Submission) -> SlotOfWorker:
        """Return the slot that a submission of a batch fills."""
        standing = self.view.standing(batch.run_id, submission.worker, before=batch.block_number)
        return (standing.worker_id if standing else 0, submission.step, submission.index)

    async def _known_batches(self, *, before: int) -> list[KnownBatch]:
        """Return the run's batches whose slots are known: from the chain, the journal, and for
        those before a batch that others judge, from what they are made of.
        """
        known = []
        for batch in list(self.view.batches.values()):
            if batch.run_id == self.run_id:
                slots = await self._slots_in(batch, before)
                if slots is not None:
                    known.append(KnownBatch(batch.batch_id, batch.root, slots))
        return known

    async def _slots_in(self, batch: BatchView, before: int) -> tuple[SlotOfWorker, ...] | None:
        """Return the slots of a batch, None if they are not known."""
        name = batch.name
        slots = self._slots_of.get(name)
        if slots is not None:
            return slots
        judged = self.journal.judged(name)
        if batch.records is not None:
            slots = slots_of_records(batch.records)
        elif judged is not None:
            slots = slots_of_records(judged.records)
        elif batch.batch_id < before:
            slots = await self._shown_slots(batch)
        if slots is not None:
            self._slots_of[name] = slots
        return slots

    async def _shown_slots(self, batch: BatchView) -> tuple[SlotOfWorker, ...] | None:
        """Return the slots of a batch that nobody judged yet; None once the orchestrator has not
        shown it for long.
        """
        name = batch.name
        try:
            entries = await self.contents(batch)
        except ApiError:
            now = self.clock()
            begun = self.failing_since.get(batch.batch_id, now)
            if now - self.failing_since.setdefault(name, begun) < BATCH_PATIENCE_S:
                raise
            return None
        self.failing_since.pop(name, None)
        return tuple(self.slot(batch, entry.submission) for entry in entries)
