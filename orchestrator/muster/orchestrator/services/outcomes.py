"""Outcomes: validators' signed records, checked, kept, and posted once a quorum agrees.

Steps 7 and 8 of one rollout. The orchestrator does not judge; it only refuses records that the
contract would refuse, or that do not describe the batch.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import select

from muster.api.answers import BatchContents
from muster.chain import Batch, BatchView, ChainView
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.models import OutcomesRow
from muster.orchestrator.services.batching import Batching
from muster.orchestrator.services.files import FileStore, StoredOutcomes
from muster.orchestrator.services.projection import Projection
from muster.orchestrator.services.refusals import refuse
from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError, SignatureError
from muster.protocol.ids import Address
from muster.protocol.messages import OutcomeRecord, Outcomes, Submission, unpack_records

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Agreed:
    """Outcomes that a quorum of current validators signed."""

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
        domain: Domain,
        on_received: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._database = database
        self._files = files
        self._projection = projection
        self._batching = batching
        self._domain = domain
        self._on_received = on_received
        self._clock = clock
        self.heard_at: dict[Address, float] = {}
        """Wall clock of the latest outcomes from each validator, since the process started."""
        self.listening_since = clock()
        """When that began."""

    async def receive(
        self, validator: Address, batch_id: int, records: bytes, signature: bytes
    ) -> None:
        """Keep a validator's outcomes of a batch; a batch that is judged already needs none."""
        batch = self._projection.batch(batch_id)
        contents = None if batch is None else await self._batching.contents(batch)
        if batch is None or contents is None:
            raise refuse("batch_unknown", f"batch {batch_id} is not one of this orchestrator's")
        self._check_records(contents, records)
        outcomes = Outcomes(batch_id, batch.root, keccak(records))
        self._check_signature(validator, outcomes, signature)
        self.heard_at[validator] = self._clock()
        if batch.records is not None:
            return
        if await self._keep(validator, batch, records, signature):
            logger.info("outcomes received", extra={"batch": batch_id, "validator": validator})
            self._on_received()

    async def agreed(self) -> list[Agreed]:
        """Return the unjudged batches on which a quorum of current validators agrees."""
        ids = [batch.batch_id for batch in self._projection.unjudged]
        found: list[Agreed] = []
        async with self._database.read() as session:
            # Chunked: SQLite limits the variables of a statement.
            for start in range(0, len(ids), 500):
                rows = await session.scalars(
                    select(OutcomesRow).where(OutcomesRow.batch_id.in_(ids[start : start + 500]))
                )
                found += self._quorums(rows.all())
        return sorted(found, key=lambda agreed: agreed.header.batch_id)

    def _quorums(self, rows: Sequence[OutcomesRow]) -> Iterator[Agreed]:
        run = self._projection.run
        groups: dict[tuple[int, bytes], dict[str, bytes]] = defaultdict(dict)
        for row in rows:
            if row.validator in run.validators:
                groups[row.batch_id, row.records][row.validator] = row.signature
        for (batch_id, records), signatures in groups.items():
            quorum = run.config.terms.quorum
            if len(signatures) >= quorum:
                signers = sorted(signatures, key=str.lower)[:quorum]
                header = self._projection.view.batches[batch_id].header()
                yield Agreed(header, records, tuple(signatures[s] for s in signers))

    def _check_records(self, contents: BatchContents, data: bytes) -> None:
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

    def _check_signature(self, validator: Address, outcomes: Outcomes, signature: bytes) -> None:
        try:
            signer = recover(digest(self._domain, outcomes.struct_hash()), signature)
        except SignatureError as error:
            raise refuse("bad_outcomes_signature", str(error)) from error
        if signer != validator:
            raise refuse(
                "bad_outcomes_signature",
                "the outcomes are not signed by the validator that sent them",
                "sign the EIP-712 Outcomes of this batch, its root on chain and these records",
            )

    async def _keep(
        self, validator: Address, batch: BatchView, records: bytes, signature: bytes
    ) -> bool:
        async with self._database.write() as session:
            held = await session.get(OutcomesRow, (batch.batch_id, validator))
            if held is not None:
                _check_same(held, records)
                return False
            await self._files.keep_outcomes(
                StoredOutcomes(
                    batch_id=batch.batch_id,
                    root=batch.root,
                    validator=validator,
                    records=records,
                    signature=signature,
                )
            )
            session.add(
                OutcomesRow(
                    batch_id=batch.batch_id,
                    validator=validator,
                    records=records,
                    signature=signature,
                )
            )
        return True


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


def _check_same(held: OutcomesRow, records: bytes) -> None:
    if held.records != records:
        # Two signed outcomes for one batch can be punished; both hashes are kept in the log.
        logger.warning(
            "a validator signed two different outcomes for one batch",
            extra={
                "batch": held.batch_id,
                "validator": held.validator,
                "first": keccak(held.records).hex(),
                "second": keccak(records).hex(),
            },
        )
        raise refuse(
            "outcomes_conflict",
            f"other outcomes for batch {held.batch_id} were received from this validator",
            "a validator signs one set of outcomes per batch",
        )
