"""Money that waits because nobody settled something. Pure.

Nobody is obliged to settle it, so it contradicts nothing: a note says since when it waits, who may
settle it and how, and the amount. Other checks find wrong payments.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from muster.chain import BatchView, CaseView, Offence, RunTerms, SlashState, SlashView, StakeView
from muster.chain.frauds import Charge, charge_of
from muster.client.audit.contradictions import Check, summarise
from muster.client.audit.ledger import Ledger
from muster.client.audit.observed import Parameters
from muster.client.audit.outcome_table import OutcomeTable
from muster.client.audit.stakes import PPM
from muster.client.disputes.cases import settle_command
from muster.client.quantities import format_time, format_tokens
from muster.protocol.jury import summons_of
from muster.protocol.messages import Verdict


@dataclass(frozen=True, slots=True)
class Overdue:
    """One unsettled item."""

    what: str
    """The item, and who may settle it with which call."""
    since: int
    """Unix seconds of its deadline."""
    wei: int
    """Money that waits with it."""

    def __str__(self) -> str:
        since, tokens = format_time(self.since), format_tokens(self.wei)
        return f"{self.what}, since {since}; {tokens} tokens wait with it"


def waiting(view: Ledger, table: OutcomeTable, parameters: Parameters, now: int) -> Check:
    """Return the check that lists what is overdue at chain time `now`, most money first."""
    found = [
        *_overdue_batches(view, parameters, now),
        *_overdue_cases(view, parameters, now),
        *_unexecuted_frauds(view, table, now),
        *_overdue_escrows(view, parameters, now),
    ]
    found.sort(key=lambda each: (-each.wei, each.since))
    wei = sum(each.wei for each in found)
    what = f"{len(found)} wait past it, with {format_tokens(wei)} tokens"
    return summarise(
        "everything past its deadline is settled",
        [],
        what if found else "all of it",
        notes=map(str, found),
        is_open=bool(found),
    )


def _overdue_batches(view: Ledger, parameters: Parameters, now: int) -> Iterator[Overdue]:
    for batch in view.batches.values():
        case = view.cases.get(summons_of(batch.batch_id))
        if batch.records is not None or batch.is_void or (case is not None and not case.closed):
            continue
        due_at = batch.due_at(parameters.outcome_deadline_s)
        # Jurors can be called during one challenge window after the deadline.
        if now >= due_at:
            appeal_ends_at = due_at + parameters.challenge_window_s
            yield _overdue_batch(batch, due_at, appeal_ends_at, now, is_summoned=case is not None)


def _overdue_batch(
    batch: BatchView, due_at: int, appeal_ends_at: int, now: int, *, is_summoned: bool
) -> Overdue:
    wei = batch.units * batch.price_per_unit
    name = f"batch {batch.batch_id} of run {batch.run_id} has no outcomes"
    if now < appeal_ends_at and not is_summoned:
        until = format_time(appeal_ends_at)
        act = "a worker takes its work out and calls judges (muster worker submit-direct)"
        return Overdue(f"{name}: until {until} {act}", due_at, wei)
    command = settle_command(batch.batch_id, 0)
    act = f"anybody declares it void ({command}, ContributionLedger.voidBatch)"
    return Overdue(f"{name}: {act}", max(due_at, appeal_ends_at), wei)


def _overdue_cases(view: Ledger, parameters: Parameters, now: int) -> Iterator[Overdue]:
    for case in view.cases.values():
        due_at = case.opened_at + parameters.jury_time_s
        if not case.closed and now >= due_at:
            act = "settleSummoned" if case.is_summons else "settle"
            what = f"case {case.number} about {case.batch_id}:{case.position} is open"
            command = settle_command(case.batch_id, case.position)
            yield Overdue(
                f"{what}: anybody closes it ({command}, DisputeCourt.{act})",
                due_at,
                _stakes(view, case, parameters.bond),
            )


def _stakes(view: Ledger, case: CaseView, bond: int) -> int:
    """Return the bonds of a case plus the price of the work that it is about."""
    bonds, batch = bond * len(case.claims), view.batches.get(case.batch_id)
    record = view.record_at(case.batch_id, case.position)
    if batch is None or (batch.records and record is None):
        return bonds
    return bonds + (record or batch).units * batch.price_per_unit


def _unexecuted_frauds(view: Ledger, table: OutcomeTable, now: int) -> Iterator[Overdue]:
    taken = {(slash.run_id, (slash.owner, slash.offence, slash.tag)) for slash in view.slashes}
    for row in np.flatnonzero(table.is_verdict(Verdict.FRAUD)).tolist():
        batch, position = table.place(row)
        run, charge = view.runs.get(batch.run_id), charge_of(view, batch.batch_id, position)
        if run is None or charge is None or (batch.run_id, charge) in taken:
            continue
        if run.is_slashing_paused(now):
            continue
        case = view.cases.get(table.record(row).leaf(batch.batch_id, position))
        found_at = case.closed_at if case is not None and case.overturned else batch.posted_at
        stake, terms = view.stake(batch.run_id, charge.owner), view.terms_of(batch)
        act = f"{settle_command(batch.batch_id, position)}, ContributionLedger.executeFraud"
        yield Overdue(
            f"{batch.batch_id}:{position} is fraud, and nobody took the stake of {charge.owner}, "
            f"which {_leaves(stake)}: anybody takes it ({act})",
            max(found_at or 0, run.slashing_paused_until),
            0 if terms is None else _cost(view, charge, stake, terms),
        )


def _leaves(stake: StakeView) -> str:
    """Return from when an account can withdraw its stake."""
    if stake.unbonding_wei:
        unbonding = format_tokens(stake.unbonding_wei)
        return f"can withdraw {unbonding} tokens from {format_time(stake.withdrawable_at)}"
    if stake.active_wei:
        return "can withdraw it one unbonding period after it asks, and has not asked"
    return "has none left"


def _cost(view: Ledger, charge: Charge, stake: StakeView, terms: RunTerms) -> int:
    """Return what a fraud costs if it is executed now, in wei."""
    member = view.member(stake.run_id, charge.owner)
    priors = min(member.convictions if member else 0, 20)
    is_exact = charge.offence is Offence.EXACT_FRAUD
    ppm = terms.exact_fraud_ppm if is_exact else min(terms.fraud_ppm << priors, PPM)
    return sum(-(-wei * ppm // PPM) for wei in (stake.active_wei, stake.unbonding_wei))


def _overdue_escrows(view: Ledger, parameters: Parameters, now: int) -> Iterator[Overdue]:
    for slash in view.slashes:
        if slash.state is not SlashState.ESCROWED:
            continue
        closes_at = _closes_at(view, slash, parameters.challenge_window_s)
        if closes_at is not None and now >= closes_at:
            what = f"stake that a fraud cost {slash.owner} is held in escrow"
            command = settle_command(slash.batch_id, slash.position)
            act = f"anybody releases it ({command}, ContributionLedger.finaliseFraud)"
            yield Overdue(f"{what}: {act}", closes_at, slash.amount_wei)


def _closes_at(view: Ledger, slash: SlashView, window_s: int) -> int | None:
    """Return when a fraud is final; None while a case about it is open, or if it is no fraud."""
    batch = view.batch_of(slash)
    run = view.runs.get(slash.run_id)
    case = view.cases.get(slash.leaf) if slash.leaf is not None else None
    if batch is None or batch.posted_at is None or run is None or (case and not case.closed):
        return None
    return run.fraud_closes_at(batch.posted_at, window_s)
