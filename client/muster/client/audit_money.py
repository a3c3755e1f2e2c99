"""What an auditor recomputes about the money: slots, payments, slashes, sums. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from muster.chain import (
    ZERO_ADDRESS,
    ChainView,
    Deployment,
    PaymentView,
    SlashState,
    SlashView,
    StakeTotals,
)
from muster.client.audit_checks import (
    Check,
    Observed,
    judged_outcomes,
    parameter,
    summarise,
)
from muster.protocol.ids import Address, RunId
from muster.protocol.messages import Verdict

PPM = 1_000_000
"""The whole, in millionths."""


def slots(view: ChainView) -> Check:
    """Return whether no slot was accepted twice."""
    accepted = Counter(
        (o.batch.run_id, o.record.worker_id, o.record.step, o.record.index)
        for o in judged_outcomes(view)
        if o.verdict is Verdict.ACCEPTED
    )
    problems = [
        f"run {run}, worker {worker}, step {step}, index {index}: accepted {times} times"
        for (run, worker, step, index), times in accepted.items()
        if times > 1
    ]
    return summarise("every slot settles once", problems, f"{len(accepted)} slots accepted")


def payments(view: ChainView, window_s: int | None) -> Check:
    """Return whether every payment is due, and not higher than it should be."""
    problems: list[str] = []
    paid: dict[tuple[RunId, Address], tuple[int, int]] = defaultdict(lambda: (0, 0))
    earned = _earnings(view)
    for payment in view.payments:
        account = (payment.run_id, payment.worker)
        slots, units = paid[account]
        paid[account] = (slots + payment.slots, units + payment.units)
        due = _due(earned[account], payment, window_s)
        problems += _payment_problems(view, payment, paid[account], due)
    total = sum(payment.amount_wei for payment in view.payments)
    problems += [
        f"run {run.run_id} paid {run.paid_wei} wei of {run.funded_wei}"
        for run in view.runs.values()
        if run.paid_wei > run.funded_wei
    ]
    return summarise(
        "payments are units × price, for accepted slots that are final",
        problems,
        f"{len(view.payments)} payments, {total} wei",
    )


_Earned = dict[tuple[int, int], tuple[int, int]]
"""Units and time of posting by (step, index)."""


def _earnings(view: ChainView) -> dict[tuple[RunId, Address], _Earned]:
    earned: dict[tuple[RunId, Address], _Earned] = defaultdict(dict)
    for outcome in judged_outcomes(view):
        worker = view.worker_by_id.get(outcome.record.worker_id)
        if worker is not None and outcome.verdict is Verdict.ACCEPTED:
            slot = (outcome.record.step, outcome.record.index)
            value = (outcome.record.units, outcome.batch.posted_at or 0)
            earned[outcome.batch.run_id, worker.address].setdefault(slot, value)
    return earned


def _due(earned: _Earned, payment: PaymentView, window_s: int | None) -> tuple[int, int]:
    """Return the slots and units that were final when a payment was made."""
    final = [u for u, posted in earned.values() if posted + (window_s or 0) <= payment.timestamp]
    return len(final), sum(final)


def _payment_problems(
    view: ChainView, payment: PaymentView, paid: tuple[int, int], due: tuple[int, int]
) -> Iterator[str]:
    run = view.runs.get(payment.run_id)
    if run is None:
        yield f"a payment for run {payment.run_id}, which does not exist ({payment.tx_hash})"
        return
    price = run.config.price_per_unit
    if payment.amount_wei != payment.units * price:
        yield (f"{payment.amount_wei} wei for {payment.units} units at {price} ({payment.tx_hash})")
    if paid[0] > due[0] or paid[1] > due[1]:
        yield (
            f"{payment.worker} was paid {paid[0]} slots and {paid[1]} units of run "
            f"{payment.run_id}, final were {due[0]} and {due[1]} ({payment.tx_hash})"
        )


def slashes(view: ChainView, window_s: int | None) -> Check:
    """Return whether every slash follows from a fraud verdict."""
    problems = [
        f"{slash.worker}: {problem} ({slash.tx_hash})"
        for slash in view.slashes
        for problem in _slash_problems(view, slash)
    ]
    executed = {slash.offence for slash in view.slashes}
    waiting = sum(
        o.verdict is Verdict.FRAUD and o.record.leaf(o.batch.batch_id, o.position) not in executed
        for o in judged_outcomes(view)
    )
    window = f", challenge window {window_s} s" if window_s is not None else ""
    return summarise(
        "slashes are the run's share of the stake, for fraud verdicts",
        problems,
        f"{len(view.slashes)} slashes, {waiting} fraud verdicts not executed{window}",
    )


def _slash_problems(view: ChainView, slash: SlashView) -> Iterator[str]:
    batch = view.batches.get(slash.batch_id) if slash.batch_id is not None else None
    if batch is None or batch.records is None or slash.position is None:
        yield "slashed without a posted outcome"
        return
    if not 0 <= slash.position < len(batch.records):
        yield f"batch {batch.batch_id} has no position {slash.position}"
        return
    record = batch.records[slash.position]
    if record.leaf(batch.batch_id, slash.position) != slash.offence:
        yield "the offence is not the leaf of its outcome"
    worker = view.worker_by_id.get(record.worker_id)
    if worker is None or worker.address != slash.worker:
        yield f"the outcome is about worker {record.worker_id}"
    yield from _verdict_problems(view, slash, batch.batch_id, slash.position)
    run = view.runs.get(batch.run_id)
    shares = tuple(
        -(-stake * (run.config.fraud_ppm if run else 0) // PPM) for stake in slash.stake_before
    )
    if slash.taken != shares:
        yield f"{slash.taken} wei were taken of {slash.stake_before}, due were {shares}"
    case = view.cases.get(slash.offence)
    is_reported = record.verdict is not Verdict.FRAUD and case is not None and case.overturned
    reporter = case.challenger if is_reported and case is not None else ZERO_ADDRESS
    if slash.reporter != reporter:
        yield f"{slash.reporter} is its reporter, not {reporter}"


def _verdict_problems(
    view: ChainView, slash: SlashView, batch_id: int, position: int
) -> Iterator[str]:
    stands = view.standing_verdict(batch_id, position) is Verdict.FRAUD
    is_restored = slash.state is SlashState.RESTORED
    if not stands and not is_restored and slash.amount_wei:
        yield "the verdict that stands is not fraud"
    if stands and is_restored:
        yield "the stake was given back though the verdict stands"
    worker = view.workers.get(slash.worker)
    if stands and worker is not None and worker.status.lower() != "banned":
        yield f"the worker is {worker.status.lower()}, not banned"


def slash_splits(view: ChainView, deployment: Deployment) -> Check:
    """Return whether released slashes went where they must."""
    released = [slash for slash in view.slashes if slash.split is not None]
    problems = [
        f"{slash.worker}: {problem} ({slash.settled_tx})"
        for slash in released
        for problem in _split_problems(slash, deployment)
    ]
    return summarise(
        "released slashes are split without profit for judges",
        problems,
        f"{len(released)} released",
    )


def _split_problems(slash: SlashView, deployment: Deployment) -> Iterator[str]:
    assert slash.split is not None
    burned, insured, rewarded = slash.split
    if burned + insured + rewarded != slash.amount_wei:
        yield f"{slash.split} wei do not add up to {slash.amount_wei}"
    insurance_ppm = parameter(deployment, "insurance_ppm")
    if insurance_ppm is not None and insured != slash.amount_wei * insurance_ppm // PPM:
        yield f"{insured} wei were insured of {slash.amount_wei}"
    if slash.reporter == ZERO_ADDRESS:
        most: int | None = 0
    else:
        most = parameter(deployment, "reporter_cap")
    if most is not None and rewarded > most:
        yield f"{rewarded} wei went to the reporter {slash.reporter}, at most {most} may"


def sums(view: ChainView, observed: Observed) -> Check:
    """Return whether what the events add up to is what the contracts hold."""
    ours = stake_totals(view)
    return summarise(
        "sums equal what the contracts hold",
        _sum_problems(view, ours, observed),
        f"{ours.active_wei} wei active, {ours.unbonding_wei} unbonding, "
        f"{ours.escrowed_wei} escrowed",
    )


def _sum_problems(view: ChainView, ours: StakeTotals, observed: Observed) -> Iterator[str]:
    if observed.totals != ours:
        yield f"stakes add up to {ours}, the vault says {observed.totals}"
    for what, count, theirs in (
        ("runs", len(view.runs), observed.runs),
        ("batches", len(view.batches), observed.batches),
    ):
        if count != theirs:
            yield f"the events tell of {count} {what}, the contracts of {theirs}"
    for run_id, funds in observed.funds.items():
        run = view.runs[run_id]
        if (run.funded_wei, run.paid_wei) != (funds.funded_wei, funds.paid_wei):
            yield f"the escrow of run {run_id} says {funds}"
        if run.latest_version != observed.versions.get(run_id):
            yield f"the newest policy of run {run_id} is {observed.versions.get(run_id)}"
    for batch_id in sorted(observed.judged):
        yield f"batch {batch_id} has outcomes that no event tells of"


def stake_totals(view: ChainView) -> StakeTotals:
    """Return the sums over all accounts, as the events give them."""
    stakes = view.stakes.values()
    held = (slash.amount_wei for slash in view.slashes if slash.state is SlashState.ESCROWED)
    return StakeTotals(
        active_wei=sum(stake.active_wei for stake in stakes),
        unbonding_wei=sum(stake.unbonding_wei for stake in stakes),
        escrowed_wei=sum(held),
    )
