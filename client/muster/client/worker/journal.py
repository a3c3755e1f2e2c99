"""What a worker has signed: one file per slot, ever, whatever crashes in between."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from muster.client.journal import Journal, write_durably
from muster.protocol.encoding import file_hash
from muster.protocol.errors import EncodingError, StorageError
from muster.protocol.ids import Address, Hash32, RunId, Step
from muster.protocol.messages import Submission, Ticket

logger = logging.getLogger(__name__)

Slot = tuple[RunId, Address, Step, int]
"""Run, worker, step, index: what is signed at most once."""


@dataclass(frozen=True, slots=True)
class SignedSubmission:
    """A submission that was, or may have been, signed."""

    ticket: Ticket
    """The ticket it fills."""
    submission: Submission
    """What the signature is over."""

    @property
    def slot(self) -> Slot:
        """The slot it fills."""
        return slot_of(self.ticket)


class SubmissionJournal:
    """Remembers every submission before it is signed, and keeps its file until it is settled."""

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._signed: dict[Slot, SignedSubmission] = {}
        self._open: dict[Slot, SignedSubmission] = {}
        self._journal = Journal(folder / "submissions.jsonl")
        try:
            for entry in self._journal.entries:
                self._replay(entry)
        except (EncodingError, KeyError, TypeError) as error:
            self.close()
            raise StorageError(
                f"the journal in {folder} is damaged: {error}",
                hint="restore it; without it this node might sign a slot twice and be slashed",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have it."""
        self._journal.close()

    def record(self, ticket: Ticket, submission: Submission, data: bytes) -> SignedSubmission:
        """Return what may be signed for the ticket's slot.

        That is this submission, now durable with its file, or the one recorded there before, which
        stands whatever came later.
        """
        if earlier := self._signed.get(slot_of(ticket)):
            return earlier
        signed = SignedSubmission(ticket, submission)
        write_durably(self._path(submission.file_hash), data)
        self._journal.append({"ticket": ticket.to_json(), "submission": submission.to_json()})
        self._signed[signed.slot] = self._open[signed.slot] = signed
        return signed

    def signed(self, ticket: Ticket) -> SignedSubmission | None:
        """Return what was recorded for the ticket's slot."""
        return self._signed.get(slot_of(ticket))

    def unfinished(self) -> Mapping[Slot, SignedSubmission]:
        """Return the submissions that something is left to do for, oldest first."""
        return self._open

    def data(self, signed: SignedSubmission) -> bytes | None:
        """Return the stored file, or None when the disk lost or changed it."""
        try:
            data = self._path(signed.submission.file_hash).read_bytes()
        except OSError:
            return None
        return data if file_hash(data) == signed.submission.file_hash else None

    def finish(self, signed: SignedSubmission, outcome: str) -> None:
        """Note that nothing is left to do for a submission, and drop its file."""
        if self._open.pop(signed.slot, None) is None:
            return
        self._journal.append({"finished": signed.ticket.to_json(), "outcome": outcome})
        with contextlib.suppress(FileNotFoundError):
            self._path(signed.submission.file_hash).unlink()

    def _replay(self, entry: dict[str, Any]) -> None:
        if "finished" in entry:
            self._open.pop(slot_of(Ticket.from_json(entry["finished"])), None)
            return
        signed = SignedSubmission(
            Ticket.from_json(entry["ticket"]), Submission.from_json(entry["submission"])
        )
        self._signed[signed.slot] = self._open[signed.slot] = signed

    def _path(self, name: Hash32) -> Path:
        return self._files / f"{name.hex()}.parquet"


def slot_of(ticket: Ticket) -> Slot:
    """Return the slot a ticket allows."""
    return (ticket.run_id, ticket.worker, ticket.step, ticket.index)
