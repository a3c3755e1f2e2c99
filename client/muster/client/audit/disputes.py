"""What an auditor recomputes about disputes: who judged them, and what stands. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from muster.chain import CaseView, ChainView
from muster.client.audit.contradictions import Check, Contradiction, Kind, summarise
from muster.client.audit.work import outcome_signers
from muster.protocol.eip712 import Domain


def cases(view: ChainView, domain: Domain) -> Check:
    """Return whether disputes were decided by those who may."""
    found = (
        Contradiction(
            kind,
            detail,
            tx=case.closed_tx if kind is Kind.CASE_VERDICT else case.opened_tx,
            batch_id=case.batch_id,
            position=case.position,
        )
        for case in view.cases.values()
        for kind, detail in _case_problems(view, case, domain)
    )
    still_open = sum(not case.closed for case in view.cases.values())
    return summarise(
        "disputes were decided by validators that had not signed",
        found,
        f"{len(view.cases)} cases, {still_open} open",
    )


def _case_problems(view: ChainView, case: CaseView, domain: Domain) -> Iterator[tuple[Kind, str]]:
    batch = view.batches.get(case.batch_id)
    if batch is None or not batch.records or case.position >= len(batch.records):
        yield Kind.CASE_UNFOUNDED, "the case is about no outcome"
        return
    record = batch.records[case.position]
    if record.leaf(case.batch_id, case.position) != case.leaf:
        yield Kind.CASE_UNFOUNDED, "the case's leaf is not that of the outcome"
    for juror in set(case.votes) & set(outcome_signers(batch, domain)):
        yield Kind.CASE_JUROR, f"{juror} voted on an outcome it had signed"
    if case.closed and case.verdict != view.standing_verdict(case.batch_id, case.position):
        yield Kind.CASE_VERDICT, f"the case was closed with verdict {case.verdict}"
