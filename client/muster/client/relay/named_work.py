"""The work that a relay keeps files of for judges: what the chain names with a bond behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.chain import BatchStatus, BatchView, ChainView, Event
from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.errors import SignatureError
from muster.protocol.ids import Hash32, RunId
from muster.protocol.messages import Submission

if TYPE_CHECKING:
    pass


class NamedWork:
    """Work with a bond on chain: unjudged work that its worker committed by itself, and work that
    open cases are about.
    """

    def __init__(self, view: ChainView, run_id: RunId, domain: Domain) -> None:
        self._view = view
        self._run_id = run_id
        self._domain = domain
        self._named: dict[Hash32, tuple[Submission, BatchView]] = {}
        self._files: set[Hash32] = set()
        self._deadlines: dict[Hash32, int] = {}

    async def on_change(self, _events: list[Event]) -> None:
        """Take note of what the chain says now."""
        named = {
            batch.direct.leaf(): (batch.direct, batch)
            for batch in self._view.batches.values()
            if batch.direct is not None
            and batch.run_id == self._run_id
            and batch.status is not BatchStatus.JUDGED
            and not batch.is_void
        }
        for case in self._view.cases.values():
            if case.run_id == self._run_id and not case.closed:
                for claim in case.claims:
                    work = (claim.submission, self._view.batches[case.batch_id])
                    named[claim.submission.leaf()] = work
        self._named = named
        self._files = {submission.file_hash for submission, _ in named.values()}
        self._deadlines = {leaf: at for leaf, at in self._deadlines.items() if leaf in named}

    def names_file(self, name: Hash32) -> bool:
        """Return whether a file is of work with a bond behind it."""
        return name in self._files

    def names_work(self, leaf: Hash32) -> bool:
        """Return whether work has a bond behind it."""
        return leaf in self._named

    def work_fault(self, leaf: Hash32, document: bytes) -> str | None:
        """Return why a document does not prove that work, None when it does. Without this check
        somebody who is faster could store false proofs, and judges would not get the right ones.
        """
        from pydantic import ValidationError

        from muster.api import BatchEntry
        from muster.client.tickets import slot_and_policy, ticket_signer

        submission, batch = self._named[leaf]
        try:
            entry = BatchEntry.model_validate_json(document)
        except ValidationError:
            return "it does not parse"
        if entry.submission.leaf() != leaf:
            return "it is another submission"
        if entry.ticket is None or entry.ticket_signature is None:
            return "there is no ticket"
        if ticket_signer(entry.ticket, entry.ticket_signature, self._domain) != batch.orchestrator:
            return "the ticket is not the run's orchestrator's"
        if slot_and_policy(entry.ticket) != slot_and_policy(submission):
            return "the ticket is for another slot or policy"
        try:
            signer = recover(digest(self._domain, submission.struct_hash()), entry.signature)
        except SignatureError:
            return "its signature is malformed"
        worker = self._view.workers.get(submission.worker)
        if worker is None or signer not in {node for _, node in worker.nodes}:
            return "it is not signed by the worker's node"
        if entry.ticket.deadline < self._deadlines.get(leaf, 0):
            # One slot may have had several tickets; work must not become late by an earlier one.
            return "it is here with a ticket of a later deadline"
        self._deadlines[leaf] = entry.ticket.deadline
        return None
