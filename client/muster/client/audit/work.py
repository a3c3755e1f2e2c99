"""What an auditor recomputes about the work: roots, signatures, deadlines, who could have done it.

Pure. Results that the ledger contract computed are not trusted but derived from the records.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from muster.chain import BatchStatus, BatchView, LeasedWork, MemberView, WorkerStatus
from muster.chain.doubles import WITHHELD
from muster.client.audit.contradictions import (
    Check,
    Contradiction,
    Kind,
    at_commitment,
    at_outcomes,
    summarise,
)
from muster.client.audit.ledger import Ledger
from muster.client.audit.outcome_table import (
    OutcomeTable,
    at_row,
    outcome_leaves,
    submission_leaves,
)
from muster.protocol.eip712 import Domain, signer_of
from muster.protocol.ids import Address, PolicyVersion, RunId
from muster.protocol.jury import Ruling, summons_of
from muster.protocol.merkle import batch_root, merkle_root
from muster.protocol.messages import Outcomes, Reason, Submission, Ticket, Verdict
from muster.protocol.reasons import verdicts_of


def events_follow(view: Ledger) -> Check:
    """Return whether every event follows from those before it."""
    return summarise(
        "events follow from one another", view.disorder, f"up to block {view.block_number}"
    )


# Roots


def batch_roots(view: Ledger, table: OutcomeTable) -> Check:
    """Return whether batches commit to the judged submissions, as far as events can tell."""
    found: list[Contradiction] = []
    addresses = {number: worker.address for number, worker in view.worker_by_id.items()}
    proven = 0
    for batch, records_N in table.slices():
        if batch.direct is not None:
            claimed, units = [batch.direct.leaf()], batch.direct.units
        else:
            of_run = submission_leaves(batch.run_id, records_N, addresses)
            claimed, units = of_run or [], int(records_N["units"].sum(dtype=np.int64))
        all_accepted = bool((records_N["verdict"] == Verdict.ACCEPTED).all())
        must_hold = batch.direct is not None or all_accepted
        if claimed and batch_root(claimed) == batch.root:
            proven += 1
            if must_hold and batch.units != units:
                what = f"{batch.units} units declared, its submissions claim {units}"
                found.append(at_commitment(batch, Kind.BATCH_UNITS, what))
        elif claimed and must_hold:
            what = "the root does not commit to what was accepted"
            found.append(at_commitment(batch, Kind.BATCH_ROOT, what))
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
        at_outcomes(batch, Kind.OUTCOMES_ROOT, "the records do not make up the outcomes root")
        for batch, records_N in table.slices()
        if merkle_root(outcome_leaves(batch.batch_id, records_N)) != batch.outcomes_root
    )
    return summarise(
        "outcomes roots follow from the records", found, f"{len(table.batches)} roots recomputed"
    )


# Signatures


def direct_submissions(view: Ledger, domain: Domain) -> Check:
    """Return whether directly committed, or taken out, work is signed by its worker's node."""
    own = [(batch, batch.work) for batch in view.batches.values() if batch.work is not None]
    found = (
        at_commitment(batch, Kind.DIRECT_SIGNATURE, problem)
        for batch, work in own
        if (problem := _work_problem(view, batch, work, domain)) is not None
    )
    return summarise(
        "direct submissions are their worker's, under a ticket of the run",
        found,
        f"{len(own)} submissions",
    )


def _work_problem(view: Ledger, batch: BatchView, work: LeasedWork, domain: Domain) -> str | None:
    """Return what is wrong with work that its worker committed itself."""
    submission, ticket = work.submission, work.ticket
    node = signer_of(domain, submission, work.node_signature)
    if not view.answers_for(batch, submission.worker, node):
        return "it is not signed by a node of its worker"
    if batch.split_from is not None:
        # The run's orchestrator had committed it, so the ledger requires no ticket.
        return None
    if signer_of(domain, ticket, work.ticket_signature) != batch.orchestrator:
        return "its ticket is not signed by the run's orchestrator"
    if _slot(ticket) != _slot(submission):
        return "its ticket is for another slot"
    return None


def _slot(signed: Submission | Ticket) -> tuple[int, ...]:
    return (signed.run_id, int(signed.worker, 16), signed.step, signed.index, signed.policy_version)


def commitments(view: Ledger) -> Check:
    """Return whether batches name terms of their run, and work taken out of them counts once."""
    found = [
        at_commitment(batch, kind, detail)
        for batch in view.batches.values()
        for kind, detail in _commitment_problems(view, batch)
    ]
    taken: set[tuple[int, ...]] = set()
    for batch in view.batches.values():
        if batch.direct is not None:
            # A worker may commit a slot itself only once, whatever the policy.
            slot = _slot(batch.direct)[:-1]
            if slot in taken:
                found.append(at_commitment(batch, Kind.BATCH_SPLIT, "its slot was brought before"))
            taken.add(slot)
    split = sum(batch.split_from is not None for batch in view.batches.values())
    return summarise(
        "batches are committed under terms of their run, and share no submission",
        found,
        f"{len(view.batches)} batches, {split} of them taken out of others",
    )


def _commitment_problems(view: Ledger, batch: BatchView) -> Iterator[tuple[Kind, str]]:
    terms = view.terms_of(batch)
    if terms is None or terms.price_per_unit != batch.price_per_unit:
        yield Kind.BATCH_TERMS, f"its price is not that of terms {batch.terms} of its run"
    if batch.split_from is not None:
        yield from _split_problems(view, batch, batch.split_from)
    elif (known := view.terms_then.get(batch.batch_id)) != batch.terms:
        yield Kind.BATCH_TERMS, f"it names terms {batch.terms}, its run's were {known}"
    if batch.units < 0:
        yield Kind.BATCH_SPLIT, "more units were taken out of it than it holds"


def _split_problems(view: Ledger, batch: BatchView, source_id: int) -> Iterator[tuple[Kind, str]]:
    """Yield what is wrong with a submission that its worker took out of a batch."""
    source, own = view.batches.get(source_id), batch.direct
    if source is None or own is None:
        yield Kind.BATCH_SPLIT, f"it was taken out of batch {source_id}, which is not there"
        return
    theirs = (source.run_id, source.price_per_unit, source.terms, source.committed_at)
    if (batch.run_id, batch.price_per_unit, batch.terms, batch.committed_at) != theirs:
        yield Kind.BATCH_SPLIT, f"its run, price, terms or time are not those of batch {source_id}"
    if (batch.root, batch.count, batch.units) != (own.leaf(), 1, own.units):
        yield Kind.BATCH_SPLIT, "it is not one submission with its units"
    if source.records is not None:
        yield Kind.BATCH_SPLIT, f"batch {source_id}, which it was taken out of, has outcomes"


def signatures(view: Ledger, table: OutcomeTable, domain: Domain) -> Check:
    """Return whether a quorum of validators or a jury decided every outcome, and a quorum signed
    that each withheld batch is withheld.
    """
    withheld = [batch for batch in view.batches.values() if _has_withheld_word(batch)]
    found = (
        contradiction
        for batch in (*table.batches, *withheld)
        for contradiction in _signature_problems(view, batch, domain)
    )
    count = sum(len(batch.signatures) for batch in (*table.batches, *withheld))
    return summarise(
        "a quorum of the validators of that time signed every outcome",
        found,
        f"{count} signatures recovered, {len(withheld)} batches withheld",
    )


def _has_withheld_word(batch: BatchView) -> bool:
    # A submission taken out of such a batch has no signatures of its own; other views keep none.
    return batch.status is BatchStatus.WITHHELD and batch.records_hash == WITHHELD


def _signature_problems(view: Ledger, batch: BatchView, domain: Domain) -> Iterator[Contradiction]:
    if batch.records is not None and not batch.signers and not batch.signatures:
        if (problem := _ruling_problem(view, batch)) is not None:
            yield at_outcomes(batch, Kind.OUTCOME_QUORUM, problem)
        return
    signers = outcome_signers(batch, domain)
    if None in signers:
        yield at_outcomes(batch, Kind.OUTCOME_SIGNATURE, "a signature is malformed")
    valid = {signer for signer in signers if signer in batch.validators}
    for stranger in {signer for signer in signers if signer} - valid:
        yield at_outcomes(batch, Kind.OUTCOME_STRANGER, f"{stranger} signed and was no validator")
    run = view.runs.get(batch.run_id)
    if run is not None and sum(run.seats.get(who, 0) for who in valid) != batch.signers:
        what = f"seats {batch.signers:#b} are recorded, not those of who signed"
        yield at_outcomes(batch, Kind.OUTCOME_SIGNATURE, what)
    terms = view.terms_of(batch)
    quorum = terms.quorum if terms else 1
    if len(valid) < quorum:
        what = f"{len(valid)} validators signed, the quorum is {quorum}"
        yield at_outcomes(batch, Kind.OUTCOME_QUORUM, what)


def _ruling_problem(view: Ledger, batch: BatchView) -> str | None:
    """Return what is wrong with an outcome that no validator signed: a jury must have ruled it."""
    case, records = view.cases.get(summons_of(batch.batch_id)), list(batch.records or ())
    if case is None or not case.overturned or len(records) != 1 or not case.claims:
        return "nobody signed, and no jury of the network ruled so"
    (record,), own = records, case.claims[0].submission
    if own.leaf() != batch.root:
        return "the jury was shown other work"
    claimed = (own.step, own.index, own.policy_version, own.file_hash, own.rollouts, own.units)
    judged = (record.step, record.index, record.policy_version, record.file_hash)
    if (*judged, record.rollouts, record.units) != claimed:
        return "the outcome is not about the work that was brought before the jury"
    if Ruling(record.verdict, record.reason).number != case.ruling:
        return "the outcome is not the jury's ruling"
    return None


def outcome_signers(batch: BatchView, domain: Domain) -> list[Address | None]:
    """Return who signed a batch's outcomes, None for each signature that recovers to nobody."""
    if batch.records_hash is None:
        return []
    message = Outcomes(batch.batch_id, batch.root, batch.records_hash)
    return [signer_of(domain, message, signature) for signature in batch.signatures]


# Records


def deadlines(table: OutcomeTable, deadline_s: int) -> Check:
    """Return whether outcomes came in time, with no more units than their batch declared."""
    found = (
        contradiction
        for batch, records_N in table.slices()
        for contradiction in _posting_problems(
            batch, int(records_N["units"].sum(dtype=np.int64)), deadline_s
        )
    )
    return summarise(
        "outcomes were posted in time, for no more units than declared",
        found,
        f"{len(table.batches)} batches, within {deadline_s} s",
    )


def _posting_problems(batch: BatchView, units: int, deadline_s: int) -> Iterator[Contradiction]:
    posted_at, is_run = batch.posted_at or 0, bool(batch.signers)
    if is_run and posted_at >= batch.committed_at + deadline_s:
        late = f"posted {posted_at - batch.committed_at} s after the commitment, due {deadline_s}"
        yield at_outcomes(batch, Kind.OUTCOME_DEADLINE, late)
    if units > batch.units:
        what = f"its records hold {units} units, it was committed for {batch.units}"
        yield at_outcomes(batch, Kind.OUTCOME_UNITS, what)


def reasons(table: OutcomeTable) -> Check:
    """Return whether every reason comes with a verdict that its check can give."""
    allowed = np.zeros((256, 5), bool)
    for reason in Reason:
        allowed[reason, list(verdicts_of(reason))] = True
    rows = np.flatnonzero(~allowed[table.records_N["reason"], table.records_N["verdict"]])
    found = (at_row(table, row, Kind.OUTCOME_REASON, _pair(table, row)) for row in rows.tolist())
    return summarise("verdicts are those of their reasons' checks", found, f"{len(table)} outcomes")


def _pair(table: OutcomeTable, row: int) -> str:
    record = table.record(row)
    return f"verdict {record.verdict.name.lower()} for reason {record.reason.name}"


def accepted_records(view: Ledger, table: OutcomeTable) -> Check:
    """Return whether accepted work was possible: its worker was active, its policy published."""
    rows_A = np.flatnonzero(table.is_verdict(Verdict.ACCEPTED))
    committed_A = table.of_batches([b.work_block for b in table.batches])[rows_A]
    published_A = _publication_blocks(view, table, rows_A)
    unpublished = (published_A < 0) | (published_A > committed_A)
    unknown, inactive = _strangers(view, table, rows_A, committed_A)
    found = (
        at_row(table, row, *_unfounded(table, row, bool(unknown[i]), bool(unpublished[i])))
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
        return Kind.WORKER_UNKNOWN, f"worker {record.worker_id} never joined its run"
    if is_unpublished:
        what = f"policy {record.policy_version} was not published when it was committed"
        return Kind.POLICY_UNPUBLISHED, what
    what = f"worker {record.worker_id} was not active in its run"
    return Kind.WORKER_INACTIVE, what


def _publication_blocks(
    view: Ledger, table: OutcomeTable, rows_A: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the block that published each row's policy, -1 if none did."""
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


def _strangers(
    view: Ledger,
    table: OutcomeTable,
    rows_A: NDArray[np.int64],
    committed_A: NDArray[np.int64],
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return per row whether the worker is no member of the run, and whether it was not active at
    the start of the commitment's block.
    """
    pairs, place_A = np.unique(table.member_N()[rows_A], return_inverse=True)
    members = [_member_of(view, pair) for pair in pairs.tolist()]
    joined = np.array([member.joined_block if member else -1 for member in members], np.int64)
    joined_A = joined[place_A] if len(members) else np.zeros(0, np.int64)
    unknown_A, inactive_A = joined_A < 0, committed_A <= joined_A
    by_pair_A = np.argsort(place_A, kind="stable")
    ends = np.searchsorted(place_A[by_pair_A], np.arange(len(members)), side="right").tolist()
    for begin, end, member in zip([0, *ends], ends, members, strict=False):
        if member is not None and member.standings[1:]:
            for i in by_pair_A[begin:end].tolist():
                status = member.status_at(int(committed_A[i]) - 1)
                inactive_A[i] = status is not WorkerStatus.ACTIVE
    return unknown_A, inactive_A


def _member_of(view: Ledger, pair: int) -> MemberView | None:
    """Return a member by its `run << 32 | worker`."""
    worker = view.worker_by_id.get(pair & 0xFFFFFFFF)
    return worker.memberships.get(RunId(pair >> 32)) if worker else None
