"""Batches: which submissions go into one root, in which order, and its commitment on chain.

The composition is on disk before the transaction is sent, and its root names the transaction in the
sender's journal. A composition that is not on chain is committed again after a restart; the journal
keeps the transaction from being sent twice. So a crash at any point neither loses, repeats nor
reorders a submission.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from muster.api.answers import BatchContents, BatchEntry
from muster.chain import BatchView, LeasedWork
from muster.chain.structs import CommittedWork
from muster.orchestrator.clock import loop_time
from muster.orchestrator.db import Database, statements
from muster.orchestrator.db.query import Rows, Statement
from muster.orchestrator.db.statements import SubmissionRow
from muster.orchestrator.intake.files import FileStore, StoredBatch
from muster.orchestrator.ports import ChainPort
from muster.orchestrator.projection import Projection
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Hash32
from muster.protocol.merkle import batch_proof, batch_root
from muster.protocol.messages import Submission, Ticket

logger = logging.getLogger(__name__)

CHECKED_BY = 0.5
"""Share of the outcome deadline within which a batch must be checked, at the measured speed."""


@dataclass(slots=True)
class Composition:
    """A batch that is not on chain yet."""

    root: Hash32
    """Merkle root over its submissions."""
    count: int
    """Number of submissions."""
    units: int
    """Units that the submissions claim."""
    not_before: float = 0.0
    """Monotonic time before which the commitment is not retried."""
    mined_in: int | None = None
    """The block of its commitment; None again when that block was read without the commitment."""
    is_unfunded: bool = False
    """Whether the run could not pay for it when this process last tried."""


@dataclass(eq=False, repr=False, kw_only=True)
class Batching:
    """Forms batches from received submissions and commits them."""

    database: Database
    files: FileStore
    chain: ChainPort
    projection: Projection
    domain: Domain
    """EIP-712 domain of the ContributionLedger."""
    max_units: int
    """Most units that one submission can be worth."""
    batch_limit: int
    outcome_deadline_s: int
    now: Callable[[], int]
    monotonic: Callable[[], float] = loop_time

    def __post_init__(self) -> None:
        self._uncommitted: dict[Hash32, Composition] = {}
        # What the replica that commits told last.
        self._is_told_unfunded = False

    async def load(self) -> None:
        """Find the compositions that are not on chain: at the start, after a reorg, or when this
        replica becomes the leader.
        """
        [rows] = await self.database.search(statements.all_batches())
        found = {Hash32(root): Composition(Hash32(root), *size) for root, *size in rows}
        # Compositions made during this query are kept too, and come last.
        for root, composition in self._uncommitted.items():
            found.setdefault(root, composition)
        self._uncommitted = found
        self._drop_committed()

    @property
    def is_unfunded(self) -> bool:
        """Whether the run cannot pay for a batch that is not on chain yet."""
        return self._is_told_unfunded or self._lacks_funds()

    def _lacks_funds(self) -> bool:
        return any(each.is_unfunded for each in self._uncommitted.values())

    @property
    def uncommitted_roots(self) -> list[Hash32]:
        """The roots of compositions that are not on chain yet."""
        return list(self._uncommitted)

    def sync(self, head: int) -> None:
        """Remove compositions that are on chain, after the chain was read up to a block."""
        self._drop_committed()
        for composition in self._uncommitted.values():
            if composition.mined_in is not None and composition.mined_in <= head:
                # A reorganisation removed the commitment before it was read, so there was no event.
                composition.mined_in = None

    def questions(self) -> list[Statement]:
        """Return the queries to run before leasing, which read the news of other replicas if there
        can be any. Pass the answers to `take_note`.
        """
        shared = self.database.is_shared
        return [statements.open_batches(), statements.is_unfunded()] if shared else []

    def take_note(self, answers: Sequence[Rows]) -> None:
        """Note the compositions of other replicas, and whether the run could pay."""
        if not answers:
            return
        batches, [(is_unfunded,)] = answers
        for root_bytes, count, units in batches:
            root = Hash32(root_bytes)
            if root not in self._uncommitted and self.projection.batch_with_root(root) is None:
                self._uncommitted[root] = Composition(root, count, units)
        self._is_told_unfunded = bool(is_unfunded)

    async def share(self) -> None:
        """Store what other replicas, if there can be any, need to know to lease."""
        if not self.database.is_shared:
            return
        batches, [(told,)] = await self.database.ask(*self.questions())
        lacks_funds = self._lacks_funds()
        found = [(root, self.projection.batch_with_root(Hash32(root))) for root, *_ in batches]
        judged = [root for root, batch in found if batch and batch.records is not None]
        if not judged and told == lacks_funds:
            return
        async with self.database.transaction() as asked:
            await asked.ask(
                *(statements.judge_batch(root=root) for root in judged),
                statements.set_unfunded(is_unfunded=lacks_funds),
            )

    def outstanding(self, waiting: int) -> int:
        """Return the number of submissions that are received or committed but not judged; `waiting`
        of them are in no batch.

        Committed batches whose outcomes are overdue are not counted, so that silent validators do
        not stop the run.
        """
        composed = sum(c.count for c in self._uncommitted.values())
        due_before = self.now() - self.outcome_deadline_s
        committed = sum(b.count for b in self.projection.unjudged if b.committed_at >= due_before)
        return waiting + composed + committed

    async def next(self) -> Composition | None:
        """Return the batch to commit now: an earlier one that is not on chain yet, or a new one."""
        for first in self._uncommitted.values():
            # One at a time, so that batches reach the chain in upload order.
            if first.mined_in is None:
                return first if self.monotonic() >= first.not_before else None
        return await self._compose()

    async def commit(self, composition: Composition) -> int:
        """Commit a batch on chain and return its id; repeated calls commit it once."""
        run_id, root = self.projection.run_id, composition.root
        chain = self.chain.once(f"commit run {run_id} root {hex0x(root)}")
        batch_id, mined = await chain.ledger.commit_batch(
            run_id, root, composition.count, composition.units
        )
        composition.mined_in, composition.is_unfunded = mined.block_number, False
        logger.info("batch committed", extra={"batch": batch_id, "count": composition.count})
        return batch_id

    def retry_after(self, composition: Composition, pause_s: float) -> None:
        """Try a failed commitment again after a pause."""
        composition.not_before = self.monotonic() + pause_s

    async def take_apart(self, composition: Composition) -> bool:
        """Let the submissions of a batch that the contract refused wait again, without those that
        claim no units, or more than a submission can be worth. Return whether there were any.

        Intake refuses such claims; an earlier release may have kept some.
        """
        root = composition.root
        [rows] = await self.database.search(statements.in_batch(root=root))
        impossible = [
            row.file_hash
            for row in (SubmissionRow(*each) for each in rows)
            if not 1 <= row.claim.units <= self.max_units
        ]
        # Another replica may have taken it apart before: then it has no submissions.
        if rows and not impossible:
            return False
        async with self.database.transaction() as asked:
            await asked.ask(*statements.undo_batch(root, without=impossible))
        self._uncommitted.pop(root, None)
        await self._drop(impossible, "it claims units that no submission can be worth")
        return True

    async def _drop(self, removed: Sequence[Hash32], why: str) -> None:
        """Delete the files of submissions that were removed."""
        for file_hash in removed:
            await self.files.drop(file_hash)
            fields = {"file": file_hash.hex(), "why": why}
            logger.warning("a submission was removed", extra=fields)

    async def contents(self, batch: BatchView) -> BatchContents | None:
        """Return a batch's submissions in order; None when they are not known here."""
        [rows] = await self.database.search(statements.in_batch(root=batch.root))
        entries = [_entry(SubmissionRow(*row)) for row in rows]
        if not entries and batch.work is not None:
            entries = [_direct_entry(batch, batch.work)]
        if len(entries) != batch.count:
            return None
        return BatchContents(
            batch_id=batch.batch_id, root=batch.root, count=batch.count, submissions=entries
        )

    async def work(self, leaf: Hash32) -> BatchEntry | None:
        """Return a submission with its proofs, by its leaf; None when it is not known here."""
        batch = self.projection.batch_with_root(leaf)
        if batch is not None and batch.work is not None:
            return _direct_entry(batch, batch.work)
        [rows] = await self.database.ask(statements.by_leaf(leaf=leaf))
        return _entry(SubmissionRow(*rows[0])) if rows else None

    async def evidence(self, batch_id: int, position: int) -> CommittedWork | None:
        """Return a batch's submission, proven; None when the batch is not known here."""
        batch = self.projection.batch(batch_id)
        contents = None if batch is None else await self.contents(batch)
        if contents is None:
            return None
        leaves = [entry.submission.leaf() for entry in contents.submissions]
        entry = contents.submissions[position]
        proof = tuple(batch_proof(leaves, position))
        return CommittedWork(entry.submission, entry.signature, proof)

    def _drop_committed(self) -> None:
        for root in list(self._uncommitted):
            if self.projection.batch_with_root(root) is not None:
                del self._uncommitted[root]

    async def _compose(self) -> Composition | None:
        submissions = await self._waiting()
        direct = [s for s in submissions if self.projection.batch_with_root(s.leaf())]
        if direct:
            # Workers may commit such work directly; the root of a batch of one is its leaf.
            for submission in direct:
                await self._keep(submission.leaf(), [submission])
            submissions = await self._waiting()
        if not submissions:
            return None
        root = batch_root([s.leaf() for s in submissions])
        await self._keep(root, submissions)
        composition = Composition(root, len(submissions), sum(s.units for s in submissions))
        self._uncommitted[root] = composition
        return composition

    async def _waiting(self) -> list[Submission]:
        """Return the submissions of the next batch, oldest first. Removes those that validators
        would reject, and for which no worker would answer.
        """
        [rows] = await self.database.ask(statements.first_waiting(limit=self.batch_limit))
        signed = [(Submission.from_json(json.loads(claim)), signature) for claim, signature in rows]
        gone = [work.file_hash for work, signed_by in signed if not self._is_due(work, signed_by)]
        if not gone:
            found = [work for work, _ in signed]
            return found[: self._checkable(found)]
        async with self.database.transaction() as asked:
            await asked.ask(*(statements.forget_submission(file_hash=each) for each in gone))
        await self._drop(gone, "its worker changed its node since the upload, left or was jailed")
        return await self._waiting()

    def _is_due(self, work: Submission, signature: bytes) -> bool:
        """Return whether a submission is signed by the present node of an active worker, or was
        committed by its worker.
        """
        if self.projection.batch_with_root(work.leaf()) is not None:
            return True
        member = self.projection.run.members.get(work.worker)
        if member is None or not member.is_active(self.projection.head):
            return False
        return signer_of(self.domain, work, signature) == member.node

    def _checkable(self, submissions: Sequence[Submission]) -> int:
        """Return how many of the first submissions validators can check in `CHECKED_BY` of the
        deadline, at the speed of the newest batches. At least one; all while nothing was judged.
        """
        per_s = self.projection.judged_units_per_s()
        if not per_s:
            return len(submissions)
        most = per_s * self.outcome_deadline_s * CHECKED_BY
        units = accumulate(each.units for each in submissions)
        return max(1, sum(total <= most for total in units))

    async def _keep(self, root: Hash32, submissions: list[Submission]) -> None:
        await self.files.keep_batch(
            StoredBatch(
                root=root,
                file_hashes=[s.file_hash for s in submissions],
                composed_ns=time.time_ns(),
            )
        )
        async with self.database.transaction(is_durable=True) as asked:
            await asked.ask(*composition_rows(root, submissions))


def composition_rows(root: Hash32, submissions: Sequence[Submission]) -> list[Statement]:
    """Return the statements that store a composition: the batch, and each submission's place in
    it."""
    units = sum(s.units for s in submissions)
    batch = statements.new_batch(root=root, count=len(submissions), units=units)
    places = (
        statements.put_into_batch(file_hash=s.file_hash, batch_root=root, position=i)
        for i, s in enumerate(submissions)
    )
    return [batch, *places]


def _direct_entry(batch: BatchView, work: LeasedWork) -> BatchEntry:
    return BatchEntry(
        submission=work.submission,
        signature=work.node_signature,
        ticket=work.ticket,
        ticket_signature=work.ticket_signature,
        received_at=batch.committed_at,
    )


def _entry(row: SubmissionRow) -> BatchEntry:
    return BatchEntry(
        submission=row.claim,
        signature=row.signature,
        ticket=Ticket.from_json(json.loads(row.ticket)),
        ticket_signature=row.ticket_signature,
        received_at=row.received_at,
    )
