"""Faults that prove themselves and that nobody reported: found, and reported on chain.

A validator that signed two outcomes of one batch, a worker that signed two submissions for one
slot. The signatures are on chain (posted, shown, in claims and direct submissions) or in a copy of
the evidence; each is checked here before anything is sent. Nobody earns by a report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from muster.chain import BatchView
from muster.chain.doubles import (
    WITHHELD,
    Double,
    DoubleOutcome,
    DoubleSubmission,
    SignedRecords,
    SignedWork,
)
from muster.client.audit.evidence import EvidenceFolders
from muster.client.audit.ledger import Ledger
from muster.client.audit.work import outcome_signers, signer_of
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import keccak
from muster.protocol.errors import ContractRevert
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import OutcomeRecord, Outcomes, Submission

if TYPE_CHECKING:
    from muster.chain import Chain

SETTLED = "VaultOffenceSettled"
"""The vault's word that somebody else was first."""


@dataclass(frozen=True, slots=True)
class Reported:
    """A fault, and what came of its report."""

    fault: Double
    """What."""
    tx: str | None = None
    """The transaction that proved it; None without one."""
    refused: str | None = None
    """Why it could not be proven; None when it was, or nobody tried."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "offence": self.fault.offence.name.lower(),
            "account": self.fault.owner,
            "batch_id": self.fault.batch.batch_id,
            "words": self.fault.words,
            "tx": self.tx,
            "refused": self.refused,
        }


# Found


def find_faults(
    view: Ledger, domain: Domain, run_id: RunId, store: EvidenceFolders
) -> list[Double]:
    """Return the faults of a run that the chain or a copy of the evidence proves and that were not
    reported; `domain` is the ledger's.
    """
    settled = {(s.owner, s.offence, s.tag) for s in view.slashes if s.run_id == run_id}
    found: list[Double] = [
        *_double_outcomes(view, domain, run_id, store),
        *_double_submissions(view, domain, run_id, store),
    ]
    return [fault for fault in found if fault.filed not in settled]


def _double_outcomes(
    view: Ledger, domain: Domain, run_id: RunId, store: EvidenceFolders
) -> Iterator[DoubleOutcome]:
    seats = view.runs[run_id].seats
    for batch in view.batches.values():
        # The ledger forgets void batches: nothing can be proven about them.
        if batch.run_id != run_id or batch.is_void:
            continue
        # Posted outcomes alone contradict nothing: most signatures need not be recovered again.
        if not batch.shown and not store.has_outcomes(batch.batch_id):
            continue
        for who, said in _statements(batch, domain, store).items():
            if who in seats and len(said) > 1:
                first, second, *_ = (SignedRecords(*each) for each in said.items())
                yield DoubleOutcome(who, batch, first, second)


def _statements(
    batch: BatchView, domain: Domain, store: EvidenceFolders
) -> dict[Address, dict[Hash32, bytes]]:
    """Return what each validator signed about a batch, by the hash of its records; to have called
    it withheld before contradicts nothing.
    """
    said: dict[Address, dict[Hash32, bytes]] = defaultdict(dict)
    posted = batch.records_hash
    for who, signature in zip(outcome_signers(batch, domain), batch.signatures, strict=False):
        if who is not None and posted is not None:
            said[who][posted] = signature
    for shown, signatures in batch.shown.items():
        signed = Outcomes(batch.batch_id, batch.root, shown)
        for who, signature in signatures.items():
            if signer_of(domain, signed, signature) == who:
                said[who][shown] = signature
    for kept in store.outcomes(batch, []):
        if kept.is_signed(domain):
            said[kept.validator][keccak(kept.records)] = kept.signature
    for statements in said.values():
        statements.pop(WITHHELD, None)
    return said


Slot = tuple[Address, int, int]


def _double_submissions(
    view: Ledger, domain: Domain, run_id: RunId, store: EvidenceFolders
) -> Iterator[DoubleSubmission]:
    by_slot: dict[Slot, dict[Hash32, SignedWork]] = defaultdict(dict)
    for submission, signature in _signed(view, run_id, store):
        slot = (submission.worker, submission.step, submission.index)
        by_slot[slot][submission.struct_hash()] = SignedWork(submission, signature)
    doubles = {slot: signed for slot, signed in by_slot.items() if len(signed) > 1}
    if not doubles:
        return
    for batch in view.batches.values():
        if batch.run_id != run_id:
            continue
        for position, record in enumerate(batch.records or ()):
            worker = view.worker_by_id.get(record.worker_id)
            slot = (worker.address if worker else Address(""), record.step, record.index)
            pair = _pair(view, domain, batch, record, list(doubles.get(slot, {}).values()))
            if pair is not None:
                # Once is enough: the vault takes stake for a slot once.
                del doubles[slot]
                yield DoubleSubmission(batch, position, *pair)


def _pair(
    view: Ledger,
    domain: Domain,
    batch: BatchView,
    record: OutcomeRecord,
    signed: Sequence[SignedWork],
) -> tuple[SignedWork, SignedWork] | None:
    """Return the judged submission and another one, each signed by a node that answers for it."""
    answered = [
        each
        for each in signed
        if view.answers_for(
            batch, each.submission.worker, signer_of(domain, each.submission, each.signature)
        )
    ]
    judged = (record.policy_version, record.file_hash)
    for first in answered:
        others = [other for other in answered if other != first]
        if (first.submission.policy_version, first.submission.file_hash) == judged and others:
            return first, others[0]
    return None


def _signed(
    view: Ledger, run_id: RunId, store: EvidenceFolders
) -> Iterator[tuple[Submission, bytes]]:
    """Yield the submissions of a run that are on chain, or in a copy, with a signature."""
    for batch in view.batches.values():
        if batch.run_id == run_id and batch.work is not None:
            yield batch.work.submission, batch.work.node_signature
    for case in view.cases.values():
        if case.run_id == run_id:
            yield from ((claim.submission, claim.node_signature) for claim in case.claims)
    for entry in store.all_entries():
        if entry.submission.run_id == run_id:
            yield entry.submission, entry.signature


# Reported


async def report_faults(chain: Chain, faults: Sequence[Double]) -> list[Reported]:
    """Prove faults on chain, one transaction each; a refusal is noted, and the rest goes on."""
    reported = []
    for fault in faults:
        try:
            reported.append(Reported(fault, tx=(await fault.prove(chain.faults)).tx_hash))
        except ContractRevert as error:
            is_late = error.name == SETTLED
            why = "somebody else reported it meanwhile" if is_late else str(error)
            reported.append(Reported(fault, refused=why))
    return reported
