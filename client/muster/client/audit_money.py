"""What an auditor recomputes about the money: slots, payments, slashes, sums. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from muster.chain import (
    ZERO_ADDRESS,
    ChainView,
    Deployment,
    PaymentView,
    RunView,
    SlashState,
    SlashView,
    StakeView,
)
from muster.client.audit_checks import (
    Check,
    Observed,
    judged_outcomes,
    parameter,
    summarise,
)
from muster.protocol.ids import Address, RunId
from muster.protocol.messages import OutcomeRecord, Verdict

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
    paid: dict[tuple[RunId, Address], Tally] = defaultdict(Tally)
    earned, overdue = _earnings(view), overdue_claims(view)
    for payment in view.payments:
        account = (payment.run_id, payment.worker)
        paid[account] += Tally(payment.slots, payment.units, payment.amount_wei)
        due = _due(earned[account], payment, window_s) + overdue.get(payment.run_id, Tally())
        problems += _payment_problems(view, payment, paid[account], due)
    total = sum(payment.amount_wei for payment in view.payments)
    problems += [
        f"run {run.run_id}: {run.paid_wei} wei paid and {run.reserved_wei} set aside "
        f"of {run.funded_wei}"
        for run in view.runs.values()
        if run.available_wei < 0 or run.reserved_wei < 0
    ]
    return summarise(
        "payments are units × price, for accepted slots that are final",
        problems,
        f"{len(view.payments)} payments, {total} wei",
    )


@dataclass(frozen=True, slots=True)
class Tally:
    """Slots, units and wei."""

    slots: int = 0
    """Slots."""
    units: int = 0
    """Units."""
    wei: int = 0
    """Token wei."""

    def __add__(self, other: Tally) -> Tally:
        """Return both together."""
        return Tally(self.slots + other.slots, self.units + other.units, self.wei + other.wei)

    def exceeds(self, other: Tally) -> bool:
        """Return whether any of it is more than the other's."""
        return self.slots > other.slots or self.units > other.units or self.wei > other.wei


def overdue_claims(view: ChainView) -> dict[RunId, Tally]:
    """Return what batches without outcomes may be paid at most, by run.

    They stand as claimed once they are overdue, and events do not say by whom they are claimed.
    """
    tallies: dict[RunId, Tally] = defaultdict(Tally)
    for batch in view.batches.values():
        if batch.records is None:
            claimed = Tally(batch.count, batch.units, batch.units * batch.price_per_unit)
            tallies[batch.run_id] += claimed
    return tallies


_Earned = dict[tuple[int, int], tuple[int, int, int]]
"""Units, wei per unit and time of posting by (step, index)."""


def _earnings(view: ChainView) -> dict[tuple[RunId, Address], _Earned]:
    earned: dict[tuple[RunId, Address], _Earned] = defaultdict(dict)
    for outcome in judged_outcomes(view):
        worker = view.worker_by_id.get(outcome.record.worker_id)
        if worker is not None and outcome.verdict is Verdict.ACCEPTED:
            slot = (outcome.record.step, outcome.record.index)
            price = outcome.batch.price_per_unit
            value = (outcome.record.units, price, outcome.batch.posted_at or 0)
            earned[outcome.batch.run_id, worker.address].setdefault(slot, value)
    return earned


def _due(earned: _Earned, payment: PaymentView, window_s: int | None) -> Tally:
    """Return what was final when a payment was made."""
    final = [
        Tally(1, units, units * price)
        for units, price, posted in earned.values()
        if posted + (window_s or 0) <= payment.timestamp
    ]
    return sum(final, Tally())


def _payment_problems(
    view: ChainView, payment: PaymentView, paid: Tally, due: Tally
) -> Iterator[str]:
    if payment.run_id not in view.runs:
        yield f"a payment for run {payment.run_id}, which does not exist ({payment.tx_hash})"
        return
    prices = [b.price_per_unit for b in view.batches.values() if b.run_id == payment.run_id]
    least, most = (payment.units * price for price in (min(prices or [0]), max(prices or [0])))
    if not least <= payment.amount_wei <= most:
        yield (
            f"{payment.amount_wei} wei for {payment.units} units, worth {least} to {most} "
            f"({payment.tx_hash})"
        )
    if paid.exceeds(due):
        yield (
            f"{payment.worker} was paid {paid.slots} slots, {paid.units} units and {paid.wei} wei "
            f"of run {payment.run_id}, final were {due.slots}, {due.units} and {due.wei} "
            f"({payment.tx_hash})"
        )


def slashes(view: ChainView, window_s: int | None) -> Check:
    """Return whether every slash follows from a fraud verdict."""
    problems = [
        f"{slash.owner}: {problem} ({slash.tx_hash})"
        for slash in view.slashes
        for problem in _slash_problems(view, slash)
    ]
    executed = {slash.offence for slash in view.slashes}
    waiting = sum(
        o.verdict is Verdict.FRAUD and o.record.offence(o.batch.run_id) not in executed
        for o in judged_outcomes(view)
    )
    window = f", challenge window {window_s} s" if window_s is not None else ""
    return summarise(
        "slashes are the run's share of the stake, for fraud verdicts",
        problems,
        f"{len(view.slashes)} slashes, {waiting} fraud verdicts not executed{window}",
    )


def _slash_problems(view: ChainView, slash: SlashView) -> Iterator[str]:
    if slash.fault is not None or slash.is_double_submission:
        # The fault court checked the proof that its event repeats; events do not hold it.
        return
    batch = view.batches.get(slash.batch_id) if slash.batch_id is not None else None
    if batch is None or batch.records is None or slash.position is None:
        yield "slashed without a posted outcome"
        return
    if not 0 <= slash.position < len(batch.records):
        yield f"batch {batch.batch_id} has no position {slash.position}"
        return
    record = batch.records[slash.position]
    if record.offence(batch.run_id) != slash.offence:
        yield "the offence does not name the file of its outcome"
    worker = view.worker_by_id.get(record.worker_id)
    if worker is None or worker.address != slash.owner:
        yield f"the outcome is about worker {record.worker_id}"
    yield from _verdict_problems(view, slash, batch.batch_id, slash.position)
    run = view.runs.get(batch.run_id)
    ppm = _fraud_ppm(run, record, slash.priors) if run else 0
    shares = tuple(-(-stake * ppm // PPM) for stake in slash.stake_before)
    if slash.taken != shares:
        yield f"{slash.taken} wei were taken of {slash.stake_before}, due were {shares}"
    case = view.cases.get(record.leaf(batch.batch_id, slash.position))
    is_reported = record.verdict is not Verdict.FRAUD and case is not None and case.overturned
    reporter = case.challenger if is_reported and case is not None else ZERO_ADDRESS
    if slash.reporter != reporter:
        yield f"{slash.reporter} is its reporter, not {reporter}"


def _fraud_ppm(run: RunView, record: OutcomeRecord, priors: int) -> int:
    """Return the millionths of stake that a fraud costs: doubled by every prior conviction."""
    terms = run.config.terms
    if record.is_exact_fraud:
        return terms.exact_fraud_ppm
    return min(terms.fraud_ppm << min(priors, 20), PPM)


def _verdict_problems(
    view: ChainView, slash: SlashView, batch_id: int, position: int
) -> Iterator[str]:
    stands = view.standing_verdict(batch_id, position) is Verdict.FRAUD
    is_restored = slash.state is SlashState.RESTORED
    if not stands and not is_restored and slash.amount_wei:
        yield "the verdict that stands is not fraud"
    if stands and is_restored:
        yield "the stake was given back though the verdict stands"
    worker = view.workers.get(slash.owner)
    if stands and worker is not None and worker.convictions == 0:
        yield f"the worker is {worker.status.lower()} and not convicted"


def slash_splits(view: ChainView, deployment: Deployment) -> Check:
    """Return whether released slashes went where they must."""
    released = [slash for slash in view.slashes if slash.split is not None]
    problems = [
        f"{slash.owner}: {problem} ({slash.settled_tx})"
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
    stake, reward = held_stake(view), held_reward(view)
    return summarise(
        "sums equal what the contracts hold",
        _sum_problems(view, stake, reward, observed),
        f"{stake} wei of stake, {reward} wei of reward",
    )


def _sum_problems(view: ChainView, stake: int, reward: int, observed: Observed) -> Iterator[str]:
    # Anybody can send tokens to a contract: it may hold more.
    for what, ours, held in (
        ("stakes", stake, observed.vault_wei),
        ("rewards", reward, observed.escrow_wei),
    ):
        if held < ours:
            yield f"{what} add up to {ours} wei, the contract holds {held}"
    for owner, account in observed.stakes.items():
        told = view.stakes.get(owner, StakeView(owner))
        if (told.active_wei, told.unbonding_wei) != (account.active_wei, account.unbonding_wei):
            events = f"{told.active_wei} + {told.unbonding_wei} wei"
            yield f"{owner} has {events} by the events, the vault says {account}"
    for what, count, theirs in (
        ("runs", len(view.runs), observed.runs),
        ("batches", len(view.batches), observed.batches),
    ):
        if count != theirs:
            yield f"the events tell of {count} {what}, the contracts of {theirs}"
    for run_id, funds in observed.funds.items():
        run = view.runs[run_id]
        if (run.available_wei, run.reserved_wei) != (funds.available_wei, funds.reserved_wei):
            yield f"the escrow of run {run_id} says {funds}"
        if run.latest_version != observed.versions.get(run_id):
            yield f"the newest policy of run {run_id} is {observed.versions.get(run_id)}"
    for batch_id in sorted(observed.strange):
        yield f"batch {batch_id} is not what its events tell"


def held_stake(view: ChainView) -> int:
    """Return the stake that StakeVault must hold, as the events give it, in wei."""
    stakes = sum(stake.active_wei + stake.unbonding_wei for stake in view.stakes.values())
    held = (slash.amount_wei for slash in view.slashes if slash.state is SlashState.ESCROWED)
    return stakes + sum(held)


def held_reward(view: ChainView) -> int:
    """Return the money that RewardEscrow must hold, as the events give it, in wei."""
    return sum(run.available_wei + run.reserved_wei for run in view.runs.values())
