"""What an auditor recomputes about disputes: who judged them, and what stands. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from muster.chain import CaseView, ChainView
from muster.client.audit.contradictions import Check, Contradiction, Kind, summarise
from muster.protocol.jury import Ruling, summons_of


def cases(view: ChainView) -> Check:
    """Return whether disputes were decided by those who may, and what they voted stands."""
    found = (
        Contradiction(
            kind,
            detail,
            tx=case.closed_tx if kind is Kind.CASE_VERDICT else case.opened_tx,
            batch_id=case.batch_id,
            position=case.position,
        )
        for case in view.cases.values()
        for kind, detail in _case_problems(view, case)
    )
    still_open = sum(not case.closed for case in view.cases.values())
    return summarise(
        "disputes were decided by jurors of the network",
        found,
        f"{len(view.cases)} cases, {still_open} open",
    )


def _case_problems(view: ChainView, case: CaseView) -> Iterator[tuple[Kind, str]]:
    batch = view.batches.get(case.batch_id)
    if batch is None or batch.run_id != case.run_id:
        yield Kind.CASE_UNFOUNDED, f"the case is about no batch of run {case.run_id}"
        return
    if case.is_summons:
        if case.case_id != summons_of(case.batch_id):
            yield Kind.CASE_UNFOUNDED, "the case's name is not that of the batch"
    elif not batch.records or case.position >= len(batch.records):
        yield Kind.CASE_UNFOUNDED, "the case is about no outcome"
        return
    elif batch.records[case.position].leaf(case.batch_id, case.position) != case.case_id:
        yield Kind.CASE_UNFOUNDED, "the case's name is not the outcome's leaf"
    yield from _juror_problems(view, case)
    stands = view.standing_verdict(case.batch_id, case.position)
    ruling = Ruling.of(case.ruling)
    if case.closed and ruling is not None and ruling.verdict is not stands:
        yield Kind.CASE_VERDICT, f"the case was closed as {ruling}, {stands} stands"


def _juror_problems(view: ChainView, case: CaseView) -> Iterator[tuple[Kind, str]]:
    run, sat = view.runs[case.run_id], set(case.jurors)
    on_bench = {p.juror for p in view.bench[: case.places] if p.is_eligible(case.opened_at)}
    for juror in sorted(sat - on_bench):
        yield Kind.CASE_JUROR, f"{juror} was not on the bench when the case opened"
    # Who takes a seat later may have been drawn; its bit is not told from those of before.
    signed = {who for who, bit in run.seats.items() if bit & view.batches[case.batch_id].signers}
    for juror in sorted(sat & (signed | {run.owner, case.worker})):
        yield Kind.CASE_JUROR, f"{juror} judged its own case"
    if len(sat) != len(case.jurors):
        yield Kind.CASE_JUROR, "somebody sits twice"
