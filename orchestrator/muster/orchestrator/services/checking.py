"""Proofs of checking: held, and served to whoever recomputed the same submissions.

The orchestrator cannot tell a fingerprint from noise. It sees to the order: a commitment comes
before the outcomes are on chain, the fingerprints after, and what other validators say about them
is kept with their signatures, for anybody to repeat.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.answers import BatchChecking, CheckingAnswer, CheckReportAnswer
from muster.api.status import Watched
from muster.chain import BatchView
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.models import CheckingRow, CheckReportRow
from muster.orchestrator.services.projection import Projection
from muster.orchestrator.services.refusals import refuse, unknown_batch
from muster.protocol.checking import (
    Checking,
    CheckReport,
    fingerprints_hash,
    unpack_fingerprints,
)
from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.errors import EncodingError, SignatureError
from muster.protocol.ids import Address, Hash32

logger = logging.getLogger(__name__)

KEPT_BATCHES = 2000
"""Batches whose fingerprints are kept, the newest; the rest is in the validators' own folders."""
COUNTED_BATCHES = 200
"""Newest judged batches that the summary counts."""
PROOF_DUE_S = 120
"""So long after a batch's outcomes its proofs are not missed: twice a validator's longest pause."""


class CheckingDesk:
    """Keeps commitments, fingerprints and reports."""

    def __init__(
        self,
        *,
        database: Database,
        projection: Projection,
        domain: Domain,
        clock: Callable[[], float],
        now: Callable[[], float],
    ) -> None:
        """`clock` is the machine's, in Unix time; `now` the chain's."""
        self._database = database
        self._projection = projection
        self._domain = domain
        self._clock = clock
        self._now = now

    async def commit(
        self, validator: Address, batch_id: int, hashes: tuple[Hash32, Hash32], signature: bytes
    ) -> None:
        """Keep a commitment; `hashes` are those of the records and of the fingerprints."""
        batch = self._batch(batch_id)
        message = Checking(batch_id, batch.root, *hashes)
        self._require_signed(message.struct_hash(), validator, signature)
        async with self._database.write() as session:
            held = await session.get(CheckingRow, (batch_id, validator))
            if held is not None and held.batch_root == batch.root:
                if (held.records_hash, held.fingerprints_hash) != hashes:
                    raise refuse(
                        "checking_conflict", f"another commitment for batch {batch_id} is held"
                    )
                return
            if batch.records is not None:
                raise refuse("checking_late", f"batch {batch_id} has its outcomes already")
            if held is not None:
                await _forget(session, batch_id, validator)
            session.add(
                CheckingRow(
                    batch_id=batch_id,
                    validator=validator,
                    batch_root=batch.root,
                    records_hash=hashes[0],
                    fingerprints_hash=hashes[1],
                    signature=signature,
                    committed_at=int(self._clock()),
                )
            )
            for table in (CheckingRow, CheckReportRow):
                await session.execute(delete(table).where(table.batch_id < batch_id - KEPT_BATCHES))

    async def reveal(self, validator: Address, batch_id: int, packed: bytes) -> None:
        """Keep the fingerprints of a commitment, once the outcomes are on chain."""
        batch = self._batch(batch_id)
        if batch.records is None:
            raise refuse("checking_early", f"batch {batch_id} has no outcomes yet")
        try:
            parts = unpack_fingerprints(packed, batch.count)
        except EncodingError as error:
            raise refuse("bad_fingerprints", str(error)) from error
        async with self._database.write() as session:
            held = await session.get(CheckingRow, (batch_id, validator))
            committed = (batch.root, fingerprints_hash(parts))
            if held is None or (held.batch_root, held.fingerprints_hash) != committed:
                raise refuse("bad_fingerprints", "these are not the fingerprints committed to")
            if held.fingerprints is None:
                held.fingerprints, held.revealed_at = packed, int(self._clock())

    async def report(self, reporter: Address, report: CheckReport, signature: bytes) -> None:
        """Keep what one validator found about another's fingerprints; its first word stands."""
        batch = self._batch(report.batch_id)
        if report.batch_root != batch.root or not report.failed <= report.compared <= batch.count:
            raise refuse("bad_report", f"the report does not fit batch {report.batch_id}")
        self._require_signed(report.struct_hash(), reporter, signature)
        key = (report.batch_id, report.validator, reporter)
        async with self._database.write() as session:
            about = await session.get(CheckingRow, key[:2])
            shown = (batch.root, report.fingerprints_hash)
            if about is None or (about.batch_root, about.fingerprints_hash) != shown:
                raise refuse("bad_report", "the report is about fingerprints that nobody showed")
            if await session.get(CheckReportRow, key) is not None:
                return
            session.add(
                CheckReportRow(
                    batch_id=report.batch_id,
                    validator=report.validator,
                    reporter=reporter,
                    compared=report.compared,
                    failed=report.failed,
                    signature=signature,
                    reported_at=int(self._clock()),
                )
            )
        if report.failed:
            fields = {"batch": report.batch_id, "validator": report.validator}
            logger.warning(
                "a validator signed what it did not check",
                extra={**fields, "failed": report.failed, "reporter": reporter},
            )

    async def of_batch(self, batch_id: int) -> BatchChecking:
        """Return everything held about a batch; fingerprints only once outcomes are on chain."""
        batch = self._batch(batch_id)
        async with self._database.read() as session:
            found = await session.scalars(
                select(CheckingRow).where(CheckingRow.batch_id == batch_id).limit(1000)
            )
            rows = [row for row in found if row.batch_root == batch.root]
            about = {row.validator for row in rows}
            reports = await session.scalars(
                select(CheckReportRow).where(CheckReportRow.batch_id == batch_id).limit(1000)
            )
            return BatchChecking(
                batch_id=batch_id,
                batch_root=batch.root,
                commitments=[_commitment(row) for row in rows],
                reports=[_report(row) for row in reports if row.validator in about],
            )

    async def summary(self) -> list[Watched]:
        """Return how every current validator's proofs came out, over the newest judged batches."""
        run = self._projection.run
        judged = [
            b
            for b in self._projection.view.batches.values()
            if b.run_id == run.run_id and b.records is not None
        ][-COUNTED_BATCHES:]
        roots = {b.batch_id: b.root for b in judged}
        first = min(roots, default=0)
        async with self._database.read() as session:
            shown = await session.execute(
                select(CheckingRow.batch_id, CheckingRow.validator, CheckingRow.batch_root).where(
                    CheckingRow.batch_id >= first, CheckingRow.revealed_at.is_not(None)
                )
            )
            proofs = {(number, who) for number, who, root in shown if roots.get(number) == root}
            found = await session.scalars(
                select(CheckReportRow).where(CheckReportRow.batch_id >= first)
            )
            reports = [row for row in found if (row.batch_id, row.validator) in proofs]
        seats = {who: run.seats.get(who, 0) for who in run.validators}
        return _summarise(seats, judged, proofs, reports, self._now() - PROOF_DUE_S)

    def _batch(self, batch_id: int) -> BatchView:
        batch = self._projection.batch(batch_id)
        if batch is None:
            raise unknown_batch(batch_id, read_to=self._projection.view.block_number)
        return batch

    def _require_signed(self, struct: Hash32, signer: Address, signature: bytes) -> None:
        try:
            found = recover(digest(self._domain, struct), signature)
        except SignatureError as error:
            raise refuse("bad_checking_signature", str(error)) from error
        if found != signer:
            raise refuse("bad_checking_signature", f"signed by {found}, sent by {signer}")


async def _forget(session: AsyncSession, batch_id: int, validator: Address) -> None:
    """Drop a proof about a batch whose number is another's after a reorganisation."""
    for table in (CheckingRow, CheckReportRow):
        of_it = table.batch_id == batch_id, table.validator == validator
        await session.execute(delete(table).where(*of_it))


def _summarise(
    seats: Mapping[Address, int],
    judged: list[BatchView],
    proofs: set[tuple[int, str]],
    reports: Sequence[CheckReportRow],
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


def _median_reports(reports: Sequence[CheckReportRow]) -> tuple[Counter[str], Counter[str]]:
    """Return submissions compared and failed by validator: of each batch, what most reporters say.

    One reporter cannot make an honest validator look bad where two others compared it.
    """
    by_batch: dict[tuple[int, str], list[CheckReportRow]] = defaultdict(list)
    for row in reports:
        by_batch[row.batch_id, row.validator].append(row)
    compared: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for (_, who), rows in by_batch.items():
        median = sorted(rows, key=lambda row: row.failed)[(len(rows) - 1) // 2]
        compared[who] += median.compared
        failed[who] += median.failed
    return compared, failed


def _commitment(row: CheckingRow) -> CheckingAnswer:
    return CheckingAnswer(
        validator=row.validator,
        records_hash=row.records_hash,
        fingerprints_hash=row.fingerprints_hash,
        signature=row.signature,
        committed_at=row.committed_at,
        fingerprints=row.fingerprints,
    )


def _report(row: CheckReportRow) -> CheckReportAnswer:
    return CheckReportAnswer(
        validator=row.validator,
        reporter=row.reporter,
        compared=row.compared,
        failed=row.failed,
        signature=row.signature,
    )
