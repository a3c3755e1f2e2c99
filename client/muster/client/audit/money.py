"""What an auditor recomputes about the money: slots, payments, freed money, sums. Pure.

A payment's event holds slots, units and wei, but not the outcomes. So all that a run had paid a
worker by then is compared with all that was final for the worker by then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from muster.chain import BatchView, PaymentView, SlashState
from muster.client.audit.contradictions import Check, Contradiction, Kind, NotRerun, summarise
from muster.client.audit.ledger import Ledger
from muster.client.audit.observed import Observed
from muster.client.audit.outcome_table import OutcomeTable, at_row
from muster.client.chain_facts import OutcomePlace
from muster.client.quantities import format_tokens
from muster.protocol.ids import Address, RunId
from muster.protocol.jury import BENCH
from muster.protocol.messages import Verdict

# Slots and payments


@dataclass(frozen=True, slots=True)
class Doubts:
    """Accepted outcomes that were run again and not confirmed."""

    wrong: Collection[OutcomePlace] = ()
    """Outcomes whose own evidence gives another verdict."""
    missing: Collection[OutcomePlace] = ()
    """Outcomes without enough evidence: the file is missing, or has another hash."""

    @classmethod
    def of(cls, checks: Iterable[Check]) -> Doubts:
        """Return the outcomes that checks of the evidence leave in doubt."""
        told = list(checks)
        found = [each for check in told for each in check.contradictions]
        return cls(
            wrong=_places(each for each in found if each.kind is Kind.VERDICT_WRONG),
            missing=_places(each for each in found if each.kind is Kind.EVIDENCE_ALTERED)
            | _places(each for check in told for each in check.not_rerun),
        )


def _places(found: Iterable[Contradiction | NotRerun]) -> frozenset[OutcomePlace]:
    return frozenset(
        OutcomePlace(each.batch_id, each.position)
        for each in found
        if each.batch_id is not None and each.position is not None
    )


def accepted_order(table: OutcomeTable) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the rows that stand accepted, sorted by slot, then oldest first, and for each whether
    its slot has an older one.
    """
    rows_A = np.flatnonzero(table.is_verdict(Verdict.ACCEPTED))
    slot = [table.member_N(), table.column("step"), table.column("index")]
    order = np.lexsort([rows_A, *(column[rows_A] for column in reversed(slot))])
    rows_A = rows_A[order]
    again = np.zeros(len(rows_A), bool)
    if len(rows_A):
        again[1:] = np.all([np.diff(column[rows_A]) == 0 for column in slot], axis=0)
    return rows_A, again


def slots(table: OutcomeTable) -> Check:
    """Return whether no slot was accepted twice."""
    rows_A, again = accepted_order(table)
    found = (
        at_row(table, row, Kind.SLOT_TWICE, _slot(table, row)) for row in rows_A[again].tolist()
    )
    return summarise("every slot settles once", found, f"{len(rows_A)} slots accepted")


def _slot(table: OutcomeTable, row: int) -> str:
    (batch, _), record = table.place(row), table.record(row)
    slot = f"run {batch.run_id}, worker {record.worker_id}, step {record.step}"
    return f"{slot}, index {record.index}: accepted again"


@dataclass(frozen=True, slots=True)
class MoneyTally:
    """Slots, units and wei."""

    slots: int = 0
    units: int = 0
    wei: int = 0
    """Token wei."""

    def __add__(self, other: MoneyTally) -> MoneyTally:
        """Return the sum of both."""
        return MoneyTally(self.slots + other.slots, self.units + other.units, self.wei + other.wei)

    def exceeds(self, other: MoneyTally) -> bool:
        """Return whether any of the three is greater than the other's."""
        return self.slots > other.slots or self.units > other.units or self.wei > other.wei


class FinalSlots:
    """The accepted slots that were final for each worker of each run at any time."""

    def __init__(self, view: Ledger, table: OutcomeTable) -> None:
        self._view = view
        rows_A, again = accepted_order(table)
        first = rows_A[~again]
        member = table.member_N()[first]
        posted = table.of_batches([batch.posted_at or 0 for batch in table.batches])[first]
        order = np.lexsort([posted, member])
        self._posted, self._rows = posted[order], first[order]
        self._units = table.column("units")[self._rows]
        # A price times units overflows 64 bits: rows hold the price's index in this list.
        self._prices = sorted({batch.price_per_unit for batch in table.batches})
        place = {price: number for number, price in enumerate(self._prices)}
        self._price = table.of_batches([place[b.price_per_unit] for b in table.batches])[self._rows]
        members, starts = np.unique(member[order], return_index=True)
        self._bounds = dict(
            zip(members.tolist(), pairwise([*starts.tolist(), len(order)]), strict=True)
        )

    def _final(self, payment: PaymentView, window_s: int) -> tuple[int, int]:
        """Return first and end index of the rows that were final for a payment's worker."""
        worker = self._view.workers.get(payment.worker)
        member = payment.run_id << 32 | worker.worker_id if worker else -1
        first, last = self._bounds.get(member, (0, 0))
        closed = payment.timestamp - window_s
        return first, first + int(np.searchsorted(self._posted[first:last], closed, side="right"))

    def rows(self, payment: PaymentView, window_s: int) -> list[int]:
        """Return the rows that were final for a payment's worker when it was made."""
        first, until = self._final(payment, window_s)
        return [int(row) for row in self._rows[first:until]]

    def due(self, payment: PaymentView, window_s: int) -> MoneyTally:
        """Return the sums that were final for a payment's worker when it was made."""
        first, until = self._final(payment, window_s)
        units, prices = self._units[first:until], self._price[first:until]
        wei = sum(
            price * int(units[prices == place].sum()) for place, price in enumerate(self._prices)
        )
        return MoneyTally(until - first, int(units.sum()), wei)


def payments(view: Ledger, table: OutcomeTable, window_s: int, doubts: Doubts) -> Check:
    """Return whether every payment was due, and not too high.

    The check is open, not ok, when work that was or may have been paid was run again and not
    confirmed.
    """
    found: list[Contradiction] = []
    paid: dict[tuple[RunId, Address], MoneyTally] = defaultdict(MoneyTally)
    newest: dict[tuple[RunId, Address], PaymentView] = {}
    earnings, prices = FinalSlots(view, table), _prices(view)
    for payment in view.payments:
        account = (payment.run_id, payment.worker)
        paid[account] += MoneyTally(payment.slots, payment.units, payment.amount_wei)
        newest[account] = payment
        due = earnings.due(payment, window_s)
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
    notes: list[str] = []
    for account, payment in newest.items():
        rows = earnings.rows(payment, window_s)
        unearned, untold = _unearned(table, payment, rows, paid[account].slots, doubts)
        found += unearned
        notes += untold
    total = sum(payment.amount_wei for payment in view.payments)
    return summarise(
        "payments are units × price, for accepted slots that are final",
        found,
        f"{len(view.payments)} payments, {format_tokens(total)} tokens",
        notes=notes,
        is_open=bool(notes),
    )


def _unearned(
    table: OutcomeTable, payment: PaymentView, rows: list[int], slots: int, doubts: Doubts
) -> tuple[list[Contradiction], list[str]]:
    """Return paid work that the worker did not earn, and work for which that is not known.

    The payments up to this one were for `slots` of the `rows`; their events do not say which.
    """
    if not doubts.wrong and not doubts.missing:
        return [], []
    places = [OutcomePlace(batch.batch_id, at) for batch, at in map(table.place, rows)]
    wrong = [place for place in places if place in doubts.wrong]
    missing = [place for place in places if place in doubts.missing]
    unpaid = max(0, len(rows) - slots)
    found, notes = [], []
    if len(wrong) > unpaid:
        what = "was paid for work that its evidence does not confirm"
        found = [
            replace(
                _paid(payment, Kind.PAYMENT_UNEARNED, f"{payment.worker} {what}"),
                batch_id=batch_id,
                position=position,
            )
            for batch_id, position in wrong
        ]
    elif wrong:
        notes.append(_untold(payment, wrong, "is not confirmed by its evidence"))
    if missing:
        notes.append(_untold(payment, missing, "could not be run again"))
    return found, notes


def _untold(payment: PaymentView, places: list[OutcomePlace], why: str) -> str:
    (batch_id, position), more = places[0], len(places) - 1
    others = f" and {more} more" if more else ""
    return (
        f"{payment.worker} was paid, and nobody can tell whether it earned {batch_id}:{position}"
        f"{others}: the work {why}"
    )


def _prices(view: Ledger) -> dict[RunId, tuple[int, int]]:
    """Return the lowest and the highest price of each run's batches."""
    prices: dict[RunId, tuple[int, int]] = {}
    for batch in view.batches.values():
        price = batch.price_per_unit
        least, most = prices.get(batch.run_id, (price, price))
        prices[batch.run_id] = (min(least, price), max(most, price))
    return prices


def _payment_problems(
    view: Ledger, payment: PaymentView, worth: tuple[int, int], sums: tuple[MoneyTally, MoneyTally]
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


# Money that nobody can be paid


def freed(view: Ledger, table: OutcomeTable) -> Check:
    """Return whether void batches pay nobody, and whether every batch gave back the money of the
    units that no record of it holds.
    """
    recorded = {
        batch.batch_id: int(records["units"].sum(dtype=np.int64))
        for batch, records in table.slices()
    }
    found = (
        problem
        for batch in view.batches.values()
        for problem in _freed_problems(view, batch, recorded.get(batch.batch_id))
    )
    voids = sum(batch.is_void for batch in view.batches.values())
    wei = sum(view.freed_wei.values())
    return summarise(
        "what nobody can be paid goes back to its run",
        found,
        f"{voids} void batches, {format_tokens(wei)} tokens given back",
    )


def _freed_problems(
    view: Ledger, batch: BatchView, recorded: int | None
) -> Iterator[Contradiction]:
    """Yield the problems of a batch whose records hold `recorded` units; None without outcomes."""
    kind, tx = Kind.OUTCOME_UNITS, batch.posted_tx
    units = 0 if recorded is None else max(0, batch.units - recorded)
    if batch.is_void:
        kind, tx, units = Kind.BATCH_VOID, batch.voided_tx, batch.units
        if recorded is not None:
            yield Contradiction(kind, "it is void and has outcomes", tx=tx, batch_id=batch.batch_id)
    worth, given = units * batch.price_per_unit, view.freed_wei.get(batch.batch_id, 0)
    # The owner of a run that was closed long ago may have reclaimed all of it.
    due = min(worth, view.reserved_before.get(batch.batch_id, worth))
    if given != due:
        what = f"{format_tokens(given)} tokens went back to its run, due were {format_tokens(due)}"
        yield Contradiction(kind, what, tx=tx, batch_id=batch.batch_id)


# Sums


def sums(view: Ledger, observed: Observed, runs: Collection[RunId]) -> Check:
    """Return whether the contracts hold what the events add up to, for some runs and for what all
    runs share.
    """
    stake, reward = held_stake(view), held_reward(view)
    found = (
        Contradiction(Kind.CONTRACT_STATE, problem)
        for problem in (
            *_shared_problems(view, stake, reward, observed),
            *_run_problems(view, observed, runs),
        )
    )
    return summarise(
        "sums equal what the contracts hold",
        found,
        f"{format_tokens(stake)} tokens of stake, {format_tokens(reward)} of reward",
    )


def _shared_problems(view: Ledger, stake: int, reward: int, observed: Observed) -> Iterator[str]:
    # A contract may hold more, because anybody can send it tokens.
    for what, ours, held in (
        ("stakes", stake, observed.vault_wei),
        ("rewards", reward, observed.escrow_wei),
    ):
        if held < ours:
            yield (
                f"{what} add up to {format_tokens(ours)} tokens, "
                f"the contract holds {format_tokens(held)}"
            )
    for what, count, theirs in (
        ("runs", len(view.runs), observed.runs),
        ("batches", len(view.batches), observed.batches),
    ):
        if count != theirs:
            yield f"the events tell of {count} {what}, the contracts of {theirs}"
    for run_id in observed.funds:
        if run_id not in view.runs:
            yield f"the events do not tell of run {run_id}"
    for who in sorted(observed.jurors ^ set(view.jurors())):
        what = "is" if who in observed.jurors else "is not"
        yield f"{who} {what} on the bench by the contract, and the events differ"


def _run_problems(view: Ledger, observed: Observed, runs: Collection[RunId]) -> Iterator[str]:
    for (run_id, owner), account in observed.stakes.items():
        told = view.stake(run_id, owner)
        if run_id != BENCH and run_id not in runs:
            continue
        if (told.active_wei, told.unbonding_wei) != (account.active_wei, account.unbonding_wei):
            events = f"{format_tokens(told.active_wei)} + {format_tokens(told.unbonding_wei)}"
            vault = f"{format_tokens(account.active_wei)} + {format_tokens(account.unbonding_wei)}"
            yield f"{owner} has {events} tokens in run {run_id} by events, by the vault {vault}"
    for run_id in runs:
        run, funds = view.runs[run_id], observed.funds.get(run_id)
        if funds is None:
            continue
        if (run.available_wei, run.reserved_wei) != (funds.available_wei, funds.reserved_wei):
            yield f"the escrow of run {run_id} says {funds}"
        if run.latest_version != observed.versions.get(run_id):
            yield f"the newest policy of run {run_id} is {observed.versions.get(run_id)}"
    for batch_id in sorted(observed.strange):
        batch = view.batches.get(batch_id)
        if batch is None or batch.run_id in runs:
            yield f"batch {batch_id} is not what its events tell"


def held_stake(view: Ledger) -> int:
    """Return the stake in wei that StakeVault must hold according to the events."""
    stakes = sum(stake.active_wei + stake.unbonding_wei for stake in view.stakes.values())
    held = (slash.amount_wei for slash in view.slashes if slash.state is SlashState.ESCROWED)
    return stakes + sum(held)


def held_reward(view: Ledger) -> int:
    """Return the money in wei that RewardEscrow must hold according to the events."""
    return sum(run.available_wei + run.reserved_wei for run in view.runs.values())
