"""What an auditor recomputes about the work: roots, signatures, who could have done it. Pure.

Nothing here trusts what the ledger computed: it is derived again from the records and compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from muster.chain import BatchView, CaseView, ChainView
from muster.client.audit_checks import Check, Judged, judged_outcomes, summarise
from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.errors import SignatureError
from muster.protocol.ids import Address, Hash32
from muster.protocol.merkle import merkle_root
from muster.protocol.messages import OutcomeRecord, Outcomes, Submission, Verdict


def events_follow(view: ChainView) -> Check:
    """Return whether the events make sense one after the other."""
    return summarise(
        "events follow from one another",
        view.contradictions,
        f"up to block {view.block_number or 0}",
    )


def batch_roots(view: ChainView) -> Check:
    """Return whether batches commit to what was judged, where events suffice to tell."""
    problems, proven, unproven = [], 0, 0
    for batch in view.batches.values():
        leaves = submission_leaves(view, batch)
        if leaves is not None and merkle_root(leaves) == batch.root:
            proven += 1
            if _must_be_proven(batch) and batch.units != _claimed_units(batch):
                problems.append(
                    f"batch {batch.batch_id} claims {batch.units} units, its submissions "
                    f"{_claimed_units(batch)} ({batch.tx_hash})"
                )
        elif leaves is not None and _must_be_proven(batch):
            problems.append(
                f"batch {batch.batch_id} does not commit to what was accepted ({batch.tx_hash})"
            )
        else:
            unproven += 1
    return summarise(
        "batch roots commit to the submissions that were judged",
        problems,
        f"{proven} proven, {unproven} cannot be: claims that were not accepted, or not judged yet, "
        "are not on chain",
    )


def submission_leaves(view: ChainView, batch: BatchView) -> list[Hash32] | None:
    """Return the leaves that a batch must have if its records repeat the claims, or None.

    An accepted record does: rollouts and units that differ from the claim are not accepted.
    """
    if batch.direct is not None:
        return [batch.direct.leaf()]
    leaves = []
    for record in batch.records or ():
        worker = view.worker_by_id.get(record.worker_id)
        if worker is None:
            return None
        leaves.append(_claimed(batch, worker.address, record).leaf())
    return leaves or None


def _claimed(batch: BatchView, worker: Address, record: OutcomeRecord) -> Submission:
    return Submission(
        run_id=batch.run_id,
        worker=worker,
        step=record.step,
        index=record.index,
        policy_version=record.policy_version,
        file_hash=record.file_hash,
        rollouts=record.rollouts,
        units=record.units,
    )


def _must_be_proven(batch: BatchView) -> bool:
    records = batch.records or ()
    return batch.direct is not None or all(r.verdict is Verdict.ACCEPTED for r in records)


def _claimed_units(batch: BatchView) -> int:
    if batch.direct is not None:
        return batch.direct.units
    return sum(record.units for record in batch.records or ())


def direct_submissions(view: ChainView, domain: Domain) -> Check:
    """Return whether workers themselves committed what they submitted directly."""
    problems, count = [], 0
    for batch in view.batches.values():
        if batch.direct is None:
            continue
        count += 1
        signer = _recovered(digest(domain, batch.direct.struct_hash()), batch.direct_signature)
        worker = view.workers.get(batch.direct.worker)
        if worker is None or signer not in {node for _, node in worker.nodes}:
            problems.append(f"batch {batch.batch_id} is not signed by a node of its worker")
    return summarise(
        "direct submissions are signed by their worker's node", problems, f"{count} submissions"
    )


def outcomes_roots(view: ChainView) -> Check:
    """Return whether the outcomes roots are those of the records."""
    problems, count = [], 0
    for batch in view.batches.values():
        if not batch.records:
            continue
        count += 1
        leaves = [record.leaf(batch.batch_id, i) for i, record in enumerate(batch.records)]
        if merkle_root(leaves) != batch.outcomes_root:
            problems.append(
                f"the records of batch {batch.batch_id} do not make up its outcomes root "
                f"({batch.posted_tx})"
            )
    return summarise(
        "outcomes roots follow from the records", problems, f"{count} roots recomputed"
    )


def signatures(view: ChainView, domain: Domain) -> Check:
    """Return whether a quorum of validators signed each batch's outcomes."""
    problems, count = [], 0
    for batch in view.batches.values():
        if batch.records is None:
            continue
        count += len(batch.signatures)
        problems += [
            f"batch {batch.batch_id}: {problem} ({batch.posted_tx})"
            for problem in _signature_problems(view, batch, domain)
        ]
    return summarise(
        "a quorum of the validators of that time signed every outcome",
        problems,
        f"{count} signatures recovered",
    )


def _signature_problems(view: ChainView, batch: BatchView, domain: Domain) -> Iterator[str]:
    signers = outcome_signers(batch, domain)
    if None in signers:
        yield "a signature is malformed"
    valid = {signer for signer in signers if signer in batch.validators}
    for stranger in {signer for signer in signers if signer} - valid:
        yield f"{stranger} signed and was no validator"
    run = view.runs.get(batch.run_id)
    quorum = run.config.terms.quorum if run else 1
    if len(valid) < quorum:
        yield f"{len(valid)} validators signed, the quorum is {quorum}"


def outcome_signers(batch: BatchView, domain: Domain) -> list[Address | None]:
    """Return who signed a batch's outcomes, None for each signature that recovers to nobody."""
    if batch.records_hash is None:
        return []
    message = Outcomes(batch.batch_id, batch.root, batch.records_hash)
    hashed = digest(domain, message.struct_hash())
    return [_recovered(hashed, signature) for signature in batch.signatures]


def _recovered(hashed: Hash32, signature: bytes) -> Address | None:
    try:
        return recover(hashed, signature)
    except SignatureError:
        return None


def accepted_records(view: ChainView) -> Check:
    """Return whether accepted work could be done at all: by whom, with which policy."""
    problems, count = [], 0
    for outcome in judged_outcomes(view):
        count += 1
        if outcome.verdict is Verdict.ACCEPTED and (problem := _unfounded(view, outcome)):
            problems.append(
                f"batch {outcome.batch.batch_id} position {outcome.position}: {problem}"
            )
    return summarise(
        "accepted work is by registered workers, for policies that were published",
        problems,
        f"{count} outcomes",
    )


def _unfounded(view: ChainView, outcome: Judged) -> str | None:
    """Return why an accepted outcome cannot be, or None."""
    batch, record = outcome.batch, outcome.record
    worker = view.worker_by_id.get(record.worker_id)
    if worker is None:
        return f"worker {record.worker_id} does not exist"
    run = view.runs.get(batch.run_id)
    checkpoint = run.checkpoints.get(record.policy_version) if run else None
    if checkpoint is None or checkpoint.block_number > batch.block_number:
        return f"policy {record.policy_version} was not published when it was committed"
    if worker.first_active_from > checkpoint.block_number:
        return f"worker {record.worker_id} was not active yet for policy {record.policy_version}"
    return None


def cases(view: ChainView, domain: Domain) -> Check:
    """Return whether disputes were decided by those who may."""
    problems = [
        f"case about batch {case.batch_id} position {case.position}: {problem} ({case.opened_tx})"
        for case in view.cases.values()
        for problem in _case_problems(view, case, domain)
    ]
    still_open = sum(not case.closed for case in view.cases.values())
    return summarise(
        "disputes were decided by validators that had not signed",
        problems,
        f"{len(view.cases)} cases, {still_open} open",
    )


def _case_problems(view: ChainView, case: CaseView, domain: Domain) -> Iterator[str]:
    batch = view.batches.get(case.batch_id)
    if batch is None or not batch.records or case.position >= len(batch.records):
        yield "it is about no outcome"
        return
    record = batch.records[case.position]
    if record.leaf(case.batch_id, case.position) != case.leaf:
        yield "its leaf is not that of the outcome"
    for juror in set(case.votes) & set(outcome_signers(batch, domain)):
        yield f"{juror} voted on an outcome it had signed"
    if case.closed and case.verdict != view.standing_verdict(case.batch_id, case.position):
        yield f"it was closed with verdict {case.verdict}"
