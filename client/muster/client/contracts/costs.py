"""What a deployment would cost now: gas by contract, asked of the node, and nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass

from muster.chain.abi import contract_abi
from muster.chain.outgoing import Fees
from muster.chain.quantities import from_hex
from muster.chain.rpc import Rpc
from muster.chain.watching import MARKET, market_fees
from muster.client.quantities import format_coins
from muster.deploy import Plan
from muster.deploy.deploying import STEPS, call_of, created_count
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError, RpcError
from muster.protocol.ids import Address

_BALANCE = hex(10**24)
"""What the account is taken to hold while gas is estimated."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One transaction of a deployment."""

    contract: str
    """What it makes."""
    address: Address
    """Where."""
    gas: int
    """What it takes; 0 when the contract is there already."""
    is_estimated: bool = True
    """Whether the node ran it; else gas follows from sizes."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A deployment that is not sent."""

    costs: list[Cost]
    """In the order of deployment."""
    base_fee_wei: int
    """The latest block's, per gas."""
    tip_wei: int
    """What producers are offered, per gas."""
    balance_wei: int
    """What the account holds of the chain's coin."""

    @property
    def gas(self) -> int:
        """What all of it takes."""
        return sum(cost.gas for cost in self.costs)

    def fee_wei(self, gas: int) -> int:
        """Return what gas costs at the present base fee."""
        return gas * (self.base_fee_wei + self.tip_wei)

    def require_funds(self, account: Address) -> None:
        """Raise ConfigError when an account cannot pay for the deployment now."""
        needed = self.fee_wei(self.gas)
        if self.balance_wei < needed:
            raise ConfigError(
                f"{account} holds {format_coins(self.balance_wei)} of the chain's coin, the "
                f"deployment takes {format_coins(needed)} at the present fee",
                hint="send it some more than that; --dry-run shows the cost of each contract",
            )


async def estimate(rpc: Rpc, plan: Plan, chain_id: int) -> Estimate:
    """Return what it would cost to send what a plan lacks on chain."""
    count = await created_count(rpc, plan)
    costs = [await _cost(rpc, plan, chain_id, place, count) for place in range(len(STEPS))]
    block, tip, balance = await rpc.try_batch(
        [*MARKET, ("eth_getBalance", [plan.account, "latest"])]
    )
    if isinstance(balance, RpcError):
        raise balance
    fees: Fees = market_fees(block, tip)
    base_fee = (fees.max_wei - fees.tip_wei) // 2
    return Estimate(costs, base_fee, fees.tip_wei, from_hex(balance))


async def _cost(rpc: Rpc, plan: Plan, chain_id: int, place: int, count: int) -> Cost:
    name = STEPS[place]
    at = plan.addresses.get(name, plan.factory)
    if place < count:
        return Cost(name, at, 0)
    to, data = call_of(plan, name)
    call = {"from": plan.account, "to": to, "data": hex0x(data)}
    try:
        before = _state_before(plan, chain_id, place, count)
        gas = from_hex(await rpc.call("eth_estimateGas", call, "latest", before))
        return Cost(name, at, gas)
    except RpcError:
        # Not every endpoint estimates on a state that is not there yet.
        return Cost(name, at, _gas_by_size(name, data), is_estimated=False)


def _state_before(plan: Plan, chain_id: int, place: int, count: int) -> dict[str, dict[str, str]]:
    """Return what differs from the chain when it is a step's turn, as nodes take overrides."""
    state: dict[str, dict[str, str]] = {plan.account: {"balance": _BALANCE}}
    if place:
        state[plan.factory] = {"nonce": hex(place), "code": hex0x(plan.factory_on_chain(0))}
    codes = plan.codes_on(chain_id)
    for name in STEPS[max(count, 1) : place]:
        state[plan.addresses[name]] = {"code": hex0x(codes[plan.addresses[name]])}
    return state


def _gas_by_size(name: str, data: bytes) -> int:
    """Return about what creation takes: call data (EIP-2028), code, twice its hashing, storage."""
    call = sum(16 if byte else 4 for byte in data)
    return 21_000 + call + 32_000 + 200 * len(contract_abi(name).runtime) + 60_000
