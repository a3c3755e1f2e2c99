"""What a worker has earned: final accepted outcomes that are not paid, their proofs, the claims.

Everything comes from the chain alone, but for the submissions of overdue batches, which stand as
claimed: the orchestrator shows those.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from muster.chain import (
    BatchView,
    Chain,
    ChainView,
    Claim,
    OutcomeProof,
)
from muster.client.case_proofs import as_claimed
from muster.client.overdue import Shown, overdue_batches, read_overdue
from muster.client.quantities import format_tokens
from muster.protocol.ids import Address, RunId
from muster.protocol.merkle import merkle_multi_proof, merkle_proof
from muster.protocol.messages import OutcomeRecord, Submission, Verdict

CLAIM_SIZE = 100
"""Outcomes claimed in one transaction: about 1 million gas."""
NOTHING_SHOWN: Shown = {}
"""No overdue batch is known."""
PARALLEL_CALLS = 16
"""Questions asked of the RPC endpoint at once."""


@dataclass(frozen=True, slots=True)
class Earning:
    """One outcome that a worker is, was or may be paid for."""

    run_id: RunId
    """The run that pays."""
    batch: BatchView
    """The batch it was recorded in."""
    position: int
    """Its place there."""
    record: OutcomeRecord
    """The outcome; as claimed, when nobody judged it in time."""
    submissions: tuple[Submission, ...] = ()
    """All of the batch, when it is overdue."""

    def proof(self) -> OutcomeProof:
        """Return the outcome with its Merkle proof, as contracts take it."""
        if not self.submissions:
            return self.batch.prove(self.position)
        proof = merkle_proof([each.leaf() for each in self.submissions], self.position)
        return OutcomeProof(self.batch.header(), self.position, self.record.to_bytes(), proof)

    @property
    def amount_wei(self) -> int:
        """What it is worth, if accepted."""
        return self.record.units * self.batch.price_per_unit


@dataclass(frozen=True, slots=True)
class Earnings:
    """A worker's accepted outcomes in one run, by what can be done about them."""

    run_id: RunId
    """The run."""
    claimable: tuple[Earning, ...]
    """Final and unpaid."""
    pending: tuple[Earning, ...]
    """Still open to a challenge."""
    paid: tuple[Earning, ...]
    """Claimed before."""
    unseen: tuple[int, ...] = ()
    """Overdue batches whose submissions nobody showed: some may be the worker's."""

    def amount_wei(self, earnings: Sequence[Earning]) -> int:
        """Return what some of them are worth."""
        return sum(earning.amount_wei for earning in earnings)


def candidate_outcomes(
    view: ChainView, run_id: RunId, worker: Address, shown: Shown = NOTHING_SHOWN
) -> list[Earning]:
    """Return the worker's outcomes in a run that may be worth something, oldest first: recorded as
    accepted, disputed, or overdue. A slot is paid once, so its first acceptance counts.
    """
    account = view.workers.get(worker)
    found: dict[tuple[int, int], Earning] = {}
    for batch in sorted(view.batches.values(), key=lambda b: b.batch_id):
        if batch.run_id != run_id or account is None:
            continue
        submissions = tuple(shown.get(batch.batch_id, ()))
        mine = (
            _posted(view, batch, account.worker_id)
            if batch.records is not None
            else (_overdue(submissions, worker, account.worker_id))
        )
        for position, record in mine:
            earning = Earning(run_id, batch, position, record, submissions)
            found.setdefault((record.step, record.index), earning)
    return list(found.values())


def _posted(
    view: ChainView, batch: BatchView, worker_id: int
) -> Iterator[tuple[int, OutcomeRecord]]:
    for position, record in enumerate(batch.records or ()):
        if record.worker_id == worker_id:
            is_accepted = record.verdict is Verdict.ACCEPTED
            if is_accepted or record.leaf(batch.batch_id, position) in view.cases:
                yield position, record


def _overdue(
    submissions: Sequence[Submission], worker: Address, worker_id: int
) -> Iterator[tuple[int, OutcomeRecord]]:
    for position, submission in enumerate(submissions):
        if submission.worker == worker:
            record = as_claimed(submission, worker_id)
            # What does not fit a record has no proof that the ledger would take.
            if (record.rollouts, record.units) == (submission.rollouts, submission.units):
                yield position, record


async def find_earnings(
    chain: Chain,
    view: ChainView,
    run_id: RunId,
    worker: Address,
    *,
    orchestrator: str | None = None,
) -> Earnings:
    """Return what the worker earned in a run, and what of it can be claimed now.

    With an orchestrator to ask, also of batches that nobody judged in time.
    """
    asking = asyncio.Semaphore(PARALLEL_CALLS)

    async def standing(earning: Earning) -> str:
        async with asking:
            record = earning.record
            if await chain.escrow.is_paid(run_id, worker, record.step, record.index):
                return "paid"
            standing = await chain.ledger.standing_of(earning.proof())
            if standing.verdict is not Verdict.ACCEPTED:
                return "overturned"
            return "claimable" if standing.is_final else "pending"

    overdue = await _find_overdue(chain, view, run_id)
    shown = await read_overdue(overdue, orchestrator)
    outcomes = candidate_outcomes(view, run_id, worker, shown)
    standings = await asyncio.gather(*(standing(outcome) for outcome in outcomes))

    def those(wanted: str) -> tuple[Earning, ...]:
        return tuple(o for o, s in zip(outcomes, standings, strict=True) if s == wanted)

    return Earnings(
        run_id=run_id,
        claimable=those("claimable"),
        pending=those("pending"),
        paid=those("paid"),
        unseen=tuple(batch.batch_id for batch in overdue if batch.batch_id not in shown),
    )


async def _find_overdue(chain: Chain, view: ChainView, run_id: RunId) -> list[BatchView]:
    if not any(batch.records is None for batch in view.batches.values()):
        return []
    deadline_s = await chain.ledger.outcome_deadline()
    now = await chain.now()
    return overdue_batches(view, run_id, now=now, outcome_deadline_s=deadline_s)


async def claim(chain: Chain, earnings: Earnings, *, size: int = CLAIM_SIZE) -> list[str]:
    """Claim everything claimable, `size` outcomes per transaction; return the transactions."""
    transactions = []
    for part in _parts(earnings.claimable, size):
        receipt = await chain.escrow.claim(list(_claims(part)))
        transactions.append(receipt.tx_hash)
    return transactions


def _claims(earnings: Sequence[Earning]) -> Iterator[Claim]:
    """Yield one claim per batch."""
    by_batch: dict[int, list[Earning]] = defaultdict(list)
    for earning in earnings:
        by_batch[earning.batch.batch_id].append(earning)
    for group in by_batch.values():
        yield _claim(sorted(group, key=lambda earning: earning.position))


def _claim(group: Sequence[Earning]) -> Claim:
    batch, positions = group[0].batch, [earning.position for earning in group]
    if not group[0].submissions:
        return batch.claim(positions)
    leaves = [submission.leaf() for submission in group[0].submissions]
    return Claim(
        batch=batch.header(),
        positions=positions,
        records=b"".join(earning.record.to_bytes() for earning in group),
        siblings=merkle_multi_proof(leaves, positions),
    )


def describe_earnings(
    earnings: Earnings, worker: Address, transactions: Sequence[str]
) -> dict[str, Any]:
    """Return what programs want to know about earnings, as JSON values.

    With transactions, which claimed all that was claimable, as things are after them.
    """
    report: dict[str, Any] = {"run": earnings.run_id, "worker": worker}
    if transactions:
        report["claimed_slots"] = len(earnings.claimable)
        report["claimed_tokens"] = format_tokens(earnings.amount_wei(earnings.claimable))
        paid = (*earnings.paid, *earnings.claimable)
        earnings = replace(earnings, claimable=(), paid=paid)
    for name in ("claimable", "pending", "paid"):
        part: tuple[Earning, ...] = getattr(earnings, name)
        report[f"{name}_slots"] = len(part)
        report[f"{name}_tokens"] = format_tokens(earnings.amount_wei(part))
    if earnings.unseen:
        report["overdue_batches_unseen"] = list(earnings.unseen)
    if transactions:
        report["transactions"] = list(transactions)
    return report


def facts_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return described earnings as names and lines for people."""
    run = found["run"]
    transactions = found.get("transactions", [])

    def line(name: str, end: str = "") -> str | None:
        if not found.get(f"{name}_slots"):
            return None
        return f"{found[f'{name}_tokens']} tokens for {found[f'{name}_slots']} submissions{end}"

    claimed = line("claimed", f" of run {run}")
    return {
        "claimed": claimed,
        "to": f"{found['worker']}, its wallet" if claimed else None,
        "in": transactions,
        "worker": None if claimed else f"{found['worker']}, run {run}",
        "claimable": line("claimable", f": muster rewards claim --run {run} --keystore FILE")
        or "nothing now",
        "pending": line("pending", ", until nobody can challenge them any more"),
        "paid": line("paid", " in all"),
    }


def _parts(earnings: Sequence[Earning], size: int) -> Iterator[Sequence[Earning]]:
    for start in range(0, len(earnings), size):
        yield earnings[start : start + size]
