"""What an auditor recomputes about the money: slots, payments, slashes, sums. Pure.

A payment's event tells slots, units and wei, not which outcomes: so what a worker was paid of a run
up to a moment is held against what was final for it by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from muster.chain import (
    ZERO_ADDRESS,
    ChainView,
    Deployment,
    PaymentView,
    RunTerms,
    SlashState,
    SlashView,
)
from muster.chain.structs import Offence
from muster.client.audit.contradictions import Check, Contradiction, Kind, summarise
from muster.client.audit.observed import Observed, parameter
from muster.client.audit.table import OutcomeTable
from muster.client.audit.work import terms_of_batch
from muster.client.quantities import format_tokens
from muster.protocol.ids import Address, RunId
from muster.protocol.jury import BENCH
from muster.protocol.messages import Verdict

PPM = 1_000_000
"""The whole, in millionths."""
FRAUDS = (Offence.FRAUD, Offence.EXACT_FRAUD)
"""Offences that are outcomes."""


# Slots and payments


def accepted_order(table: OutcomeTable) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the rows that stand accepted, by slot and in each slot by age, and for each whether
    its slot has an older one.
    """
    rows_A = np.flatnonzero(table.is_verdict(Verdict.ACCEPTED))
    runs = table.run_N()
    slot = [runs, *(table.column(name) for name in ("worker_id", "step", "index"))]
    order = np.lexsort([rows_A, *(column[rows_A] for column in reversed(slot))])
    rows_A = rows_A[order]
    again = np.zeros(len(rows_A), bool)
    if len(rows_A):
        again[1:] = np.all([np.diff(column[rows_A]) == 0 for column in slot], axis=0)
    return rows_A, again


def slots(table: OutcomeTable) -> Check:
    """Return whether no slot was accepted twice."""
    rows_A, again = accepted_order(table)
    found = (_twice(table, int(row)) for row in rows_A[again])
    return summarise("every slot settles once", found, f"{len(rows_A)} slots accepted")


def _twice(table: OutcomeTable, row: int) -> Contradiction:
    batch, position = table.place(row)
    record = table.record(row)
    return Contradiction(
        Kind.SLOT_TWICE,
        f"run {batch.run_id}, worker {record.worker_id}, step {record.step}, index {record.index}: "
        "accepted again",
        tx=batch.posted_tx,
        block=batch.posted_block,
        batch_id=batch.batch_id,
        position=position,
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


class Earnings:
    """What was final for each worker of each run at any time."""

    def __init__(self, view: ChainView, table: OutcomeTable) -> None:
        self._view = view
        rows_A, again = accepted_order(table)
        first = rows_A[~again]
        runs, workers = table.run_N()[first], table.column("worker_id")[first]
        posted = table.of_batches([batch.posted_at or 0 for batch in table.batches])[first]
        order = np.lexsort([posted, workers, runs])
        self._runs, self._workers = runs[order], workers[order]
        self._posted, self._rows = posted[order], first[order]
        self._units = table.column("units")[self._rows]
        # Prices in wei do not fit 64 bits together with units: each is a place in a list.
        self._prices = sorted({batch.price_per_unit for batch in table.batches})
        place = {price: number for number, price in enumerate(self._prices)}
        self._price = table.of_batches([place[b.price_per_unit] for b in table.batches])[self._rows]
        self._bounds = {
            (int(self._runs[at]), int(self._workers[at])): (int(at), int(until))
            for at, until in _groups(self._runs, self._workers)
        }

    def due(self, payment: PaymentView, window_s: int) -> Tally:
        """Return what was final for a payment's worker when it was made."""
        worker = self._view.workers.get(payment.worker)
        number = worker.worker_id if worker else -1
        first, last = self._bounds.get((payment.run_id, number), (0, 0))
        closed = payment.timestamp - window_s
        until = first + int(np.searchsorted(self._posted[first:last], closed, side="right"))
        units, prices = self._units[first:until], self._price[first:until]
        wei = sum(
            price * int(units[prices == place].sum()) for place, price in enumerate(self._prices)
        )
        return Tally(until - first, int(units.sum()), wei)


def _groups(*columns: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield where each group of equal rows begins and ends; equal rows are together."""
    count = len(columns[0])
    if not count:
        return
    changes = np.any([np.diff(column) != 0 for column in columns], axis=0)
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), count]
    yield from pairwise(edges)


def payments(view: ChainView, table: OutcomeTable, window_s: int | None) -> Check:
    """Return whether every payment is due, and not higher than it should be."""
    found: list[Contradiction] = []
    paid: dict[tuple[RunId, Address], Tally] = defaultdict(Tally)
    earnings, prices = Earnings(view, table), _prices(view)
    for payment in view.payments:
        account = (payment.run_id, payment.worker)
        paid[account] += Tally(payment.slots, payment.units, payment.amount_wei)
        due = earnings.due(payment, window_s or 0)
        least, most = prices.get(payment.run_id, (0, 0))
        worth = (payment.units * least, payment.units * most)
        found += _payment_problems(view, payment, worth, (paid[account], due))
    found += [
        Contradiction(
            Kind.RUN_OVERDRAWN,
            f"run {run.run_id}: {format_tokens(run.paid_wei)} tokens paid and "
            f"{format_tokens(run.reserved_wei)} set aside "
            f"of {format_tokens(run.funded_wei)}",
        )
        for run in view.runs.values()
        if run.available_wei < 0 or run.reserved_wei < 0
    ]
    total = sum(payment.amount_wei for payment in view.payments)
    return summarise(
        "payments are units × price, for accepted slots that are final",
        found,
        f"{len(view.payments)} payments, {format_tokens(total)} tokens",
    )


def _prices(view: ChainView) -> dict[RunId, tuple[int, int]]:
    """Return the lowest and the highest price of each run's batches."""
    prices: dict[RunId, tuple[int, int]] = {}
    for batch in view.batches.values():
        price = batch.price_per_unit
        least, most = prices.get(batch.run_id, (price, price))
        prices[batch.run_id] = (min(least, price), max(most, price))
    return prices


def _payment_problems(
    view: ChainView, payment: PaymentView, worth: tuple[int, int], sums: tuple[Tally, Tally]
) -> Iterator[Contradiction]:
    if payment.run_id not in view.runs:
        what = f"a payment for run {payment.run_id}, which does not exist"
        yield _paid(payment, Kind.PAYMENT_RUN, what)
        return
    if not worth[0] <= payment.amount_wei <= worth[1]:
        least, most = map(format_tokens, worth)
        amount = format_tokens(payment.amount_wei)
        what = f"{amount} tokens for {payment.units} units, worth {least} to {most}"
        yield _paid(payment, Kind.PAYMENT_PRICE, what)
    paid, due = sums
    if paid.exceeds(due):
        what = (
            f"{payment.worker} was paid {paid.slots} slots, {paid.units} units and "
            f"{format_tokens(paid.wei)} tokens of run {payment.run_id}, final were {due.slots}, "
            f"{due.units} and {format_tokens(due.wei)}"
        )
        yield _paid(payment, Kind.PAYMENT_UNDUE, what)


def _paid(payment: PaymentView, kind: Kind, detail: str) -> Contradiction:
    return Contradiction(kind, detail, tx=payment.tx_hash, block=payment.block_number)


# Slashes


def slashes(
    view: ChainView, table: OutcomeTable, deployment: Deployment, window_s: int | None
) -> Check:
    """Return whether every slash follows from an offence that its owner answers for: nobody lost
    what it had not signed for.
    """
    found = [
        Contradiction(
            kind,
            f"{slash.owner}: {problem}",
            tx=slash.tx_hash,
            block=slash.block_number,
            batch_id=slash.batch_id,
            position=slash.position,
        )
        for slash in view.slashes
        for kind, problem in _slash_problems(view, slash, deployment)
    ]
    executed = {(slash.batch_id, slash.position) for slash in view.slashes}
    places = (table.place(int(row)) for row in np.flatnonzero(table.is_verdict(Verdict.FRAUD)))
    waiting = sum((batch.batch_id, position) not in executed for batch, position in places)
    window = f", challenge window {window_s} s" if window_s is not None else ""
    return summarise(
        "nobody lost what it had not signed for",
        found,
        f"{len(view.slashes)} slashes, {waiting} fraud verdicts not executed{window}",
    )


def _slash_problems(
    view: ChainView, slash: SlashView, deployment: Deployment
) -> Iterator[tuple[Kind, str]]:
    if slash.offence in FRAUDS:
        yield from _fraud_problems(view, slash)
    elif slash.offence is Offence.ABSENT_JUROR:
        yield from _absence_problems(view, slash, parameter(deployment, None, "absence_ppm"))
    elif slash.offence is Offence.WRONG_VERDICT:
        wrong_ppm = parameter(deployment, None, "wrong_verdict_ppm")
        yield from _signer_problems(view, slash, wrong_ppm)
    else:
        # The fault court checked the two signatures; events do not hold them.
        run = view.runs.get(slash.run_id)
        is_worker = slash.offence is Offence.DOUBLE_SUBMISSION
        if run is None or slash.owner not in (run.members if is_worker else run.seats):
            yield Kind.SLASH_OTHER_RUN, f"the owner is nobody in run {slash.run_id}"
        elif is_worker:
            yield from _share_problems(slash, max(t.exact_fraud_ppm for t in run.terms))
        else:
            yield from _share_problems(slash, PPM)


def _fraud_problems(view: ChainView, slash: SlashView) -> Iterator[tuple[Kind, str]]:
    batch = view.batches.get(slash.batch_id) if slash.batch_id is not None else None
    if batch is None or batch.records is None or slash.position is None:
        yield Kind.SLASH_UNFOUNDED, "slashed without a posted outcome"
        return
    if not 0 <= slash.position < len(batch.records):
        yield Kind.SLASH_UNFOUNDED, f"batch {batch.batch_id} has no position {slash.position}"
        return
    if batch.run_id != slash.run_id:
        yield Kind.SLASH_OTHER_RUN, f"stake for run {slash.run_id}, work of run {batch.run_id}"
    record = batch.records[slash.position]
    if slash.tag != record.step << 32 | record.index:
        yield Kind.SLASH_UNFOUNDED, "the offence does not name the slot of its outcome"
    worker = view.worker_by_id.get(record.worker_id)
    if worker is None or worker.address != slash.owner:
        yield Kind.SLASH_UNFOUNDED, f"the outcome is about worker {record.worker_id}"
    for problem in _verdict_problems(view, slash, batch.batch_id, slash.position):
        yield Kind.SLASH_VERDICT, problem
    terms = terms_of_batch(view, batch)
    yield from _share_problems(slash, _fraud_ppm(terms, slash))
    case = view.cases.get(record.leaf(batch.batch_id, slash.position))
    reporter = case.reporter if case is not None and case.overturned else ZERO_ADDRESS
    if slash.split is not None and slash.reporter != reporter:
        yield Kind.SLASH_REPORTER, f"{slash.reporter} is its reporter, not {reporter}"


def _absence_problems(
    view: ChainView, slash: SlashView, ppm: int | None
) -> Iterator[tuple[Kind, str]]:
    if slash.run_id != BENCH:
        yield Kind.SLASH_OTHER_RUN, f"a juror's duty, and stake for run {slash.run_id}"
    case = next((case for case in view.cases.values() if case.number == slash.tag), None)
    if case is None or slash.owner not in case.jurors:
        yield Kind.SLASH_UNFOUNDED, f"no juror of case {slash.tag}"
    elif not case.closed or slash.owner in case.votes:
        yield Kind.SLASH_UNFOUNDED, f"case {slash.tag} is open, or the juror voted"
    if ppm is not None:
        yield from _share_problems(slash, ppm)


def _signer_problems(
    view: ChainView, slash: SlashView, ppm: int | None
) -> Iterator[tuple[Kind, str]]:
    batch, run = view.batches.get(slash.tag), view.runs.get(slash.run_id)
    if batch is None or run is None or batch.run_id != slash.run_id:
        yield Kind.SLASH_OTHER_RUN, f"batch {slash.tag} is none of run {slash.run_id}"
        return
    if not run.seats.get(slash.owner, 0) & batch.signers:
        yield Kind.SLASH_UNFOUNDED, f"the owner did not sign the outcomes of batch {slash.tag}"
    if not any(c.overturned and c.batch_id == slash.tag for c in view.cases.values()):
        yield Kind.SLASH_UNFOUNDED, f"no outcome of batch {slash.tag} was overturned"
    if ppm is not None:
        yield from _share_problems(slash, ppm)


def _share_problems(slash: SlashView, ppm: int) -> Iterator[tuple[Kind, str]]:
    shares = tuple(-(-stake * ppm // PPM) for stake in slash.stake_before)
    if slash.taken != shares:
        what = (
            f"{_both(slash.taken)} tokens were taken of {_both(slash.stake_before)}, "
            f"due were {_both(shares)}"
        )
        yield Kind.SLASH_SHARE, what


def _fraud_ppm(terms: RunTerms | None, slash: SlashView) -> int:
    """Return the millionths of stake that a fraud costs: doubled by every prior conviction."""
    if terms is None:
        return 0
    if slash.offence is Offence.EXACT_FRAUD:
        return terms.exact_fraud_ppm
    return min(terms.fraud_ppm << max(0, min(slash.priors, 20)), PPM)


def _verdict_problems(
    view: ChainView, slash: SlashView, batch_id: int, position: int
) -> Iterator[str]:
    stands = view.standing_verdict(batch_id, position) is Verdict.FRAUD
    is_restored = slash.state is SlashState.RESTORED
    if not stands and not is_restored and slash.amount_wei:
        yield "the verdict that stands is not fraud"
    if stands and is_restored:
        yield "the stake was given back though the verdict stands"
    member = view.member(slash.run_id, slash.owner)
    if stands and member is not None and member.convictions == 0:
        yield f"the worker is {member.status.lower()} and not convicted"


def slash_splits(view: ChainView, deployment: Deployment) -> Check:
    """Return whether released slashes went where they must."""
    released = [slash for slash in view.slashes if slash.split is not None]
    found = (
        Contradiction(Kind.SLASH_SPLIT, f"{slash.owner}: {problem}", tx=slash.settled_tx)
        for slash in released
        for problem in _split_problems(slash, deployment)
    )
    return summarise(
        "released slashes are split without profit for judges", found, f"{len(released)} released"
    )


def _split_problems(slash: SlashView, deployment: Deployment) -> Iterator[str]:
    assert slash.split is not None  # the caller's filter
    burned, insured, rewarded = slash.split
    if burned + insured + rewarded != slash.amount_wei:
        split = ", ".join(map(format_tokens, slash.split))
        yield f"{split} tokens do not add up to {format_tokens(slash.amount_wei)}"
    insurance_ppm = parameter(deployment, None, "insurance_ppm")
    if insurance_ppm is not None and insured != slash.amount_wei * insurance_ppm // PPM:
        yield f"{format_tokens(insured)} tokens were insured of {format_tokens(slash.amount_wei)}"
    if slash.reporter == ZERO_ADDRESS:
        most: int | None = 0
    else:
        most = parameter(deployment, None, "reporter_cap")
    if most is not None and rewarded > most:
        yield (
            f"{format_tokens(rewarded)} tokens went to the reporter {slash.reporter}, "
            f"at most {format_tokens(most)} may"
        )


def _both(wei: Iterable[int]) -> str:
    """Return active and unbonding stake, in tokens."""
    return " + ".join(map(format_tokens, wei))


# Sums


def sums(view: ChainView, observed: Observed) -> Check:
    """Return whether what the events add up to is what the contracts hold."""
    stake, reward = held_stake(view), held_reward(view)
    found = (
        Contradiction(Kind.CONTRACT_STATE, problem)
        for problem in _sum_problems(view, stake, reward, observed)
    )
    return summarise(
        "sums equal what the contracts hold",
        found,
        f"{format_tokens(stake)} tokens of stake, {format_tokens(reward)} of reward",
    )


def _sum_problems(view: ChainView, stake: int, reward: int, observed: Observed) -> Iterator[str]:
    # Anybody can send tokens to a contract: it may hold more.
    for what, ours, held in (
        ("stakes", stake, observed.vault_wei),
        ("rewards", reward, observed.escrow_wei),
    ):
        if held < ours:
            yield (
                f"{what} add up to {format_tokens(ours)} tokens, "
                f"the contract holds {format_tokens(held)}"
            )
    for (run_id, owner), account in observed.stakes.items():
        told = view.stake(run_id, owner)
        if (told.active_wei, told.unbonding_wei) != (account.active_wei, account.unbonding_wei):
            events = _both((told.active_wei, told.unbonding_wei))
            vault = _both((account.active_wei, account.unbonding_wei))
            yield f"{owner} has {events} tokens in run {run_id} by events, by the vault {vault}"
    for what, count, theirs in (
        ("runs", len(view.runs), observed.runs),
        ("batches", len(view.batches), observed.batches),
    ):
        if count != theirs:
            yield f"the events tell of {count} {what}, the contracts of {theirs}"
    for run_id, funds in observed.funds.items():
        run = view.runs.get(run_id)
        if run is None:
            yield f"the events do not tell of run {run_id}"
            continue
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
