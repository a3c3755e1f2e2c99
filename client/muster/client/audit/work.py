"""What an auditor recomputes about the work: roots, signatures, deadlines, who could have done it.

Pure. Nothing here trusts what the ledger computed: it is derived again from the records.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from muster.chain import BatchView, ChainView, LeasedWork, RunTerms, WorkerStatus
from muster.client.audit import leaves
from muster.client.audit.contradictions import Check, Contradiction, Kind, summarise
from muster.client.audit.ledger import Ledger
from muster.client.audit.table import OutcomeTable
from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.errors import SignatureError
from muster.protocol.ids import Address, Hash32, PolicyVersion
from muster.protocol.jury import Ruling, summons_of
from muster.protocol.merkle import merkle_root
from muster.protocol.messages import Outcomes, Submission, Ticket, Verdict

VERDICTS_OF = {
    0: {Verdict.ACCEPTED},
    23: {Verdict.INCOMPLETE},
    **{reason: {Verdict.REJECTED} for reason in (10, 11, 12, 13, 14, 15, 16, 20, 21, 22)},
    **{reason: {Verdict.FRAUD} for reason in (30, 31, 32, 41, 50)},
    **{reason: {Verdict.REJECTED, Verdict.FRAUD} for reason in (33, 40, 60, 70)},
}
"""Verdicts that a reason can have: docs/protocol.md section 8."""


def events_follow(view: ChainView) -> Check:
    """Return whether the events make sense one after the other."""
    if isinstance(view, Ledger):
        found = view.disorder
    else:
        found = [Contradiction(Kind.EVENT_ORDER, problem) for problem in view.contradictions]
    return summarise("events follow from one another", found, f"up to block {view.block_number}")


# Roots


def batch_roots(view: ChainView, table: OutcomeTable) -> Check:
    """Return whether batches commit to what was judged, where events suffice to tell."""
    found: list[Contradiction] = []
    addresses = {number: worker.address for number, worker in view.worker_by_id.items()}
    proven = 0
    for batch, records_N in table.slices():
        if batch.direct is not None:
            claimed, units = [batch.direct.leaf()], batch.direct.units
        else:
            of_run = leaves.submission_leaves(batch.run_id, records_N, addresses)
            claimed, units = of_run or [], int(records_N["units"].sum(dtype=np.int64))
        all_accepted = bool((records_N["verdict"] == Verdict.ACCEPTED).all())
        must_hold = batch.direct is not None or all_accepted
        if claimed and merkle_root(claimed) == batch.root:
            proven += 1
            if must_hold and batch.units != units:
                what = f"{batch.units} units declared, its submissions claim {units}"
                found.append(_of(batch, Kind.BATCH_UNITS, what))
        elif claimed and must_hold:
            what = "the root does not commit to what was accepted"
            found.append(_of(batch, Kind.BATCH_ROOT, what))
    unproven = len(view.batches) - proven
    return summarise(
        "batch roots commit to the submissions that were judged",
        found,
        f"{proven} proven, {unproven} cannot be: claims that were not accepted, or not judged yet, "
        "are not on chain",
    )


def outcomes_roots(table: OutcomeTable) -> Check:
    """Return whether the outcomes roots are those of the records."""
    found = (
        _posted(batch, Kind.OUTCOMES_ROOT, "the records do not make up the outcomes root")
        for batch, records_N in table.slices()
        if merkle_root(leaves.outcome_leaves(batch.batch_id, records_N)) != batch.outcomes_root
    )
    return summarise(
        "outcomes roots follow from the records", found, f"{len(table.batches)} roots recomputed"
    )


# Signatures


def direct_submissions(view: ChainView, domain: Domain) -> Check:
    """Return whether workers themselves committed what they submitted directly."""
    direct = [(batch, batch.work) for batch in view.batches.values() if batch.work is not None]
    found = (
        _of(batch, Kind.DIRECT_SIGNATURE, problem)
        for batch, work in direct
        if (problem := _work_problem(view, batch, work, domain)) is not None
    )
    return summarise(
        "direct submissions are their worker's, under a ticket of the run",
        found,
        f"{len(direct)} submissions",
    )


def _work_problem(
    view: ChainView, batch: BatchView, work: LeasedWork, domain: Domain
) -> str | None:
    """Return what is wrong with work that its worker committed itself."""
    submission, ticket = work.submission, work.ticket
    worker = view.workers.get(submission.worker)
    signer = recovered(digest(domain, submission.struct_hash()), work.node_signature)
    if worker is None or signer not in {node for _, node in worker.nodes}:
        return "it is not signed by a node of its worker"
    if recovered(digest(domain, ticket.struct_hash()), work.ticket_signature) != batch.orchestrator:
        return "its ticket is not signed by the run's orchestrator"
    if _slot(ticket) != _slot(submission):
        return "its ticket is for another slot"
    return None


def _slot(signed: Submission | Ticket) -> tuple[int, ...]:
    return (signed.run_id, int(signed.worker, 16), signed.step, signed.index, signed.policy_version)


def signatures(view: ChainView, table: OutcomeTable, domain: Domain) -> Check:
    """Return whether a quorum of validators signed each batch's outcomes."""
    found = (
        contradiction
        for batch in table.batches
        for contradiction in _signature_problems(view, batch, domain)
    )
    count = sum(len(batch.signatures) for batch in table.batches)
    return summarise(
        "a quorum of the validators of that time signed every outcome",
        found,
        f"{count} signatures recovered",
    )


def _signature_problems(
    view: ChainView, batch: BatchView, domain: Domain
) -> Iterator[Contradiction]:
    if batch.work is not None and not batch.signatures:
        if not _is_ruled(view, batch):
            what = "nobody signed, and no jury of the network ruled so"
            yield _posted(batch, Kind.OUTCOME_QUORUM, what)
        return
    signers = outcome_signers(batch, domain)
    if None in signers:
        yield _posted(batch, Kind.OUTCOME_SIGNATURE, "a signature is malformed")
    valid = {signer for signer in signers if signer in batch.validators}
    for stranger in {signer for signer in signers if signer} - valid:
        yield _posted(batch, Kind.OUTCOME_STRANGER, f"{stranger} signed and was no validator")
    run = view.runs.get(batch.run_id)
    if run is not None and seats_of(valid, run.seats) != batch.signers:
        what = f"seats {batch.signers:#b} are recorded, not those of who signed"
        yield _posted(batch, Kind.OUTCOME_SIGNATURE, what)
    terms = terms_of_batch(view, batch)
    quorum = terms.quorum if terms else 1
    if len(valid) < quorum:
        what = f"{len(valid)} validators signed, the quorum is {quorum}"
        yield _posted(batch, Kind.OUTCOME_QUORUM, what)


def seats_of(accounts: Collection[Address], seats: Mapping[Address, int]) -> int:
    """Return the bits of some accounts' seats, joined."""
    return sum(bit for who, bit in seats.items() if who in accounts)


def _is_ruled(view: ChainView, batch: BatchView) -> bool:
    """Return whether judges of the network decided about work that its run left unjudged."""
    case = view.cases.get(summons_of(batch.batch_id))
    if case is None or not case.closed or not batch.records:
        return False
    (record,) = batch.records
    return case.ruling == Ruling(record.verdict, record.reason).number


def terms_of_batch(view: ChainView, batch: BatchView) -> RunTerms | None:
    """Return the run's terms by which a batch is paid, judged and punished; None if not known."""
    run = view.runs.get(batch.run_id)
    known = run.terms[batch.terms - 1 : batch.terms] if run is not None and batch.terms else []
    return known[0] if known else None


def outcome_signers(batch: BatchView, domain: Domain) -> list[Address | None]:
    """Return who signed a batch's outcomes, None for each signature that recovers to nobody."""
    if batch.records_hash is None:
        return []
    message = Outcomes(batch.batch_id, batch.root, batch.records_hash)
    hashed = digest(domain, message.struct_hash())
    return [recovered(hashed, signature) for signature in batch.signatures]


def recovered(hashed: Hash32, signature: bytes) -> Address | None:
    """Return who signed, None for a signature that recovers to nobody."""
    try:
        return recover(hashed, signature)
    except SignatureError:
        return None


# Records


def deadlines(table: OutcomeTable, deadline_s: int | None) -> Check:
    """Return whether outcomes came in time, and hold what their batch declared."""
    found = (
        contradiction
        for batch, records_N in table.slices()
        for contradiction in _posting_problems(
            batch, int(records_N["units"].sum(dtype=np.int64)), deadline_s
        )
    )
    known = f"within {deadline_s} s" if deadline_s is not None else "the deadline is not known"
    return summarise(
        "outcomes were posted in time, for no more units than declared",
        found,
        f"{len(table.batches)} batches, {known}",
    )


def _posting_problems(
    batch: BatchView, units: int, deadline_s: int | None
) -> Iterator[Contradiction]:
    posted_at, is_run = batch.posted_at or 0, bool(batch.signatures)
    if is_run and deadline_s is not None and posted_at >= batch.committed_at + deadline_s:
        late = f"posted {posted_at - batch.committed_at} s after the commitment, due {deadline_s}"
        yield _posted(batch, Kind.OUTCOME_DEADLINE, late)
    if units > batch.units:
        what = f"its records hold {units} units, it was committed for {batch.units}"
        yield _posted(batch, Kind.OUTCOME_UNITS, what)


def reasons(table: OutcomeTable) -> Check:
    """Return whether every reason has a verdict that its check gives."""
    allowed = np.zeros((256, 5), bool)
    for reason, verdicts in VERDICTS_OF.items():
        allowed[reason, list(verdicts)] = True
    rows = np.flatnonzero(~allowed[table.records_N["reason"], table.records_N["verdict"]])
    found = (_at(table, int(row), Kind.OUTCOME_REASON, _pair(table, int(row))) for row in rows)
    return summarise("verdicts are those of their reasons' checks", found, f"{len(table)} outcomes")


def _pair(table: OutcomeTable, row: int) -> str:
    record = table.record(row)
    return f"verdict {record.verdict.name.lower()} for reason {record.reason.name}"


def accepted_records(view: ChainView, table: OutcomeTable) -> Check:
    """Return whether accepted work could be done at all: by whom, with which policy."""
    rows_A = np.flatnonzero(table.is_verdict(Verdict.ACCEPTED))
    workers_A = table.column("worker_id")[rows_A]
    committed_A = table.of_batches([b.block_number for b in table.batches])[rows_A]
    published_A = _publication_blocks(view, table, rows_A)
    unknown = _per_worker(view, workers_A, "worker_id") < 0
    unpublished = (published_A < 0) | (published_A > committed_A)
    inactive = _was_inactive(view, workers_A, table.run_N()[rows_A], committed_A)
    found = (
        _at(table, row, *_unfounded(table, row, bool(unknown[i]), bool(unpublished[i])))
        for i in np.flatnonzero(unknown | unpublished | inactive)
        for row in [int(rows_A[i])]
    )
    return summarise(
        "accepted work is by members of the run, for policies that were published",
        found,
        f"{len(table)} outcomes",
    )


def _unfounded(
    table: OutcomeTable, row: int, is_unknown: bool, is_unpublished: bool
) -> tuple[Kind, str]:
    record = table.record(row)
    if is_unknown:
        return Kind.WORKER_UNKNOWN, f"worker {record.worker_id} does not exist"
    if is_unpublished:
        what = f"policy {record.policy_version} was not published when it was committed"
        return Kind.POLICY_UNPUBLISHED, what
    what = f"worker {record.worker_id} was not active in its run"
    return Kind.WORKER_INACTIVE, what


def _publication_blocks(
    view: ChainView, table: OutcomeTable, rows_A: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the block that published each row's policy, -1 where none did."""
    versions_A, runs_A = table.column("policy_version")[rows_A], table.run_N()[rows_A]
    blocks_A = np.full(len(rows_A), -1, np.int64)
    for run_id in np.unique(runs_A).tolist():
        run = view.runs.get(run_id)
        of_run = np.flatnonzero(runs_A == run_id)
        versions, place = np.unique(versions_A[of_run], return_inverse=True)
        published = [
            run.checkpoints[PolicyVersion(version)].block_number
            if run and version in run.checkpoints
            else -1
            for version in versions.tolist()
        ]
        blocks_A[of_run] = np.array(published, np.int64)[place]
    return blocks_A


def _per_worker(view: ChainView, workers_A: NDArray[np.int64], name: str) -> NDArray[np.int64]:
    """Return a number of each row's worker, -1 where there is no such worker."""
    numbers, place = np.unique(workers_A, return_inverse=True)
    values = [
        int(getattr(worker, name)) if (worker := view.worker_by_id.get(number)) else -1
        for number in numbers.tolist()
    ]
    return np.array(values, np.int64)[place] if len(numbers) else np.zeros(0, np.int64)


def _was_inactive(
    view: ChainView,
    workers_A: NDArray[np.int64],
    runs_A: NDArray[np.int64],
    committed_A: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return where the worker was no active member when the block of the commitment began."""
    inactive_A = np.zeros(len(workers_A), bool)
    for number in np.unique(workers_A).tolist():
        worker, of_worker = view.worker_by_id.get(number), workers_A == number
        for run_id in np.unique(runs_A[of_worker]).tolist():
            rows = np.flatnonzero(of_worker & (runs_A == run_id))
            member = worker.memberships.get(run_id) if worker else None
            if member is None:
                inactive_A[rows] = True
                continue
            inactive_A[rows] = committed_A[rows] < member.first_active_from
            if len(member.standings) > 1:
                for i in rows.tolist():
                    status = member.status_at(int(committed_A[i]) - 1)
                    inactive_A[i] |= status is not WorkerStatus.ACTIVE
    return inactive_A


# Where


def _of(batch: BatchView, kind: Kind, detail: str) -> Contradiction:
    """Return what is wrong with a commitment."""
    return Contradiction(
        kind, detail, tx=batch.tx_hash, block=batch.block_number, batch_id=batch.batch_id
    )


def _posted(batch: BatchView, kind: Kind, detail: str) -> Contradiction:
    """Return what is wrong with the posting of outcomes."""
    return Contradiction(
        kind, detail, tx=batch.posted_tx, block=batch.posted_block, batch_id=batch.batch_id
    )


def _at(table: OutcomeTable, row: int, kind: Kind, detail: str) -> Contradiction:
    """Return what is wrong with one outcome."""
    batch, position = table.place(row)
    return Contradiction(
        kind,
        detail,
        tx=batch.posted_tx,
        block=batch.posted_block,
        batch_id=batch.batch_id,
        position=position,
    )
