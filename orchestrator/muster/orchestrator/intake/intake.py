"""Intake: checks a submission at the door and keeps its file. Never parses the file.

Step 6 of one rollout. A slot accepts one submission. Repeating it is harmless. Another one is
refused, and its worker is slashed for it once one of the two is judged: `doubles` keeps both
signatures, and `muster.orchestrator.loop.report` takes them to the court of faults.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from muster.api.answers import BatchEntry, SignedClaim, SlotTaken
from muster.chain import MemberView
from muster.orchestrator.db import Database, statements
from muster.orchestrator.db.group import GroupedCalls
from muster.orchestrator.db.query import Rows
from muster.orchestrator.http.errors import refuse
from muster.orchestrator.intake.files import CompleteUpload, FileStore, StoredSubmission
from muster.orchestrator.outcomes.doubles import Doubles
from muster.orchestrator.projection import Projection
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.errors import ApiError, StorageError
from muster.protocol.messages import Submission, Ticket

logger = logging.getLogger(__name__)

MAX_ROLLOUTS = (1 << 16) - 1
"""Most rollouts that an outcome record can count."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A submission that may be uploaded."""

    submission: Submission
    """The signed claim."""
    signature: bytes
    """EIP-712 `Submission` by the node."""
    ticket: Ticket
    """The ticket it fills."""
    ticket_signature: bytes
    """EIP-712 `Ticket`."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A complete upload that is not in the database yet."""

    entry: BatchEntry
    """The submission with its ticket and signatures."""
    received: CompleteUpload
    """The uploaded file."""

    def kept(self, sequence: int) -> tuple[CompleteUpload, StoredSubmission]:
        """Return the file and the sidecar to keep."""
        size_bytes = self.received.size_bytes
        stored = StoredSubmission(**dict(self.entry), sequence=sequence, size_bytes=size_bytes)
        return self.received, stored


@dataclass(frozen=True, slots=True)
class AlreadyHeld:
    """The same submission was received before."""


@dataclass(eq=False, repr=False, kw_only=True)
class Intake:
    """Receives uploads into the files folder and the database."""

    database: Database
    files: FileStore
    projection: Projection
    domain: Domain
    doubles: Doubles
    max_units: int
    """Most units that one submission can be worth."""
    max_file_bytes: int
    """Most bytes of a file of the recipe: junk of more is not kept."""
    now: Callable[[], int]
    on_received: Callable[[], None]

    def __post_init__(self) -> None:
        self._grouped = GroupedCalls(self._take_in)

    async def admit(
        self, worker: MemberView, submission: Submission, signature: bytes
    ) -> Admitted | AlreadyHeld:
        """Decide whether a submission may be uploaded, before a byte of its file is read."""
        self._check_claim(worker, submission, signature)
        in_slot, of_file, tickets = await self.database.ask(
            statements.claim_in_slot(submission),
            statements.slot_of_file(submission),
            statements.ticket_for(submission),
        )
        if await self._is_held(submission, signature, in_slot, of_file):
            return AlreadyHeld()
        if not tickets:
            raise refuse(
                "ticket_unknown",
                f"there is no ticket for step {submission.step}, index {submission.index}",
                "request a lease, then work on its ticket",
            )
        [(ticket_json, ticket_signature)] = tickets
        ticket = Ticket.from_json(json.loads(ticket_json))
        self._check_deadline(submission, ticket)
        if submission.policy_version != ticket.policy_version:
            raise refuse(
                "bad_submission",
                f"the ticket is for policy version {ticket.policy_version}, "
                f"the submission for {submission.policy_version}",
            )
        return Admitted(submission, signature, ticket, ticket_signature)

    async def store(self, admitted: Admitted, stream: AsyncIterator[bytes]) -> None:
        """Receive the file of an admitted submission; returns when it is durable."""
        received = await self.files.receive(stream, max_bytes=self.max_file_bytes)
        try:
            if received.file_hash != admitted.submission.file_hash:
                raise refuse(
                    "file_hash_mismatch",
                    f"the body's SHA-256 is {received.file_hash.hex()}",
                    "sign the hash of exactly the bytes that are uploaded",
                )
            self._check_deadline(admitted.submission, admitted.ticket)
            entry = BatchEntry(
                submission=admitted.submission,
                signature=admitted.signature,
                ticket=admitted.ticket,
                ticket_signature=admitted.ticket_signature,
                received_at=self.now(),
            )
            await self._grouped.join(Upload(entry, received))
        finally:
            self.files.discard(received)
        self.on_received()
        logger.info(
            "submission received",
            extra={
                "worker": admitted.submission.worker,
                "step": admitted.submission.step,
                "index": admitted.submission.index,
                "size_bytes": received.size_bytes,
            },
        )

    async def _take_in(self, uploads: Sequence[Upload]) -> list[ApiError | None]:
        """Keep uploads and store them in one transaction; returns an error for each refused one."""
        async with self.database.transaction(is_exclusive=False, is_durable=True) as asked:
            # In a shared database, another replica that wants the slot waits here for this
            # transaction.
            numbers = await asked.ask(
                *(statements.new_submission(u.entry, u.received.size_bytes) for u in uploads)
            )
            placed = [(u, rows[0][0]) for u, rows in zip(uploads, numbers, strict=True) if rows]
            # Files first: a committed row promises that its file is durable.
            await self.files.keep([upload.kept(number) for upload, number in placed])
            await asked.ask(*(statements.fill(u.entry.submission) for u, _ in placed))
        return [
            None if rows else await self._refusal(upload.entry)
            for upload, rows in zip(uploads, numbers, strict=True)
        ]

    async def _refusal(self, entry: BatchEntry) -> ApiError | None:
        """Return why an upload's slot or file is taken; None if it is taken by the same
        submission."""
        submission = entry.submission
        in_slot, of_file = await self.database.ask(
            statements.claim_in_slot(submission), statements.slot_of_file(submission)
        )
        try:
            if not await self._is_held(submission, entry.signature, in_slot, of_file):
                raise StorageError(
                    "an upload's slot is taken, but the database has no submission in it"
                )
        except ApiError as refusal:
            return refusal
        return None

    async def _is_held(
        self, submission: Submission, signature: bytes, in_slot: Rows, of_file: Rows
    ) -> bool:
        """Return whether the same submission is kept, given the claim in its slot and the slot of
        its file. Refuses a submission whose slot or file is taken by another.
        """
        for claim, its_signature in in_slot:
            held = Submission.from_json(json.loads(claim))
            if held == submission:
                return True
            await self.doubles.note_submission(submission, signature)
            logger.warning(
                "a node signed two submissions for one slot",
                extra={"worker": submission.worker, "step": submission.step},
            )
            raise SlotTaken(
                f"step {submission.step}, index {submission.index} already has another submission",
                SignedClaim(submission=held, signature=its_signature),
                hint="upload one submission per slot; request a new lease",
            )
        # A repetition of the same upload may have completed since the slot was read.
        if not of_file or of_file[0] == (submission.worker, submission.step, submission.index):
            return bool(of_file)
        raise refuse("file_taken", "another slot already holds the same file")

    def _check_claim(self, worker: MemberView, submission: Submission, signature: bytes) -> None:
        if submission.run_id != self.projection.run_id:
            raise refuse("run_unknown", f"this orchestrator does not serve run {submission.run_id}")
        if submission.worker != worker.address:
            raise refuse(
                "bad_submission", f"the node serves {worker.address}, not {submission.worker}"
            )
        # The contract refuses a batch of no units, and one whose units the run cannot pay for: this
        # claim would stop the work of others.
        if not (
            1 <= submission.rollouts <= MAX_ROLLOUTS and 1 <= submission.units <= self.max_units
        ):
            raise refuse(
                "bad_submission",
                f"{submission.rollouts} rollouts (1 to {MAX_ROLLOUTS}) or {submission.units} units "
                f"(1 to {self.max_units}) are out of range",
            )
        if signer_of(self.domain, submission, signature) != worker.node:
            raise refuse(
                "bad_submission_signature",
                "the submission is not signed by the worker's node",
                "sign the EIP-712 Submission with the node key, in the ledger's domain",
            )

    def _check_deadline(self, submission: Submission, ticket: Ticket) -> None:
        late_s = self.now() - ticket.deadline
        # A worker may commit work directly, which is judged as such; its file may be uploaded
        # later.
        if late_s > 0 and self.projection.batch_with_root(submission.leaf()) is None:
            raise refuse(
                "lease_expired",
                f"the ticket's deadline passed {late_s} s ago",
                "request a new lease; it is for another slot",
            )
