"""What became of traps: which were laid, what was said about them, and by whom. Pure.

Everything follows from the revealed plan and the chain; the trap worker's journal only tells where
no trap could be laid. The commitment is an `approve` of the token, which says a number in public
and costs 46,000 gas: any account may send it, so nothing leads from it to the trap worker.

A trap finds validators that sign a wrong verdict, all of a run in league included, and costs them
stake. A lone lazy one among honest ones signs no verdict that is posted: proof of checking finds
that one, see `muster.client.validator.checking`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from muster.chain.structs import Offence
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, Hash32, to_address
from muster.protocol.messages import OutcomeRecord, Verdict
from muster.protocol.traps import PLANS, Trap, TrapPlan

if TYPE_CHECKING:
    from muster.chain import BatchView, Chain, ChainView

Laid = Mapping[tuple[int, int], Mapping[str, Any]]
"""What the trap worker noted, by step and index."""


class Fate(StrEnum):
    """What became of a trap."""

    CAUGHT = "caught"
    """It was not accepted: whoever signed had checked."""
    MISSED = "missed"
    """It was accepted: whoever signed had not."""
    CHALLENGED = "challenged"
    """It was accepted, and a jury decides."""
    OVERTURNED = "overturned"
    """It was accepted, a jury found otherwise, and the signers can be slashed."""
    HONEST = "honest"
    """No way of spoiling a sample failed the checks here: the file is no trap."""


@dataclass(frozen=True, slots=True)
class Found:
    """A planned slot with an outcome."""

    batch_id: int
    position: int
    """Its place there."""
    record: OutcomeRecord
    """What was recorded."""
    fate: Fate
    """What became of it."""
    signers: tuple[Address, ...]
    """Who signed that."""
    trap: Trap
    """What the plan says."""
    slashed: Mapping[Address, int] = field(default_factory=dict)
    """Those of them who lost stake for it, and how much, in wei."""

    @property
    def name(self) -> str:
        """The submission, as commands take it."""
        return f"{self.batch_id}:{self.position}"


@dataclass(frozen=True, slots=True)
class PlanOnChain:
    """Where a plan's commitment is on chain."""

    block_number: int
    tx_hash: str
    by: Address
    """Who sent it."""


def find_traps(view: ChainView, plan: TrapPlan, laid: Laid | None = None) -> list[Found]:
    """Return the planned slots that have outcomes, in the order of their batches."""
    account = view.workers.get(plan.worker)
    found = []
    for batch in sorted(view.batches.values(), key=lambda each: each.batch_id):
        if batch.run_id != plan.run_id or account is None:
            continue
        for position, record in enumerate(batch.records or ()):
            trap = plan.trap_at(record.step, record.index)
            if record.worker_id == account.worker_id and trap is not None:
                found.append(_found(view, batch, position, trap, laid))
    return found


def _found(
    view: ChainView, batch: BatchView, position: int, trap: Trap, laid: Laid | None
) -> Found:
    record = (batch.records or ())[position]
    seats = view.runs[batch.run_id].seats
    signers = tuple(sorted(who for who, bit in seats.items() if batch.signers & bit))
    note = (laid or {}).get((record.step, record.index))
    is_honest = note is not None and note["kind"] is None
    return Found(
        batch_id=batch.batch_id,
        position=position,
        record=record,
        fate=Fate.HONEST if is_honest else _fate(view, batch, position),
        signers=signers,
        trap=trap,
        slashed=_slashed(view, batch, signers),
    )


def _slashed(view: ChainView, batch: BatchView, signers: Iterable[Address]) -> dict[Address, int]:
    """Return which signers lost how much stake for a wrong verdict in a batch."""
    return {
        slash.owner: slash.amount_wei
        for slash in view.slashes
        if slash.offence is Offence.WRONG_VERDICT
        and (slash.run_id, slash.tag) == (batch.run_id, batch.batch_id)
        and slash.owner in signers
    }


def _fate(view: ChainView, batch: BatchView, position: int) -> Fate:
    record = (batch.records or ())[position]
    if record.verdict is not Verdict.ACCEPTED:
        return Fate.CAUGHT
    case = view.cases.get(record.leaf(batch.batch_id, position))
    if case is None or (case.closed and not case.overturned):
        return Fate.MISSED
    return Fate.OVERTURNED if case.overturned else Fate.CHALLENGED


def score(found: list[Found]) -> dict[Address, dict[str, int]]:
    """Return by validator how many traps it signed the right outcome of, and the wrong one."""
    right: Counter[Address] = Counter()
    wrong: Counter[Address] = Counter()
    for each in found:
        if each.fate is not Fate.HONEST:
            (right if each.fate is Fate.CAUGHT else wrong).update(each.signers)
    return {who: {"caught": right[who], "missed": wrong[who]} for who in sorted({*right, *wrong})}


def to_challenge(found: list[Found]) -> list[Found]:
    """Return the traps that were accepted and that nobody has challenged."""
    return [each for each in found if each.fate is Fate.MISSED]


# The commitment


async def anchor_plan(chain: Chain, plan: TrapPlan) -> str:
    """Put a plan's commitment on chain and return the transaction's hash.

    An approval for an address that has no key moves nothing, ever.
    """
    commitment = int.from_bytes(plan.commitment(), "big")
    return (await chain.token.approve(PLANS, commitment)).tx_hash


async def find_anchor(chain: Chain, plan: TrapPlan) -> PlanOnChain | None:
    """Return the first place where a plan's commitment is on chain; None when it is not."""
    wanted = int.from_bytes(plan.commitment(), "big")
    query = {
        "address": chain.deployment.contracts["MusterToken"],
        "topics": [hex0x(APPROVAL), None, "0x" + PLANS[2:].lower().rjust(64, "0")],
        "fromBlock": "earliest",
        "toBlock": "latest",
    }
    for log in await chain.rpc.call("eth_getLogs", query):
        if int(log["data"], 16) == wanted:
            by = to_address("0x" + log["topics"][1][-40:])
            return PlanOnChain(int(log["blockNumber"], 16), log["transactionHash"], by)
    return None


def require_before(anchor: PlanOnChain | None, view: ChainView, found: list[Found]) -> PlanOnChain:
    """Return the anchor; raises ConfigError unless it is older than every trap's batch."""
    if anchor is None:
        raise ConfigError(
            "the plan's commitment is not on chain: nobody could tell it from an excuse",
            hint="muster validator trap plan writes it there; is this the right plan, --rpc?",
        )
    early = [f for f in found if view.batches[f.batch_id].block_number <= anchor.block_number]
    if early:
        raise ConfigError(
            f"submission {early[0].name} was committed before the plan, in block "
            f"{view.batches[early[0].batch_id].block_number}",
            hint=f"the plan is in block {anchor.block_number}: it proves nothing about that file",
        )
    return anchor


APPROVAL = Hash32(bytes.fromhex("8c5be1e5ebec7d5bd14f71427d1e84f3dd0314c0f7b2291e5b200ac8c7c3b925"))
"""Keccak-256 of `Approval(address,address,uint256)` (ERC-20)."""
