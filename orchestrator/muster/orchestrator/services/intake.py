"""Intake: checks a submission at the door and keeps its file. Never parses the file.

Step 6 of one rollout. A slot takes one file: the same file again is harmless, another is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Select, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.limits import MAX_FILE_BYTES
from muster.chain import WorkerView
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.models import LeaseRow, SubmissionRow, lease_of
from muster.orchestrator.services.files import FileStore, Received, StoredSubmission
from muster.orchestrator.services.projection import Projection
from muster.orchestrator.services.refusals import refuse
from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.errors import ApiError, SignatureError, StorageError
from muster.protocol.ids import Address
from muster.protocol.messages import Submission, Ticket

logger = logging.getLogger(__name__)

MAX_ROLLOUTS = (1 << 16) - 1
"""What an outcome record can count."""
MAX_UNITS = (1 << 32) - 1
"""What an outcome record can count."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A submission that may be uploaded."""

    submission: Submission
    """The claim."""
    signature: bytes
    """EIP-712 `Submission` by the node."""
    ticket: Ticket
    """The ticket it fills."""
    ticket_signature: bytes
    """EIP-712 `Ticket`."""


@dataclass(slots=True)
class Upload:
    """An upload that is complete, on its way into the database."""

    admitted: Admitted
    """What it is."""
    received: Received
    """Its file."""
    done: asyncio.Future[None]
    """Set once it is decided."""
    row: SubmissionRow | None = None
    """Its row, once it has one."""

    def kept(self) -> tuple[Received, StoredSubmission]:
        """Return what to keep of it."""
        assert self.row is not None
        return self.received, _stored(self.admitted, self.row)

    def fail(self, reason: Exception) -> None:
        """Tell who waits that it was not taken."""
        if not self.done.done():
            self.done.set_exception(reason)

    def succeed(self) -> None:
        """Tell who waits that it is kept."""
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class AlreadyHeld:
    """The very same submission was received before."""


class Intake:
    """Takes uploads into the files folder and the database."""

    def __init__(
        self,
        *,
        database: Database,
        files: FileStore,
        projection: Projection,
        domain: Domain,
        now: Callable[[], int],
        on_received: Callable[[], None],
    ) -> None:
        self._database = database
        self._files = files
        self._projection = projection
        self._domain = domain
        self._now = now
        self._on_received = on_received
        self._turn = asyncio.Lock()
        self._waiting: list[Upload] = []

    async def admit(
        self, worker: WorkerView, submission: Submission, signature: bytes
    ) -> Admitted | AlreadyHeld:
        """Decide, before a byte of the file is read, whether it may be uploaded."""
        self._check_claim(worker, submission, signature)
        async with self._database.read(is_look_up=True) as session:
            if await self._is_held(session, submission):
                return AlreadyHeld()
            lease = await session.scalar(lease_of(submission))
        if lease is None:
            raise refuse(
                "ticket_unknown",
                f"no ticket was given out for step {submission.step}, index {submission.index}",
                "ask for a lease, then work on its ticket",
            )
        ticket = Ticket.from_json(lease.ticket)
        self._check_deadline(submission, ticket)
        if submission.policy_version != ticket.policy_version:
            raise refuse(
                "bad_submission",
                f"the ticket asks for policy version {ticket.policy_version}, "
                f"the submission names {submission.policy_version}",
            )
        return Admitted(submission, signature, ticket, lease.signature)

    async def store(self, admitted: Admitted, stream: AsyncIterator[bytes]) -> None:
        """Take in the file of an admitted submission; returns when it is safely on disk."""
        received = await self._files.receive(stream, max_bytes=MAX_FILE_BYTES)
        try:
            if received.file_hash != admitted.submission.file_hash:
                raise refuse(
                    "file_hash_mismatch",
                    f"the body's SHA-256 is {received.file_hash.hex()}",
                    "sign the hash of exactly the bytes that are uploaded",
                )
            self._check_deadline(admitted.submission, admitted.ticket)
            await self._keep(admitted, received)
        finally:
            self._files.discard(received)
        self._on_received()
        logger.info(
            "submission received",
            extra={
                "worker": admitted.submission.worker,
                "step": admitted.submission.step,
                "index": admitted.submission.index,
                "size_bytes": received.size_bytes,
            },
        )

    async def _keep(self, admitted: Admitted, received: Received) -> None:
        try:
            await self._take_slot(admitted, received)
        except IntegrityError:
            # Another upload took the slot, or this file, at the same moment: it is committed now.
            async with self._database.read(is_look_up=True) as session:
                if not await self._is_held(session, admitted.submission):
                    raise

    async def _take_slot(self, admitted: Admitted, received: Received) -> None:
        upload = Upload(admitted, received, asyncio.get_running_loop().create_future())
        if self._database.is_shared:
            # The server's writers do not wait for each other.
            await self._commit([upload])
        else:
            await self._join(upload)
        await upload.done

    async def _join(self, upload: Upload) -> None:
        """Share a transaction, and the waiting for the disk, with uploads that came meanwhile."""
        self._waiting.append(upload)
        async with self._turn:
            if not upload.done.done():
                group, self._waiting = self._waiting, []
                await self._commit(group)

    async def _commit(self, group: Sequence[Upload]) -> None:
        try:
            async with self._database.write(is_exclusive=False) as session:
                placed = [upload for upload in group if await self._place(session, upload)]
                if placed:
                    # Before rows are committed: a row stands for a file that is safely on disk.
                    await self._files.keep([upload.kept() for upload in placed])
        except BaseException as error:
            reason = error if isinstance(error, Exception) else StorageError("stopping")
            for upload in group:
                upload.fail(reason)
            if not isinstance(error, Exception):
                raise
        for upload in group:
            upload.succeed()

    async def _place(self, session: AsyncSession, upload: Upload) -> bool:
        """Write an upload's row; returns whether it is new. One that is refused is told so."""
        submission = upload.admitted.submission
        try:
            if await self._is_held(session, submission):
                return False
        except ApiError as refusal:
            upload.fail(refusal)
            return False
        upload.row = row = _row(
            upload.admitted, received_at=self._now(), size_bytes=upload.received.size_bytes
        )
        session.add(row)
        # In a shared database, whoever else wants the slot waits here until this is decided.
        await session.flush()
        await session.execute(
            update(LeaseRow)
            .where(
                LeaseRow.worker == row.worker,
                LeaseRow.step == row.step,
                LeaseRow.index == row.index,
            )
            .values(is_filled=True)
        )
        return True

    def _check_claim(self, worker: WorkerView, submission: Submission, signature: bytes) -> None:
        if submission.run_id != self._projection.run_id:
            raise refuse("run_unknown", f"this orchestrator does not serve run {submission.run_id}")
        if submission.worker != worker.address:
            raise refuse(
                "bad_submission", f"the node serves {worker.address}, not {submission.worker}"
            )
        if not 1 <= submission.rollouts <= MAX_ROLLOUTS or submission.units > MAX_UNITS:
            raise refuse(
                "bad_submission",
                f"{submission.rollouts} rollouts or {submission.units} units are out of range",
            )
        if self._signer(submission, signature) != worker.node:
            raise refuse(
                "bad_submission_signature",
                "the submission is not signed by the worker's node",
                "sign the EIP-712 Submission with the node key, in the ledger's domain",
            )

    def _signer(self, submission: Submission, signature: bytes) -> Address | None:
        try:
            return recover(digest(self._domain, submission.struct_hash()), signature)
        except SignatureError:
            return None

    def _check_deadline(self, submission: Submission, ticket: Ticket) -> None:
        late_s = self._now() - ticket.deadline
        # What its worker committed directly is judged by that; its file may follow.
        if late_s > 0 and self._projection.batch_with_root(submission.leaf()) is None:
            raise refuse(
                "lease_expired",
                f"the ticket's deadline passed {late_s} s ago",
                "ask for a new lease; its slot is another one",
            )

    async def _is_held(self, session: AsyncSession, submission: Submission) -> bool:
        in_slot = await session.scalar(_slot_of(submission))
        if in_slot is not None:
            if in_slot.file_hash == submission.file_hash:
                return True
            raise refuse(
                "slot_taken",
                f"step {submission.step}, index {submission.index} already has another file",
                "one file per slot; ask for a new lease",
            )
        same_file = await session.scalar(
            select(SubmissionRow).where(SubmissionRow.file_hash == submission.file_hash)
        )
        if same_file is None:
            return False
        # The same upload, repeated, may have come in since the slot was looked at.
        if (same_file.worker, same_file.step, same_file.index) == (
            submission.worker,
            submission.step,
            submission.index,
        ):
            return True
        raise refuse("file_taken", "another slot already holds this very file")


def submission_row(stored: StoredSubmission) -> SubmissionRow:
    """Return the database row of a kept submission."""
    if stored.ticket is None or stored.ticket_signature is None:
        raise ValueError("a received submission has a ticket")
    admitted = Admitted(stored.submission, stored.signature, stored.ticket, stored.ticket_signature)
    row = _row(admitted, received_at=stored.received_at, size_bytes=stored.size_bytes)
    row.sequence = stored.sequence
    return row


def _row(admitted: Admitted, *, received_at: int, size_bytes: int) -> SubmissionRow:
    submission = admitted.submission
    return SubmissionRow(
        file_hash=submission.file_hash,
        worker=submission.worker,
        step=submission.step,
        index=submission.index,
        units=submission.units,
        submission=submission.to_json(),
        signature=admitted.signature,
        ticket=admitted.ticket.to_json(),
        ticket_signature=admitted.ticket_signature,
        received_at=received_at,
        size_bytes=size_bytes,
    )


def _stored(admitted: Admitted, row: SubmissionRow) -> StoredSubmission:
    return StoredSubmission(
        submission=admitted.submission,
        signature=admitted.signature,
        ticket=admitted.ticket,
        ticket_signature=admitted.ticket_signature,
        received_at=row.received_at,
        sequence=row.sequence,
        size_bytes=row.size_bytes,
    )


def _slot_of(submission: Submission) -> Select[SubmissionRow]:
    return select(SubmissionRow).where(
        SubmissionRow.worker == submission.worker,
        SubmissionRow.step == submission.step,
        SubmissionRow.index == submission.index,
    )
