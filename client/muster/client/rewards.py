"""What a worker has earned: final accepted outcomes that are not paid, their proofs, the claims.

Everything comes from the chain alone; the orchestrator is not asked.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from muster.chain import (
    BatchView,
    Chain,
    ChainView,
    Claim,
    EventReader,
    OutcomeProof,
    apply_poll,
)
from muster.client.quantities import format_tokens
from muster.protocol.ids import Address, RunId
from muster.protocol.messages import OutcomeRecord, Verdict

V = TypeVar("V", bound=ChainView)

CLAIM_SIZE = 100
"""Outcomes claimed in one transaction: about 1 million gas."""
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
    """The outcome."""

    def proof(self) -> OutcomeProof:
        """Return the outcome with its Merkle proof, as contracts take it."""
        return self.batch.prove(self.position)

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

    def amount_wei(self, earnings: Sequence[Earning]) -> int:
        """Return what some of them are worth."""
        return sum(earning.amount_wei for earning in earnings)


async def read_view(chain: Chain, view: V) -> V:
    """Return a view after it took in everything that happened on chain so far."""
    apply_poll(view, await EventReader(chain).poll())
    return view


def candidate_outcomes(view: ChainView, run_id: RunId, worker: Address) -> list[Earning]:
    """Return the worker's outcomes in a run that may be worth something, oldest first: recorded as
    accepted, or disputed. A slot is paid once, so its first acceptance counts.
    """
    account = view.workers.get(worker)
    found: dict[tuple[int, int], Earning] = {}
    for batch in sorted(view.batches.values(), key=lambda b: b.batch_id):
        if batch.run_id != run_id or account is None:
            continue
        for position, record in enumerate(batch.records or ()):
            if record.worker_id == account.worker_id:
                is_accepted = record.verdict is Verdict.ACCEPTED
                if is_accepted or record.leaf(batch.batch_id, position) in view.cases:
                    earning = Earning(run_id, batch, position, record)
                    found.setdefault((record.step, record.index), earning)
    return list(found.values())


async def find_earnings(chain: Chain, view: ChainView, run_id: RunId, worker: Address) -> Earnings:
    """Return what the worker earned in a run, and what of it can be claimed now."""
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

    outcomes = candidate_outcomes(view, run_id, worker)
    standings = await asyncio.gather(*(standing(outcome) for outcome in outcomes))

    def those(wanted: str) -> tuple[Earning, ...]:
        return tuple(o for o, s in zip(outcomes, standings, strict=True) if s == wanted)

    return Earnings(
        run_id=run_id,
        claimable=those("claimable"),
        pending=those("pending"),
        paid=those("paid"),
    )


async def claim(chain: Chain, earnings: Earnings, *, size: int = CLAIM_SIZE) -> list[str]:
    """Claim everything claimable, `size` outcomes per transaction; return the transactions."""
    transactions = []
    for part in _parts(earnings.claimable, size):
        receipt = await chain.escrow.claim(list(_claims(part)))
        transactions.append(receipt.tx_hash)
    return transactions


def _claims(earnings: Sequence[Earning]) -> Iterator[Claim]:
    """Yield one claim per batch."""
    positions: dict[int, list[int]] = defaultdict(list)
    for earning in earnings:
        positions[earning.batch.batch_id].append(earning.position)
    batches = {earning.batch.batch_id: earning.batch for earning in earnings}
    for batch_id, batch in batches.items():
        yield batch.claim(sorted(positions[batch_id]))


def describe_earnings(earnings: Earnings, transactions: Sequence[str]) -> dict[str, Any]:
    """Return what people and programs want to know about earnings, as JSON values."""
    report: dict[str, Any] = {"run": earnings.run_id}
    for name in ("claimable", "pending", "paid"):
        part: tuple[Earning, ...] = getattr(earnings, name)
        report[f"{name}_slots"] = len(part)
        report[f"{name}_tokens"] = format_tokens(earnings.amount_wei(part))
    if transactions:
        report["transactions"] = list(transactions)
    return report


def _parts(earnings: Sequence[Earning], size: int) -> Iterator[Sequence[Earning]]:
    for start in range(0, len(earnings), size):
        yield earnings[start : start + size]
