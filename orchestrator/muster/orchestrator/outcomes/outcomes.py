"""Outcomes: validators' signed records, checked, stored, and posted once the called ones agree.

Steps 7 and 8 of one rollout. The orchestrator does not judge; it only refuses records that the
contract would refuse, or that do not describe the batch. `muster.protocol.schedule` decides
whose agreement is enough; it is never fewer than the run's quorum.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from muster.api.answers import BatchContents
from muster.chain import BatchView, ChainView
from muster.chain.doubles import SignedRecords
from muster.orchestrator.db import Database
from muster.orchestrator.db.query import Queryable
from muster.orchestrator.db.statements import OutcomesRow, handed_in_by, keep, outcomes_of
from muster.orchestrator.http.errors import refuse, unknown_batch
from muster.orchestrator.intake.batching import Batching
from muster.orchestrator.intake.files import FileStore, StoredOutcomes
from muster.orchestrator.metrics import REAUDITS
from muster.orchestrator.outcomes.doubles import Doubles, shown_by
from muster.orchestrator.projection import Projection
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import Address, BatchName, Hash32
from muster.protocol.messages import OutcomeRecord, Submission, Verdict, unpack_records
from muster.protocol.schedule import (
    Calls,
    SignedOutcomes,
    Timing,
    order_of_batch,
    plan_calls,
    timeout_of,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Agreed:
    """Outcomes of a batch that are ready to be posted."""

    batch: BatchView
    records: bytes
    """The packed records."""
    signatures: tuple[bytes, ...]
    """Signatures of a quorum, ascending by signer."""


@dataclass(eq=False, repr=False, kw_only=True)
class OutcomeCollector:
    """Collects validators' outcomes."""

    database: Database
    files: FileStore
    projection: Projection
    batching: Batching
    caller: ValidatorCalls
    domain: Domain
    doubles: Doubles
    on_received: Callable[[], None]
    clock: Callable[[], float]
    now: Callable[[], int]

    def __post_init__(self) -> None:
        """Begin to note when validators are heard."""
        self.heard_at: dict[Address, float] = {}
        """Wall clock of the latest outcomes from each validator, since the process started."""
        self.listening_since = self.clock()
        """Wall clock of the start of the process."""
        self._unfit: set[BatchName] = set()
        """Batches whose signed records do not fit them any more."""

    async def receive(
        self, validator: Address, batch_id: int, records: bytes, signature: bytes
    ) -> None:
        """Store a validator's outcomes of a batch, unless the batch is judged already."""
        batch = self.projection.batch(batch_id)
        # A statement that the data is withheld needs no submission from us for the check.
        contents = None if batch is None or not records else await self.batching.contents(batch)
        if batch is None or (records and contents is None):
            raise unknown_batch(batch_id, read_to=self.projection.view.block_number)
        if contents is not None and (problem := self._problem(contents, batch, records)):
            raise refuse("bad_records", problem)
        signed = SignedRecords(keccak(records), signature)
        if self._signer(batch, signed) != validator:
            raise refuse(
                "bad_outcomes_signature",
                "the outcomes are not signed by the validator that sent them",
                "sign the EIP-712 Outcomes of this batch, its root on chain and these records",
            )
        self.heard_at[validator] = self.clock()
        held = await _held(self.database, batch_id, validator)
        await self._require_single(batch, validator, signed, held)
        if batch.records is not None:
            self._note_late(batch, validator, records)
            return
        held, is_new = await self._keep(validator, batch, records, signature)
        await self._require_single(batch, validator, signed, held)
        if is_new:
            logger.info("outcomes received", extra={"batch": batch_id, "validator": validator})
            self.on_received()

    async def _require_single(
        self, batch: BatchView, validator: Address, signed: SignedRecords, held: OutcomesRow | None
    ) -> None:
        """Refuse outcomes that contradict earlier ones of the same validator, held here or on
        chain. Both are kept for the court of faults.
        """
        earlier = shown_by(batch, validator)
        if held is not None and held.is_of(batch):
            earlier.append(SignedRecords(keccak(held.records), held.signature))
        if batch.records_hash is not None:
            earlier += [SignedRecords(batch.records_hash, each) for each in batch.signatures]
        for first in earlier:
            if first.contradicts(signed) and self._signer(batch, first) == validator:
                await self.doubles.note_outcomes(batch, validator, first, signed)
                logger.warning(
                    "a validator signed two different outcomes for one batch",
                    extra={"batch": batch.batch_id, "validator": validator},
                )
                raise refuse(
                    "outcomes_conflict",
                    f"this validator signed other outcomes for batch {batch.batch_id}",
                    "sign one set of outcomes per batch only",
                )

    def _signer(self, batch: BatchView, signed: SignedRecords) -> Address | None:
        return signer_of(self.domain, signed.of(batch), signed.signature)

    def _note_late(self, batch: BatchView, validator: Address, records: bytes) -> None:
        """Compare outcomes that arrive after others were posted with the posted ones."""
        if not records:
            return
        agrees = keccak(records) == batch.records_hash
        REAUDITS.labels(result="agreed" if agrees else "differed").inc()
        if not agrees:
            logger.warning(
                "a validator's outcomes differ from the posted outcomes",
                extra={"batch": batch.batch_id, "validator": validator},
            )

    async def agreed(self) -> list[Agreed]:
        """Return the outcomes to post now, ascending by batch."""
        found: list[Agreed] = []
        for batch, rows in await self._handed_in():
            quorum = self.projection.run.quorum_of(batch)
            calls = self._plan(batch, rows)
            if calls.decision is None:
                continue
            agreeing = [row for row in rows if _summary(row.records)[0] == calls.decision]
            # The called validators sign first: they are responsible for the batch.
            agreeing.sort(key=lambda row: row.validator not in calls.called)
            signers = sorted(agreeing[:quorum], key=lambda row: row.validator.lower())
            signatures = tuple(row.signature for row in signers)
            found.append(Agreed(batch, signers[0].records, signatures))
        return found

    async def still_fits(self, batch: BatchView, records: bytes) -> bool:
        """Return whether records fit their batch as the chain is now; logs it, once, if not.

        Validators sign a batch's number, its root and the records, and the root fixes all that
        records say of a submission but the worker's number. A reorganisation that takes
        registrations back can give that number to another worker, and everyone who signed would pay
        for a misrecord (docs/decisions/0087-records-answer-to-the-batch.md).
        """
        contents = await self.batching.contents(batch) if records else None
        problem = None if contents is None else self._problem(contents, batch, records)
        if problem and batch.name not in self._unfit:
            self._unfit.add(batch.name)
            logger.error(
                "outcomes are not posted: the chain was reorganised after they were signed",
                extra={"batch": batch.batch_id, "problem": problem},
            )
        return not problem

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
        seated = self.projection.run.validators
        due = [b for b in self.caller.open_batches() if b.batch_id > after][:limit]
        found: dict[int, list[OutcomesRow]] = defaultdict(list)
        for row in await outcomes_of(self.database, due):
            if row.validator in seated:
                found[row.batch_id].append(row)
        return [(batch, found[batch.batch_id]) for batch in due]

    def _problem(self, contents: BatchContents, batch: BatchView, data: bytes) -> str | None:
        """Return how packed records contradict their batch; None when they fit."""
        try:
            records = unpack_records(data)
        except EncodingError as error:
            return str(error)
        if len(records) != contents.count:
            return f"there are {len(records)} records for {contents.count} submissions"
        for position, (record, entry) in enumerate(zip(records, contents.submissions, strict=True)):
            problem = mismatch(record, entry.submission, self.projection.view)
            if problem:
                return f"record {position}: {problem}"
        units = sum(record.units for record in records)
        if units > batch.units:
            return f"the records hold {units} units, more than the batch's {batch.units}"
        return None

    async def _keep(
        self, validator: Address, batch: BatchView, records: bytes, signature: bytes
    ) -> tuple[OutcomesRow | None, bool]:
        """Store outcomes unless the validator handed in some before; return the earlier ones, and
        whether these were stored.

        A validator that could not get the data may judge later; a judgement is final.
        """
        async with self.database.transaction(is_durable=True) as asked:
            held = await _held(asked, batch.batch_id, validator)
            if held is not None and held.is_of(batch) and (held.records or not records):
                return held, False
            await self.files.keep_outcomes(
                StoredOutcomes(
                    batch_id=batch.batch_id,
                    root=batch.root,
                    validator=validator,
                    records=records,
                    signature=signature,
                )
            )
            row = OutcomesRow(batch.batch_id, validator, records, signature, self.now(), batch.root)
            await asked.ask(keep(row))
        return None, True


async def _held(asked: Queryable, batch_id: int, validator: Address) -> OutcomesRow | None:
    [rows] = await asked.ask(handed_in_by(batch_id=batch_id, validator=validator))
    return OutcomesRow(*rows[0]) if rows else None


@lru_cache(maxsize=1024)
def _summary(records: bytes) -> tuple[Hash32, bool]:
    """Return the hash of checked records, and whether all are Accepted; False for no records."""
    accepts = bool(records) and all(
        record.verdict is Verdict.ACCEPTED for record in unpack_records(records)
    )
    return keccak(records), accepts


def _statement(row: OutcomesRow) -> SignedOutcomes:
    records_hash, accepts = _summary(row.records)
    return SignedOutcomes(row.validator, records_hash, accepts, row.received_at)


def mismatch(record: OutcomeRecord, submission: Submission, view: ChainView) -> str | None:
    """Return how a record contradicts its submission; None when it fits."""
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


class ValidatorCalls:
    """Decides which validators must check which batch now, by `muster.protocol.schedule`.

    The calls follow from the chain, the outcomes handed in and the chain's clock, so that every
    replica and every restart computes the same. Only absence is remembered: a called validator that
    missed its deadline is not waited for until it hands in something new about an open batch.
    """

    def __init__(
        self,
        projection: Projection,
        *,
        outcome_deadline_s: int,
        timeout_s: int | None,
        now: Callable[[], int],
    ) -> None:
        """`timeout_s` is how long a called validator may be silent; None for the longest allowed
        time."""
        self._projection = projection
        self._deadline_s = outcome_deadline_s
        longest = timeout_of(outcome_deadline_s)
        self._timeout_s = longest if timeout_s is None else min(timeout_s, longest)
        self._now = now
        self._absent_since: dict[Address, int] = {}

    @property
    def absent(self) -> Collection[Address]:
        """Seated validators that missed the deadline of a call and have been silent since."""
        return [v for v in self._projection.run.validators if v in self._absent_since]

    def open_batches(self) -> list[BatchView]:
        """Return the batches for which outcomes are still due, ascending."""
        due_before = self._now() - self._deadline_s
        return [b for b in self._projection.unjudged if b.committed_at > due_before]

    def plan(self, batch: BatchView, statements: Collection[SignedOutcomes]) -> Calls:
        """Return the called validators of a batch, and the outcomes to post."""
        run, now = self._projection.run, self._now()
        self._note_heard(statements)
        calls = plan_calls(
            order_of_batch(batch.seed, batch.seated, run.validators),
            self._projection.run.quorum_of(batch),
            Timing(batch.committed_at, self._deadline_s, self._timeout_s),
            now,
            statements,
            absent=self._absent_since,
        )
        for validator in calls.silent:
            self._absent_since.setdefault(validator, now)
        return calls

    def _note_heard(self, statements: Collection[SignedOutcomes]) -> None:
        """Forget the absence of validators that handed in something new about an open batch: what
        they repeat, or say of a closed one, spares nobody the wait for them."""
        for statement in statements:
            if statement.at >= self._absent_since.get(statement.validator, statement.at + 1):
                del self._absent_since[statement.validator]
