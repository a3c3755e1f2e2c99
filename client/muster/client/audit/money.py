"""What an auditor recomputes about the money: slots, payments, void batches, sums. Pure.

A payment's event tells slots, units and wei, not which outcomes: so what a worker was paid of a run
up to a moment is held against what was final for it by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from muster.chain import (
    BatchView,
    ChainView,
    PaymentView,
    SlashState,
)
from muster.client.audit.contradictions import Check, Contradiction, Kind, summarise
from muster.client.audit.ledger import Ledger
from muster.client.audit.observed import Observed
from muster.client.audit.table import OutcomeTable
from muster.client.quantities import format_tokens
from muster.protocol.ids import Address, RunId
from muster.protocol.messages import Verdict

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


# Void batches


def voids(view: ChainView) -> Check:
    """Return whether void batches pay nobody and give back what was set aside for them."""
    void = [batch for batch in view.batches.values() if batch.is_void]
    found = (
        Contradiction(Kind.BATCH_VOID, problem, tx=batch.voided_tx, batch_id=batch.batch_id)
        for batch in void
        for problem in _void_problems(view, batch)
    )
    freed = sum(view.freed_wei.values()) if isinstance(view, Ledger) else 0
    return summarise(
        "void batches pay nobody and give their funds back",
        found,
        f"{len(void)} void batches, {format_tokens(freed)} tokens given back",
    )


def _void_problems(view: ChainView, batch: BatchView) -> Iterator[str]:
    if batch.records is not None:
        yield "it is void and has outcomes"
    if not isinstance(view, Ledger):
        return
    freed, worth = view.freed_wei.get(batch.batch_id), batch.units * batch.price_per_unit
    # The owner of a run that was closed long ago may have taken all of it back.
    due = min(worth, view.reserved_before.get(batch.batch_id, worth))
    if freed != due:
        given = "nothing" if freed is None else f"{format_tokens(freed)} tokens"
        yield f"{given} went back to its run, due were {format_tokens(due)} tokens"


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
            events = f"{format_tokens(told.active_wei)} + {format_tokens(told.unbonding_wei)}"
            vault = f"{format_tokens(account.active_wei)} + {format_tokens(account.unbonding_wei)}"
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
    for who in sorted(observed.jurors ^ set(view.jurors())):
        what = "is" if who in observed.jurors else "is not"
        yield f"{who} {what} on the bench by the contract, and the events differ"
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
