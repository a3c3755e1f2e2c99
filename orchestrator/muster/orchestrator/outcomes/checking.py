"""Proofs of checking: stored, and served to validators that recomputed the same submissions.

The orchestrator cannot tell a fingerprint from noise. It enforces the order: a commitment must
arrive before the outcomes are on chain and stays secret until then; the fingerprints follow. Signed
reports of other validators about them are kept, so that anybody can verify them.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from sqlalchemy import Table, and_, bindparam, delete, select, update

from muster.api.answers import BatchChecking, CheckingAnswer, CheckReportAnswer, Watched
from muster.chain import BatchView
from muster.orchestrator.db import Database
from muster.orchestrator.db.query import Query, Queryable, columns, given, new_row
from muster.orchestrator.db.tables import check_reports, checkings
from muster.orchestrator.http.errors import refuse, unknown_batch
from muster.orchestrator.projection import Projection
from muster.protocol.checking import Checking, CheckReport, fingerprints_hash, unpack_fingerprints
from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.errors import EncodingError, SignatureError
from muster.protocol.ids import Address, Hash32

logger = logging.getLogger(__name__)

KEPT_BATCHES = 2000
"""Number of the run's newest batches whose fingerprints are kept, besides those that have no
outcomes yet; validators keep the others in their folders."""
COUNTED_BATCHES = 200
"""Number of newest judged batches in the summary."""
SUMMARY_AGE_S = 1.0
"""A summary is reused for this many seconds, however many clients ask."""
PROOF_DUE_S = 120
"""Seconds after a batch's outcomes before missing proofs count: twice a validator's longest
pause."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A validator's commitment, and its fingerprints once revealed."""

    validator: Address
    batch_root: Hash32
    records_hash: Hash32
    fingerprints_hash: Hash32
    signature: bytes
    committed_at: int
    fingerprints: bytes | None


@dataclass(frozen=True, slots=True)
class _Reported:
    """One validator's report on another's fingerprints."""

    batch_id: int
    validator: Address
    reporter: Address
    compared: int
    failed: int
    signature: bytes


_COMMITTED = (
    *("batch_id", "validator", "batch_root", "records_hash", "fingerprints_hash", "signature"),
    "committed_at",
)
_COMMIT = Query(new_row(checkings, *_COMMITTED))
_OF_ONE = given(checkings, "batch_id", "validator")
_REVEAL = Query(
    update(checkings)
    .where(*_OF_ONE)
    .values(fingerprints=bindparam("fingerprints"), revealed_at=bindparam("revealed_at"))
)
_new_report = new_row(check_reports).on_conflict_do_nothing()
_REPORT = Query(_new_report.returning(check_reports.c.batch_id))
_HELD = select(*columns(checkings, _Held))
_HELD_BY = Query(_HELD.where(*_OF_ONE))
_HELD_OF_BATCH = Query(_HELD.where(*given(checkings, "batch_id")).limit(bindparam("limit")))
_REPORTED = select(*columns(check_reports, _Reported))
_REPORTED_OF_BATCH = Query(
    _REPORTED.where(*given(check_reports, "batch_id")).limit(bindparam("limit"))
)
_REPORTED_SINCE = Query(_REPORTED.where(check_reports.c.batch_id >= bindparam("first")))
_REVEALED_SINCE = Query(
    select(checkings.c.batch_id, checkings.c.validator, checkings.c.batch_root).where(
        checkings.c.batch_id >= bindparam("first"), checkings.c.revealed_at.is_not(None)
    )
)
_MOST_ROWS = 1000
"""Most commitments and reports shown of one batch."""


def _forget(table: Table) -> Query:
    """Delete one validator's rows of a batch, and all rows of batches before `first`."""
    of_one = and_(*given(table, "batch_id", "validator"))
    return Query(delete(table).where(of_one | (table.c.batch_id < bindparam("first"))))


_FORGET = (_forget(checkings), _forget(check_reports))


@dataclass(eq=False, repr=False, kw_only=True)
class ProofsOfChecking:
    """Stores commitments, fingerprints and reports."""

    database: Database
    projection: Projection
    domain: Domain
    clock: Callable[[], float]
    """Wall clock in Unix seconds."""
    now: Callable[[], float]
    """The chain's time in Unix seconds."""
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._summing = asyncio.Lock()
        self._summary: tuple[float, list[Watched]] | None = None

    async def commit(
        self, validator: Address, batch_id: int, hashes: tuple[Hash32, Hash32], signature: bytes
    ) -> None:
        """Store a commitment; `hashes` are those of the records and of the fingerprints."""
        batch = self._batch(batch_id)
        message = Checking(batch_id, batch.root, *hashes)
        self._require_signed(message.struct_hash(), validator, signature)
        async with self.database.transaction() as asked:
            held = await _held(asked, batch_id, validator)
            if held is not None and held.batch_root == batch.root:
                if (held.records_hash, held.fingerprints_hash) != hashes:
                    raise refuse(
                        "checking_conflict",
                        f"this validator already made another commitment for batch {batch_id}",
                    )
                return
            if batch.records is not None:
                raise refuse(
                    "checking_late", f"the outcomes of batch {batch_id} are already on chain"
                )
            # An earlier commitment may be for another batch that had this id before a
            # reorganisation.
            of_one = {"batch_id": batch_id, "validator": validator}
            records_hash, of_fingerprints = hashes
            first = self.projection.first_of_newest(KEPT_BATCHES)
            await asked.ask(
                *(forget(**of_one, first=first) for forget in _FORGET),
                _COMMIT(
                    **of_one,
                    batch_root=batch.root,
                    records_hash=records_hash,
                    fingerprints_hash=of_fingerprints,
                    signature=signature,
                    committed_at=int(self.clock()),
                ),
            )

    async def reveal(self, validator: Address, batch_id: int, packed: bytes) -> None:
        """Store the fingerprints of a commitment, once the outcomes are on chain."""
        batch = self._batch(batch_id)
        if batch.records is None:
            raise refuse("checking_early", f"batch {batch_id} has no outcomes yet")
        try:
            parts = unpack_fingerprints(packed, batch.count)
        except EncodingError as error:
            raise refuse("bad_fingerprints", str(error)) from error
        async with self.database.transaction() as asked:
            held = await _held(asked, batch_id, validator)
            committed = (batch.root, fingerprints_hash(parts))
            if held is None or (held.batch_root, held.fingerprints_hash) != committed:
                raise refuse(
                    "bad_fingerprints",
                    f"the fingerprints do not match the commitment for batch {batch_id}",
                )
            if held.fingerprints is None:
                shown = {"fingerprints": packed, "revealed_at": int(self.clock())}
                await asked.ask(_REVEAL(batch_id=batch_id, validator=validator, **shown))

    async def report(self, reporter: Address, report: CheckReport, signature: bytes) -> None:
        """Store one validator's report on another's fingerprints; only its first report counts."""
        batch = self._batch(report.batch_id)
        if batch.records is None:
            raise refuse("checking_early", f"batch {report.batch_id} has no outcomes yet")
        if report.batch_root != batch.root or not report.failed <= report.compared <= batch.count:
            raise refuse("bad_report", f"the report does not fit batch {report.batch_id}")
        self._require_signed(report.struct_hash(), reporter, signature)
        async with self.database.transaction() as asked:
            about = await _held(asked, report.batch_id, report.validator)
            shown = (batch.root, report.fingerprints_hash)
            if about is None or (about.batch_root, about.fingerprints_hash) != shown:
                raise refuse("bad_report", "the reported fingerprints were not revealed")
            said = _REPORT(
                batch_id=report.batch_id,
                validator=report.validator,
                reporter=reporter,
                compared=report.compared,
                failed=report.failed,
                signature=signature,
                reported_at=int(self.clock()),
            )
            [is_first] = await asked.ask(said)
        if report.failed and is_first:
            fields = {"batch": report.batch_id, "validator": report.validator}
            logger.warning(
                "a validator signed outcomes that it did not check",
                extra={**fields, "failed": report.failed, "reporter": reporter},
            )

    async def of_batch(self, batch_id: int) -> BatchChecking:
        """Return everything stored about a batch once its outcomes are on chain; nothing before.

        From a commitment another validator could learn or guess the outcomes to agree with.
        """
        batch = self._batch(batch_id)
        if batch.records is None:
            return BatchChecking(
                batch_id=batch_id, batch_root=batch.root, commitments=[], reports=[]
            )
        found, reported = await self.database.search(
            _HELD_OF_BATCH(batch_id=batch_id, limit=_MOST_ROWS),
            _REPORTED_OF_BATCH(batch_id=batch_id, limit=_MOST_ROWS),
        )
        rows = [row for row in (_Held(*each) for each in found) if row.batch_root == batch.root]
        about, reports = {row.validator for row in rows}, [_Reported(*row) for row in reported]
        return BatchChecking(
            batch_id=batch_id,
            batch_root=batch.root,
            commitments=[CheckingAnswer.model_validate(row, from_attributes=True) for row in rows],
            reports=[
                CheckReportAnswer.model_validate(row, from_attributes=True)
                for row in reports
                if row.validator in about
            ],
        )

    async def summary(self) -> list[Watched]:
        """Return the results of every current validator's proofs, over the newest judged
        batches; shared, and at most SUMMARY_AGE_S old."""
        async with self._summing:
            if self._summary is None or self.monotonic() - self._summary[0] > SUMMARY_AGE_S:
                found = await self._sum_up()
                self._summary = (self.monotonic(), found)
            return self._summary[1]

    async def _sum_up(self) -> list[Watched]:
        run = self.projection.run
        newest = (
            b
            for b in reversed(self.projection.view.batches.values())
            if b.run_id == run.run_id and b.records is not None
        )
        judged = list(islice(newest, COUNTED_BATCHES))
        roots = {b.batch_id: b.root for b in judged}
        first = min(roots, default=0)
        shown, reported = await self.database.search(
            _REVEALED_SINCE(first=first), _REPORTED_SINCE(first=first)
        )
        proofs = {(number, who) for number, who, root in shown if roots.get(number) == root}
        found = (_Reported(*row) for row in reported)
        reports = [row for row in found if (row.batch_id, row.validator) in proofs]
        seats = {who: run.seats.get(who, 0) for who in run.validators}
        return _summarise(seats, judged, proofs, reports, self.now() - PROOF_DUE_S)

    def _batch(self, batch_id: int) -> BatchView:
        batch = self.projection.batch(batch_id)
        if batch is None:
            raise unknown_batch(batch_id, read_to=self.projection.view.block_number)
        return batch

    def _require_signed(self, struct: Hash32, signer: Address, signature: bytes) -> None:
        try:
            found = recover(digest(self.domain, struct), signature)
        except SignatureError as error:
            raise refuse("bad_checking_signature", str(error)) from error
        if found != signer:
            raise refuse("bad_checking_signature", f"signed by {found}, sent by {signer}")


async def _held(asked: Queryable, batch_id: int, validator: Address) -> _Held | None:
    [rows] = await asked.ask(_HELD_BY(batch_id=batch_id, validator=validator))
    return _Held(*rows[0]) if rows else None


def _summarise(
    seats: Mapping[Address, int],
    judged: list[BatchView],
    proofs: set[tuple[int, str]],
    reports: Sequence[_Reported],
    due_before: float,
) -> list[Watched]:
    signed: Counter[str] = Counter()
    proven: Counter[str] = Counter()
    for batch in judged:
        is_due = (batch.posted_at or 0) < due_before
        for who, seat in seats.items():
            is_proven = (batch.batch_id, who) in proofs
            if batch.signers & seat and (is_proven or is_due):
                signed[who] += 1
                proven[who] += is_proven
    compared, failed = _median_reports(reports)
    return [
        Watched(
            validator=who,
            signed=signed[who],
            proven=proven[who],
            compared=compared[who],
            failed=failed[who],
        )
        for who in seats
    ]


def _median_reports(reports: Sequence[_Reported]) -> tuple[Counter[str], Counter[str]]:
    """Return compared and failed submissions by validator: for each batch, the median of the
    reports.

    A single reporter cannot discredit an honest validator if two others compared it too.
    """
    by_batch: dict[tuple[int, str], list[_Reported]] = defaultdict(list)
    for row in reports:
        by_batch[row.batch_id, row.validator].append(row)
    compared: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for (_, who), rows in by_batch.items():
        median = sorted(rows, key=lambda row: row.failed)[(len(rows) - 1) // 2]
        compared[who] += median.compared
        failed[who] += median.failed
    return compared, failed
