"""The books of a simulated chain: whether they balance, and everyone paid at the end."""

import asyncio
from functools import partial

from muster.lab.simulator.chain import SimulatedChain
from muster.lab.simulator.model.network import Network
from muster.lab.simulator.model.work import OPEN, OVERTURNED, Batch, Claim, Record
from muster.protocol.errors import ChainError
from muster.protocol.messages import Verdict

TRIED_TWICE = 3
"""Workers that try to be paid a second time for the same."""


def standing_verdict(state: Network, batch: Batch, place: int) -> int:
    """Return the verdict on a submission that stands: the recorded one, or a jury's."""
    record = batch.records[place]
    case = state.cases.get(("outcome", batch.header.batch, place, record))
    overturned = case is not None and case.status == OVERTURNED
    return case.leading()[0] >> 8 if case and overturned else record.verdict


async def claim_all(chain: SimulatedChain) -> None:
    """Claim every worker's accepted final outcomes, and let some try it a second time."""
    claims: dict[int, list[Claim]] = {}
    for batch in chain.state.batches.values():
        accepted: dict[int, list[tuple[int, Record]]] = {}
        for place, record in enumerate(batch.records):
            if standing_verdict(chain.state, batch, place) == Verdict.ACCEPTED:
                accepted.setdefault(record.number, []).append((place, record))
        for number, chosen in sorted(accepted.items()):
            places, records = zip(*chosen, strict=True)
            claims.setdefault(number, []).append(Claim(batch.header, places, records, True))
    async with asyncio.TaskGroup() as paying:
        for number in sorted(claims):
            call = partial(_claim, claims[number])
            paying.create_task(chain.send("claim", call, size=len(claims[number])))
    for number in sorted(claims)[:TRIED_TWICE]:
        try:
            await chain.send("claim again", partial(_claim, claims[number][:1]))
        except ChainError:
            continue
        raise AssertionError(f"worker {number} was paid twice")


def _claim(claims: list[Claim], state: Network) -> None:
    state.claim(claims)


def require_sound(state: Network) -> None:
    """Raise AssertionError unless the contracts' books balance."""
    held = sum(a.active + a.unbonding for a in state.stakes.values())
    escrowed = sum(e.amount for e in state.escrows.values() if e.status == 1)
    assert state.balances["StakeVault"] == held + escrowed, "the vault's stake does not add up"
    funds = sum(f.available + f.reserved for f in state.funds.values())
    assert state.balances["RewardEscrow"] == funds, "the escrow's money does not add up"
    owed = state.fixed.bond * len(state.bonds)
    for case in state.cases.values():
        owed += state.fixed.bond * len(case.claims) if case.status == OPEN else 0
        right = list(case.revealed.values()).count(case.leading()[0]) - len(case.paid)
        owed += case.fee * right
    assert state.balances.get("DisputeCourt", 0) == owed, "the court's bonds and fees do not add up"
    assert all(amount >= 0 for amount in state.balances.values()), "somebody owes tokens"
