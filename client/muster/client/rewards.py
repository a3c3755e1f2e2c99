"""A worker's rewards: unpaid final accepted outcomes, their proofs, and claims for them.

Everything comes from the chain alone. Unjudged work is not paid: see `muster explain`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from muster.chain import BatchView, Chain, ChainView, OutcomeProof, Receipt, RewardClaim
from muster.client.quantities import format_coins, format_tokens
from muster.protocol.errors import ContractRevert
from muster.protocol.ids import Address, RunId
from muster.protocol.messages import OutcomeRecord, Verdict

CLAIM_SIZE = 100
"""Outcomes claimed in one transaction: about 1 million gas."""
STEP_BYTES = 600
"""Upper bound of a signed transaction's bytes, without its lists."""
CLAIM_BYTES = 640
"""Upper bound of the bytes of a claim's header, offsets, lengths and padding."""
PARALLEL_CALLS = 16
"""Most parallel requests to the RPC endpoint."""
_ALL_PAID = "EscrowAllPaid"


@dataclass(frozen=True, slots=True)
class Earning:
    """An outcome for which a worker was, is or may be paid."""

    run_id: RunId
    """The run that pays."""
    batch: BatchView
    """The batch it was recorded in."""
    position: int
    """Its place in the batch."""
    record: OutcomeRecord

    def proof(self) -> OutcomeProof:
        """Return the outcome with its Merkle proof, as contracts take it."""
        return self.batch.prove(self.position)

    @property
    def amount_wei(self) -> int:
        """Its price, if it is accepted."""
        return self.record.units * self.batch.price_per_unit


@dataclass(frozen=True, slots=True)
class Earnings:
    """A worker's accepted outcomes in one run, by state."""

    run_id: RunId
    claimable: tuple[Earning, ...]
    """Final and unpaid."""
    pending: tuple[Earning, ...]
    """Still open to a challenge."""
    paid: tuple[Earning, ...]
    """Already claimed."""

    def amount_wei(self, earnings: Sequence[Earning]) -> int:
        """Return the sum of some outcomes' prices."""
        return sum(earning.amount_wei for earning in earnings)


def candidate_outcomes(view: ChainView, run_id: RunId, worker: Address) -> list[list[Earning]]:
    """Return the worker's outcomes in a run that are recorded as accepted, or disputed: one list
    for each slot, oldest first.
    """
    account = view.workers.get(worker)
    found: dict[tuple[int, int], list[Earning]] = defaultdict(list)
    for batch in sorted(view.batches.values(), key=lambda b: b.batch_id):
        if batch.run_id != run_id or account is None:
            continue
        for position, record in _worth_something(view, batch, account.worker_id):
            earning = Earning(run_id, batch, position, record)
            found[record.step, record.index].append(earning)
    return list(found.values())


def _worth_something(
    view: ChainView, batch: BatchView, worker_id: int
) -> Iterator[tuple[int, OutcomeRecord]]:
    for position, record in enumerate(batch.records or ()):
        if record.worker_id == worker_id:
            is_accepted = record.verdict is Verdict.ACCEPTED
            if is_accepted or record.leaf(batch.batch_id, position) in view.cases:
                yield position, record


async def find_earnings(chain: Chain, view: ChainView, run_id: RunId, worker: Address) -> Earnings:
    """Return a worker's outcomes in a run, by whether they can be claimed now.

    A slot is paid once: the first of its outcomes that stands as accepted counts.
    """
    asking = asyncio.Semaphore(PARALLEL_CALLS)

    async def standing(slot: list[Earning]) -> tuple[str, Earning]:
        async with asking:
            record = slot[0].record
            is_paid = await chain.escrow.is_paid(run_id, worker, record.step, record.index)
            for earning in slot:
                if is_paid and earning is slot[-1]:
                    return "paid", earning  # no other outcome is left that was paid
                standing = await chain.ledger.standing_of(earning.proof())
                if standing.verdict is Verdict.ACCEPTED:
                    state = "claimable" if standing.is_final else "pending"
                    return "paid" if is_paid else state, earning
            return "overturned", slot[0]

    slots = candidate_outcomes(view, run_id, worker)
    standings = await asyncio.gather(*(standing(slot) for slot in slots))

    def those(wanted: str) -> tuple[Earning, ...]:
        return tuple(earning for state, earning in standings if state == wanted)

    return Earnings(
        run_id=run_id,
        claimable=those("claimable"),
        pending=those("pending"),
        paid=those("paid"),
    )


async def claim(chain: Chain, earnings: Earnings, *, size: int = CLAIM_SIZE) -> list[Receipt]:
    """Claim everything claimable, `size` outcomes per transaction; return the receipts.

    Anyone may claim for the worker. What somebody has claimed meanwhile is passed over.
    """
    receipts = []
    for part in _parts(earnings.claimable, size):
        try:
            receipts.append(await chain.escrow.claim(list(_claims(part))))
        except ContractRevert as error:
            if error.name != _ALL_PAID:
                raise
    return receipts


def size_of_all(earnings: Earnings, *, size: int = CLAIM_SIZE) -> int:
    """Return an upper bound of the signed bytes of the transactions that claim everything."""
    return sum(size_of_claims(list(_claims(part))) for part in _parts(earnings.claimable, size))


def size_of_claims(claims: Sequence[RewardClaim]) -> int:
    """Return an upper bound of the signed bytes of one transaction with these claims."""
    words = sum(len(each.positions) + len(each.siblings) for each in claims)
    records = sum(len(each.records) for each in claims)
    return STEP_BYTES + CLAIM_BYTES * len(claims) + 32 * words + records


def _claims(earnings: Sequence[Earning]) -> Iterator[RewardClaim]:
    """Yield one claim per batch."""
    by_batch: dict[int, list[Earning]] = defaultdict(list)
    for earning in earnings:
        by_batch[earning.batch.batch_id].append(earning)
    for group in by_batch.values():
        yield group[0].batch.claim(sorted(earning.position for earning in group))


def describe_earnings(
    earnings: Earnings, worker: Address, receipts: Sequence[Receipt]
) -> dict[str, Any]:
    """Return earnings as JSON values, as of after the claims with these receipts.

    Slots that somebody else claimed meanwhile are paid, but not claimed here.
    """
    report: dict[str, Any] = {"run": earnings.run_id, "worker": worker}
    if receipts:
        events = [event for receipt in receipts for event in receipt.events]
        claimed = [event.args for event in events if event.name == "RewardClaimed"]
        report["claimed_slots"] = sum(each["slots"] for each in claimed)
        report |= _amount("claimed", sum(each["amount"] for each in claimed))
        paid = (*earnings.paid, *earnings.claimable)
        earnings = replace(earnings, claimable=(), paid=paid)
    for name in ("claimable", "pending", "paid"):
        part: tuple[Earning, ...] = getattr(earnings, name)
        report[f"{name}_slots"] = len(part)
        report |= _amount(name, earnings.amount_wei(part))
    if receipts:
        report["transactions"] = [receipt.tx_hash for receipt in receipts]
        report["cost_wei"] = str(sum(receipt.cost_wei for receipt in receipts))
    return report


def _amount(name: str, wei: int) -> dict[str, str]:
    return {f"{name}_tokens": format_tokens(wei), f"{name}_wei": str(wei)}


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
        "cost": f"{format_coins(int(found['cost_wei']))} for gas" if transactions else None,
        "worker": None if claimed else f"{found['worker']}, run {run}",
        "claimable": line("claimable", f": muster rewards claim --run {run} --keystore FILE")
        or "nothing now",
        "pending": line("pending", ", until nobody can challenge them any more"),
        "paid": line("paid", " in all"),
    }


def _parts(earnings: Sequence[Earning], size: int) -> Iterator[Sequence[Earning]]:
    for start in range(0, len(earnings), size):
        yield earnings[start : start + size]
