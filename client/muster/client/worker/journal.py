"""A worker's journal of signatures: only one file per slot is ever signed, despite crashes."""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.client.durable_log import Journal
from muster.lifecycle.files import cannot_write, write_durably
from muster.protocol.encoding import file_hash, hex0x
from muster.protocol.errors import storage_error_of
from muster.protocol.ids import (
    Address,
    BatchName,
    Hash32,
    PolicyVersion,
    RunId,
    Step,
    to_hash32,
)
from muster.protocol.messages import OutcomeRecord, Submission, Ticket, Verdict

logger = logging.getLogger(__name__)

KEPT_REFUSED = 100
"""Number of files that were not accepted and are kept for a dispute; the oldest are deleted
first."""
KEPT_ACCEPTED = 1000
"""Most files of accepted work that are kept until its outcome is final; the oldest are deleted
first."""

Slot = tuple[RunId, Address, Step, int]
"""Run, worker, step, index: what is signed at most once."""


@dataclass(frozen=True, slots=True)
class SignedSubmission:
    """A submission that was, or may have been, signed."""

    ticket: Ticket
    """The ticket it fills."""
    submission: Submission
    """The signed message."""
    ticket_signature: bytes = field(repr=False)
    """The orchestrator's signature, with which the worker can commit its work directly."""

    @property
    def slot(self) -> Slot:
        """The slot it fills."""
        return slot_of(self.ticket)

    @property
    def fields(self) -> dict[str, object]:
        """The fields of a log line that name it."""
        return fields_of(self.ticket)


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """A submission's place on chain, with its Merkle proof."""

    name: BatchName
    """The batch that holds it."""
    position: int
    """Its place in the batch."""
    proof: tuple[Hash32, ...]
    """The siblings from its leaf up to the batch's root."""


class SubmissionJournal(Journal):
    """Stores every submission before it is signed, and keeps its file until its outcome is final.

    The disk holds the files of work without an outcome, which the tickets bound, those of work that
    is called fraud, and at most KEPT_ACCEPTED and KEPT_REFUSED others.
    """

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._refused = folder / "refused"
        self._signed: dict[Slot, SignedSubmission] = {}
        self._open_slots: dict[Slot, SignedSubmission] = {}
        self._accepted: dict[Slot, SignedSubmission] = {}
        self._proven: dict[Slot, BatchPlace] = {}
        self._accused: dict[Hash32, SignedSubmission] = {}
        self._answered = set[Hash32]()
        self._recording = threading.Lock()
        super().__init__(folder / "submissions.jsonl")
        held = {path.name for path in self._files.glob("*")}
        self._accepted = {
            slot: signed
            for slot, signed in self._accepted.items()
            if self._file_path(signed.submission.file_hash).name in held
        }

    def take_in(self, entry: dict[str, Any]) -> None:
        """Remember a signed, a committed or a finished submission."""
        if "finished" in entry:
            self._note_outcome(slot_of(Ticket.from_json(entry["finished"])), entry["outcome"])
            if "answered" in entry:
                self._answered.add(to_hash32(entry["answered"]))
            return
        if "proven" in entry:
            self._proven[slot_of(Ticket.from_json(entry["proven"]))] = BatchPlace(
                BatchName(int(entry["batch_id"]), to_hash32(entry["root"])),
                int(entry["position"]),
                tuple(to_hash32(each) for each in entry["proof"]),
            )
            return
        signed = SignedSubmission(
            Ticket.from_json(entry["ticket"]),
            Submission.from_json(entry["submission"]),
            bytes.fromhex(entry["ticket_signature"].removeprefix("0x")),
        )
        self._signed[signed.slot] = self._open_slots[signed.slot] = signed

    def record(
        self, ticket: Ticket, ticket_signature: bytes, submission: Submission, data: bytes
    ) -> SignedSubmission:
        """Store a submission and return the one that may be signed for the ticket's slot.

        That is this submission, now durable with its file, or an earlier one for the same slot,
        which can never be replaced. May be called in several threads.
        """
        with self._recording:
            if earlier := self._signed.get(slot_of(ticket)):
                return earlier
            signed = SignedSubmission(ticket, submission, ticket_signature)
            write_durably(self._file_path(submission.file_hash), data)
            self.append(
                {
                    "ticket": ticket.to_json(),
                    "ticket_signature": hex0x(ticket_signature),
                    "submission": submission.to_json(),
                }
            )
            self._signed[signed.slot] = self._open_slots[signed.slot] = signed
            return signed

    def signed(self, ticket: Ticket) -> SignedSubmission | None:
        """Return the submission recorded for the ticket's slot."""
        return self._signed.get(slot_of(ticket))

    def signed_in(self, slot: Slot) -> SignedSubmission | None:
        """Return the submission recorded for a slot."""
        return self._signed.get(slot)

    def judged(
        self, run_id: RunId, worker: Address, record: OutcomeRecord
    ) -> SignedSubmission | None:
        """Return the submission that an outcome of the worker is about; None if it is about work of
        another node, or that was never signed."""
        signed = self._signed.get((run_id, worker, record.step, record.index))
        is_its = signed is not None and record.file_hash == signed.submission.file_hash
        return signed if is_its else None

    def prove(self, signed: SignedSubmission, proven: BatchPlace) -> None:
        """Store a submission's place on chain, because its source may not show it again."""
        if self._proven.get(signed.slot) == proven:
            return
        self.append(
            {
                "proven": signed.ticket.to_json(),
                "batch_id": proven.name.batch_id,
                "root": hex0x(proven.name.root),
                "position": proven.position,
                "proof": [hex0x(each) for each in proven.proof],
            }
        )
        self._proven[signed.slot] = proven

    def proven(self, signed: SignedSubmission) -> BatchPlace | None:
        """Return a submission's place on chain if it is known; it is not kept for finished ones."""
        return self._proven.get(signed.slot)

    def unfinished(self) -> Mapping[Slot, SignedSubmission]:
        """Return the unfinished submissions at this moment, oldest first."""
        return dict(self._open_slots)  # other threads change it

    def open_versions(self, run_id: RunId) -> set[PolicyVersion]:
        """Return the policy versions of a run that unfinished and accused submissions name: a
        dispute needs them.
        """
        tickets = [signed.ticket for signed in self._disputable()]
        return {ticket.policy_version for ticket in tickets if ticket.run_id == run_id}

    def data(self, signed: SignedSubmission) -> bytes | None:
        """Return the stored file, or None when the disk lost or changed it. Raises StorageError
        when the disk does not answer."""
        path = self._file_path(signed.submission.file_hash)
        for place in (path, self._refused / path.name):
            try:
                data = place.read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                said = f"cannot read {place}: {error.strerror}"
                hint = "check the disk, and the folder's owner and permissions"
                raise storage_error_of(error, said, hint=hint) from error
            if file_hash(data) == signed.submission.file_hash:
                return data
        return None

    def accepted(self) -> Mapping[Slot, SignedSubmission]:
        """Return the accepted submissions whose files are kept, oldest first."""
        return self._accepted

    def finish(self, signed: SignedSubmission, outcome: str) -> None:
        """Mark a submission as finished; an accepted one may get another outcome once more, after a
        reorganisation.

        The file of accepted work stays until `discard`. Others are kept aside: a dispute needs
        them, and only validators have copies.
        """
        slot, is_accepted = signed.slot, outcome == Verdict.ACCEPTED.name
        if slot not in self._open_slots and (is_accepted or slot not in self._accepted):
            return
        self.append({"finished": signed.ticket.to_json(), "outcome": outcome})
        self._note_outcome(slot, outcome)
        if is_accepted:
            for old in list(self._accepted.values())[:-KEPT_ACCEPTED]:
                self.discard(old)
        else:
            self._set_aside(signed)

    def accuse(self, signed: SignedSubmission, case_id: Hash32) -> bool:
        """Keep the file of work that is called fraud until `answer`, where a dispute by hand finds
        it; `case_id` names the case about the verdict. Return whether it has no answer yet.
        """
        if case_id in self._answered:
            return False
        self._accused[case_id] = signed
        self._set_aside(signed)
        return True

    def answer(self, signed: SignedSubmission, case_id: Hash32) -> None:
        """Mark a verdict of fraud as disputed, or as one that cannot be, and its work as finished;
        `case_id` names the case about it.
        """
        outcome = Verdict.FRAUD.name
        self.append(
            {
                "finished": signed.ticket.to_json(),
                "outcome": outcome,
                "answered": hex0x(case_id),
            }
        )
        self._answered.add(case_id)
        self._accused.pop(case_id, None)
        self._note_outcome(signed.slot, outcome)
        self._set_aside(signed)

    def _disputable(self) -> list[SignedSubmission]:
        """Return the unfinished and the accused submissions."""
        return [*self.unfinished().values(), *dict(self._accused).values()]

    def _set_aside(self, signed: SignedSubmission) -> None:
        """Move a file to those that were not accepted, and delete the oldest of these."""
        path = self._file_path(signed.submission.file_hash)
        self._refused.mkdir(exist_ok=True)
        try:
            path.replace(self._refused / path.name)
            self._prune_refused(newest=path.stem)
        except FileNotFoundError:
            return  # another thread moves or deletes the same files
        except OSError as error:
            raise cannot_write(path, error) from error

    def _prune_refused(self, newest: str) -> None:
        """Delete the oldest files that were not accepted and that no dispute needs; `newest` is the
        stem of the one that was moved last, however old it is.
        """
        needed = {each.submission.file_hash.hex() for each in self._disputable()}
        kept = [each for each in self._refused.iterdir() if each.stem not in needed]
        kept.sort(key=lambda each: (each.stem == newest, each.stat().st_mtime))
        for old in kept[:-KEPT_REFUSED]:
            old.unlink(missing_ok=True)

    def discard(self, signed: SignedSubmission) -> None:
        """Delete the file of accepted work."""
        self._accepted.pop(signed.slot, None)
        self._file_path(signed.submission.file_hash).unlink(missing_ok=True)

    def _note_outcome(self, slot: Slot, outcome: str) -> None:
        self._proven.pop(slot, None)
        signed = self._open_slots.pop(slot, None) or self._accepted.pop(slot, None)
        if signed is not None and outcome == Verdict.ACCEPTED.name:
            self._accepted[slot] = signed

    def _file_path(self, name: Hash32) -> Path:
        return self._files / f"{name.hex()}.parquet"


def fields_of(ticket: Ticket) -> dict[str, object]:
    """Return the fields of a log line that name a ticket."""
    return {"step": ticket.step, "index": ticket.index, "policy_version": ticket.policy_version}


def slot_of(work: Ticket | Submission) -> Slot:
    """Return the slot that a ticket allows, or a submission fills."""
    return (work.run_id, work.worker, work.step, work.index)
