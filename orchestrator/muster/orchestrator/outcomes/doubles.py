"""Keeps second signatures until they are reported to the court of faults, and finds misrecords.

The second outcomes of a batch by one validator, or the second submission for a slot, are refused;
both signatures are kept. Posted records are compared with what their batch holds.
`muster.chain.doubles` says what each proves.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from muster.chain import BatchView, Offence, WorkerStatus
from muster.chain.doubles import (
    WITHHELD,
    DoubleOutcome,
    DoubleSubmission,
    Fault,
    SignedRecords,
    SignedWork,
    each_once,
    find_misrecords,
    tag_of,
)
from muster.orchestrator.db import Database, statements
from muster.orchestrator.db.query import Query, Queryable, Statement, given, new_row
from muster.orchestrator.db.statements import SubmissionRow
from muster.orchestrator.db.tables import doubles
from muster.orchestrator.intake.files import FileStore, StoredDouble
from muster.orchestrator.projection import Projection, slot_of
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.encoding import hex0x
from muster.protocol.ids import Address, BatchName
from muster.protocol.messages import Submission

MAX_COMPARED = 16
"""Most judged batches that one report compares with their records."""
MAX_DIRECT = 500
"""Number of latest directly committed submissions that are compared with ours."""

_KEPT = Query(select(doubles.c.tag).where(*given(doubles, "offence", "owner", "tag")))
_KEEP = Query(new_row(doubles).on_conflict_do_nothing())
_ALL = Query(select(doubles.c.offence, doubles.c.owner, doubles.c.tag, doubles.c.signed))()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A stored second signature."""

    offence: str
    owner: Address
    tag: int
    signed: dict[str, Any]


class Doubles:
    """Keeps second signatures, and lists those to report to the court."""

    def __init__(
        self, database: Database, files: FileStore, projection: Projection, domain: Domain
    ) -> None:
        """`domain` is the EIP-712 domain of the ledger."""
        self._database = database
        self._files = files
        self._projection = projection
        self._domain = domain
        self._compared: set[BatchName] = set()
        """Judged batches whose records agree with what they hold."""

    async def note_outcomes(
        self, batch: BatchView, validator: Address, first: SignedRecords, second: SignedRecords
    ) -> None:
        """Keep two sets of outcomes that a validator signed about a batch."""
        signed = {
            "batch_root": hex0x(batch.root),
            "first": first.to_json(),
            "second": second.to_json(),
        }
        await self._keep(Offence.DOUBLE_OUTCOME, validator, batch.batch_id, signed)

    async def note_submission(self, submission: Submission, signature: bytes) -> None:
        """Keep a signed submission for a slot that has another one."""
        signed = {"submission": submission.to_json(), "signature": hex0x(signature)}
        tag = tag_of(submission)
        await self._keep(Offence.DOUBLE_SUBMISSION, submission.worker, tag, signed)

    async def to_report(self) -> list[Fault]:
        """Return the offences that can be proven now and were not reported, each once."""
        [rows] = await self._database.search(_ALL)
        kept = [_Kept(what, who, tag, json.loads(signed)) for what, who, tag, signed in rows]
        found = [
            *self._outcomes(kept),
            *self._shown(),
            *await self._submissions(kept),
            *await self._misrecords(),
        ]
        done = {(s.owner, s.offence, s.tag) for s in self._projection.slashes}
        return each_once(d for d in found if d.filed not in done and self._costs(d))

    def _costs(self, double: Fault) -> bool:
        stake = self._projection.view.stake(self._projection.run_id, double.owner)
        member = self._projection.run.members.get(double.owner)
        is_banned = member is not None and member.status == WorkerStatus.BANNED
        return stake.active_wei + stake.unbonding_wei > 0 and not is_banned

    def _outcomes(self, rows: Iterable[_Kept]) -> Iterator[Fault]:
        for row in rows:
            if row.offence != Offence.DOUBLE_OUTCOME:
                continue
            batch = self._projection.batch(row.tag)
            # A reorganisation can give the id to another batch; a void batch proves nothing.
            if batch is None or batch.is_void or hex0x(batch.root) != row.signed["batch_root"]:
                continue
            first, second = (SignedRecords.from_json(row.signed[k]) for k in ("first", "second"))
            yield DoubleOutcome(row.owner, batch, first, second)

    def _shown(self) -> Iterator[Fault]:
        """Yield pairs of outcomes that a validator published on chain."""
        for batch in self._projection.view.batches.values():
            if batch.run_id != self._projection.run_id or len(batch.shown) < 2 or batch.is_void:
                continue
            for validator in {who for shown in batch.shown.values() for who in shown}:
                shown = shown_by(batch, validator)
                if len(shown) > 1:
                    yield DoubleOutcome(validator, batch, shown[0], shown[1])

    async def _submissions(self, rows: Iterable[_Kept]) -> list[Fault]:
        seconds = [
            SignedWork(
                Submission.from_json(row.signed["submission"]),
                bytes.fromhex(row.signed["signature"][2:]),
            )
            for row in rows
            if row.offence == Offence.DOUBLE_SUBMISSION
        ]
        direct = [
            SignedWork(batch.work.submission, batch.work.node_signature)
            for batch in self._projection.view.batches.values()
            if batch.work is not None and batch.run_id == self._projection.run_id
        ]
        seconds += direct[-MAX_DIRECT:]
        questions = [statements.in_slot(second.submission) for second in seconds]
        found: list[Fault] = []
        for second, held in zip(seconds, await self._database.search(*questions), strict=True):
            for row in (SubmissionRow(*each) for each in held):
                if row.claim != second.submission:
                    found += self._provable(SignedWork(row.claim, row.signature), second)
        return found

    def _provable(self, one: SignedWork, other: SignedWork) -> Iterator[Fault]:
        """Yield the proof, if one of the two submissions was judged."""
        for first, second in ((one, other), (other, one)):
            work = first.submission
            judged = self._projection.judged(slot_of(work), work.file_hash)
            batch = None if judged is None else self._projection.batch(judged.batch_id)
            member = self._projection.run.members.get(work.worker)
            if judged is None or batch is None or member is None:
                continue
            node = signer_of(self._domain, second.submission, second.signature)
            if node is not None and member.answers_for(node, batch.committed_at):
                yield DoubleSubmission(batch, judged.position, first, second)
                return

    async def _misrecords(self) -> list[Fault]:
        """Return the misrecords in judged batches that were not compared yet, the newest ones."""
        run_id = self._projection.run_id
        judged = [
            batch
            for batch in reversed(self._projection.view.batches.values())
            if batch.run_id == run_id and batch.signers and batch.records is not None
        ]
        new = [batch for batch in judged if batch.name not in self._compared][:MAX_COMPARED]
        held = await self._database.search(*(statements.in_batch(root=b.root) for b in new))
        found: list[Fault] = []
        for batch, rows in zip(new, held, strict=True):
            stored = (SubmissionRow(*row) for row in rows)
            works = [SignedWork(row.claim, row.signature) for row in stored]
            if batch.work is not None:
                works = [SignedWork(batch.work.submission, batch.work.node_signature)]
            run, workers = self._projection.run, self._projection.view.worker_by_id
            wrong = find_misrecords(batch, works, run, workers, self._domain)
            found += wrong
            if not wrong:
                self._compared.add(batch.name)
        return found

    async def _keep(self, offence: Offence, owner: Address, tag: int, signed: Any) -> None:
        key = (offence.value, owner, tag)
        # A repetition is not written again.
        if await _is_kept(self._database, key):
            return
        async with self._database.transaction(is_durable=True) as asked:
            if not await _is_kept(asked, key):
                kept = StoredDouble(offence=key[0], owner=owner, tag=tag, signed=signed)
                # There is no other copy of the second signature, so it must survive the database.
                await self._files.keep_double(kept)
                await asked.ask(keep_double(kept))


async def _is_kept(asked: Queryable, key: tuple[str, str, int]) -> bool:
    offence, owner, tag = key
    [rows] = await asked.ask(_KEPT(offence=offence, owner=owner, tag=tag))
    return bool(rows)


def keep_double(kept: StoredDouble) -> Statement:
    """Store a second signature, unless it is stored already."""
    signed = json.dumps(kept.signed)
    return _KEEP(offence=kept.offence, owner=kept.owner, tag=kept.tag, signed=signed)


def shown_by(batch: BatchView, validator: Address) -> list[SignedRecords]:
    """Return the outcomes that a validator published on chain about a batch; statements that its
    data is withheld are left out."""
    return [
        SignedRecords(records_hash, signatures[validator])
        for records_hash, signatures in batch.shown.items()
        if validator in signatures and records_hash != WITHHELD
    ]
