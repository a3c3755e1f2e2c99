"""Outcomes: validators' signed records, checked, kept, and posted once those called agree.

Steps 7 and 8 of one rollout. The orchestrator does not judge; it only refuses records that the
contract would refuse, or that do not describe the batch. Whose agreement is enough is decided by
`muster.protocol.schedule`; fewer than the run's quorum never are.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from muster.api.answers import BatchContents
from muster.chain import Batch, BatchView, ChainView
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.models import OutcomesRow
from muster.orchestrator.db.outcomes import outcomes_of
from muster.orchestrator.metrics import REAUDITS
from muster.orchestrator.services.batching import Batching
from muster.orchestrator.services.calls import Caller
from muster.orchestrator.services.doubles import Doubles, SignedRecords, shown_by
from muster.orchestrator.services.files import FileStore, StoredOutcomes
from muster.orchestrator.services.projection import Projection
from muster.orchestrator.services.refusals import refuse, unknown_batch
from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError, SignatureError
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import (
    OutcomeRecord,
    Submission,
    Verdict,
    unpack_records,
)
from muster.protocol.schedule import Calls, Statement

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Agreed:
    """Outcomes of a batch that are to be posted."""

    header: Batch
    """The batch."""
    records: bytes
    """The packed records."""
    signatures: tuple[bytes, ...]
    """As many as the quorum, ascending by signer."""


class OutcomeDesk:
    """Collects validators' outcomes."""

    def __init__(
        self,
        *,
        database: Database,
        files: FileStore,
        projection: Projection,
        batching: Batching,
        caller: Caller,
        domain: Domain,
        doubles: Doubles,
        on_received: Callable[[], None],
        clock: Callable[[], float],
        now: Callable[[], int],
    ) -> None:
        self._database = database
        self._files = files
        self._projection = projection
        self._batching = batching
        self.caller = caller
        """Who is called for which batch."""
        self._domain = domain
        self._doubles = doubles
        self._on_received = on_received
        self._clock = clock
        self._now = now
        self.heard_at: dict[Address, float] = {}
        """Wall clock of the latest outcomes from each validator, since the process started."""
        self.listening_since = clock()
        """When that began."""

    async def receive(
        self, validator: Address, batch_id: int, records: bytes, signature: bytes
    ) -> None:
        """Keep a validator's outcomes of a batch; a batch that is judged already needs none."""
        batch = self._projection.batch(batch_id)
        # Who says that nothing can be had needs nothing of us to be believed.
        contents = None if batch is None or not records else await self._batching.contents(batch)
        if batch is None or (records and contents is None):
            raise unknown_batch(batch_id, read_to=self._projection.view.block_number)
        if contents is not None:
            self._check_records(contents, batch, records)
        signed = SignedRecords(keccak(records), signature)
        if self._signer(batch, signed) != validator:
            raise refuse(
                "bad_outcomes_signature",
                "the outcomes are not signed by the validator that sent them",
                "sign the EIP-712 Outcomes of this batch, its root on chain and these records",
            )
        self.heard_at[validator] = self._clock()
        self.caller.heard(validator)
        async with self._database.read() as session:
            held = await session.get(OutcomesRow, (batch_id, validator))
        await self._require_single(batch, validator, signed, held)
        if batch.records is not None:
            self._note_late(batch, validator, records)
            return
        held, is_new = await self._keep(validator, batch, records, signature)
        await self._require_single(batch, validator, signed, held)
        if is_new:
            logger.info("outcomes received", extra={"batch": batch_id, "validator": validator})
            self._on_received()

    async def _require_single(
        self, batch: BatchView, validator: Address, signed: SignedRecords, held: OutcomesRow | None
    ) -> None:
        """Refuse what contradicts a signature of the same validator: one that we hold, or that is
        on chain. Both are kept for the court of faults.
        """
        earlier = shown_by(batch, validator)
        if held is not None and held.is_of(batch):
            earlier.append(SignedRecords(keccak(held.records), held.signature))
        if batch.records_hash is not None:
            earlier += [SignedRecords(batch.records_hash, each) for each in batch.signatures]
        for first in earlier:
            if first.contradicts(signed) and self._signer(batch, first) == validator:
                await self._doubles.note_outcomes(batch, validator, first, signed)
                logger.warning(
                    "a validator signed two different outcomes for one batch",
                    extra={"batch": batch.batch_id, "validator": validator},
                )
                raise refuse(
                    "outcomes_conflict",
                    f"this validator signed other outcomes for batch {batch.batch_id}",
                    "a validator signs one set of outcomes per batch",
                )

    def _signer(self, batch: BatchView, signed: SignedRecords) -> Address | None:
        try:
            return recover(digest(self._domain, signed.of(batch).struct_hash()), signed.signature)
        except SignatureError:
            return None

    def _note_late(self, batch: BatchView, validator: Address, records: bytes) -> None:
        """Compare what a validator found that looked after the outcomes were posted."""
        if not records:
            return
        agrees = keccak(records) == batch.records_hash
        REAUDITS.labels(result="agreed" if agrees else "differed").inc()
        if not agrees:
            logger.warning(
                "a validator found other outcomes than those that were posted",
                extra={"batch": batch.batch_id, "validator": validator},
            )

    async def agreed(self) -> list[Agreed]:
        """Return the outcomes that are to be posted now, ascending by batch."""
        return [agreed async for agreed in self._agreed()]

    async def _agreed(self) -> AsyncIterator[Agreed]:
        for batch, rows in await self._handed_in():
            quorum = self._projection.quorum_of(batch)
            calls = self._plan(batch, rows)
            if calls.decision is None:
                continue
            agreeing = [row for row in rows if _summary(row.records)[0] == calls.decision]
            # Those who were called answer for what is posted.
            agreeing.sort(key=lambda row: row.validator not in calls.called)
            signers = sorted(agreeing[:quorum], key=lambda row: row.validator.lower())
            signatures = tuple(row.signature for row in signers)
            yield Agreed(batch.header(), signers[0].records, signatures)

    async def calls(self, *, after: int = 0, limit: int) -> list[tuple[int, Calls]]:
        """Return the batches above an id for which outcomes are due, ascending, and their calls."""
        due = await self._handed_in(after=after, limit=limit)
        return [(batch.batch_id, self._plan(batch, rows)) for batch, rows in due]

    def _plan(self, batch: BatchView, rows: Sequence[OutcomesRow]) -> Calls:
        return self.caller.plan(batch, [_statement(row) for row in rows])

    async def _handed_in(
        self, *, after: int = 0, limit: int | None = None
    ) -> list[tuple[BatchView, list[OutcomesRow]]]:
        """Return the open batches with what their current validators signed, ascending."""
        seated = self._projection.run.validators
        due = [b for b in self.caller.open_batches() if b.batch_id > after][:limit]
        found: dict[int, list[OutcomesRow]] = defaultdict(list)
        for row in await outcomes_of(self._database, due):
            if row.validator in seated:
                found[row.batch_id].append(row)
        return [(batch, found[batch.batch_id]) for batch in due]

    def _check_records(self, contents: BatchContents, batch: BatchView, data: bytes) -> None:
        try:
            records = unpack_records(data)
        except EncodingError as error:
            raise refuse("bad_records", str(error)) from error
        if len(records) != contents.count:
            raise refuse("bad_records", f"{len(records)} records for {contents.count} submissions")
        for position, (record, entry) in enumerate(zip(records, contents.submissions, strict=True)):
            problem = mismatch(record, entry.submission, self._projection.view)
            if problem:
                raise refuse("bad_records", f"record {position}: {problem}")
        units = sum(record.units for record in records)
        if units > batch.units:
            raise refuse(
                "bad_records",
                f"the records hold {units} units, the batch was committed for {batch.units}",
            )

    async def _keep(
        self, validator: Address, batch: BatchView, records: bytes, signature: bytes
    ) -> tuple[OutcomesRow | None, bool]:
        """Keep outcomes, and return true, unless the validator handed in some before; return those.

        Who could see nothing may find out more later; what was judged stays.
        """
        async with self._database.write() as session:
            held = await session.get(OutcomesRow, (batch.batch_id, validator))
            if held is not None and held.is_of(batch) and (held.records or not records):
                return held, False
            await self._files.keep_outcomes(
                StoredOutcomes(
                    batch_id=batch.batch_id,
                    root=batch.root,
                    validator=validator,
                    records=records,
                    signature=signature,
                )
            )
            await session.merge(
                OutcomesRow(
                    batch_id=batch.batch_id,
                    validator=validator,
                    records=records,
                    signature=signature,
                    received_at=self._now(),
                    batch_root=batch.root,
                )
            )
        return None, True


@lru_cache(maxsize=1024)
def _summary(records: bytes) -> tuple[Hash32, bool]:
    """Return the hash of checked records, and whether all are Accepted; nothing accepts nothing."""
    accepts = bool(records) and all(
        record.verdict is Verdict.ACCEPTED for record in unpack_records(records)
    )
    return keccak(records), accepts


def _statement(row: OutcomesRow) -> Statement:
    records_hash, accepts = _summary(row.records)
    return Statement(Address(row.validator), records_hash, accepts, row.received_at)


def mismatch(record: OutcomeRecord, submission: Submission, view: ChainView) -> str | None:
    """Return how a record fails to describe a submission; none when it does."""
    worker = view.workers.get(submission.worker)
    pairs = (
        ("worker id", record.worker_id, worker and worker.worker_id),
        ("step", record.step, submission.step),
        ("index", record.index, submission.index),
        ("policy version", record.policy_version, submission.policy_version),
        ("file hash", record.file_hash.hex(), submission.file_hash.hex()),
        ("rollouts", record.rollouts, submission.rollouts),
    )
    for name, given, expected in pairs:
        if given != expected:
            return f"{name} is {given}, the submission's is {expected}"
    return None
