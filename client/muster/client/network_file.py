"""NETWORK.toml: the parameters of a network's contracts, validated before anything else.

name = "my network"                        distinguishes networks with the same parameters
profile = "testnet"                        dev, testnet or mainnet
chain_id = 11155111                        the endpoint must serve it
owner = "0x…"                              gets the initial supply; default: deploying account
insurance = "0x…"                          gets the insured share of slashes; default: owner

[parameters]                               changes to the profile
challenge_window_s = "6 h"                 seconds, or text in s, min, h or d
required_worker_stake = "250 tokens"       wei, or text in tokens

Also estimates the cost of its deployment: the node estimates gas per contract, nothing is sent.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.chain.abi import contract_abi
from muster.chain.outgoing import MARKET, Fees, market_fees
from muster.chain.rpc import Rpc, from_hex
from muster.client.quantities import format_coins, parse_tokens
from muster.deploy import PROFILES, DeployParameters, DeployPlan, Profile
from muster.deploy.parameters import DAY, FAUCET_CHAIN_ID, HOUR, MINUTE
from muster.deploy.plan import STEPS, call_of, created_count
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError, RpcError
from muster.protocol.ids import Address
from muster.settings import read_toml

KEYS = ("name", "profile", "chain_id", "owner", "insurance", "parameters")
NUMBERS = frozenset(DeployParameters.model_fields) - {"owner", "insurance"}
"""Names allowed in [parameters]."""
AMOUNTS = frozenset(
    {
        *("initial_supply", "required_worker_stake", "required_validator_stake"),
        *("required_juror_stake", "stake_per_unit", "bond", "juror_fee", "reporter_cap"),
    }
)
"""Parameters in token wei."""
_SECONDS = {"s": 1, "min": MINUTE, "h": HOUR, "d": DAY}
_LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class NetworkFile:
    """A network as its file describes it."""

    name: str
    """Name of the network."""
    profile: str
    """The kind of chain."""
    chain_id: int
    parameters: DeployParameters
    """Parameters of the contracts, with the profile's defaults."""

    def plan(self, account: Address) -> DeployPlan:
        """Return the deployment by this account."""
        return DeployPlan(self.name, account, self.parameters)


def read_network(path: Path) -> NetworkFile:
    """Return the network in a file; raises ConfigError that names a wrong value, its bound and the
    reason."""
    values = read_toml(path)
    try:
        return _network(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", hint=error.hint) from error


def _network(values: Mapping[str, Any]) -> NetworkFile:
    _refuse_unknown(values, KEYS, "key")
    name = _value(values, "name", str)
    if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise ConfigError(f"name {name!r} is not 1 to {_LONGEST_NAME} characters of text")
    chosen, chain_id = _value(values, "profile", str), _value(values, "chain_id", int)
    if chosen not in PROFILES:
        raise ConfigError(f"there is no profile {chosen!r}", hint=f"one of {', '.join(PROFILES)}")
    profile = PROFILES[chosen]
    _require_fitting_chain(chosen, profile, chain_id)
    given = values.get("parameters", {})
    if not isinstance(given, dict):
        raise ConfigError("parameters is no table", hint="write [parameters] above them")
    _refuse_unknown(given, NUMBERS, "parameter")
    numbers = {key: _number(key, value) for key, value in given.items()}
    accounts = {key: values[key] for key in ("owner", "insurance") if key in values}
    parameters = _parameters({**profile.defaults, **numbers, **accounts})
    if problem := profile.problem(parameters):
        raise ConfigError(problem, hint=f"the bounds of profile {chosen}; see {_TABLE}")
    return NetworkFile(name, chosen, chain_id, parameters)


_TABLE = "docs/reference/deployment.md"


def _require_fitting_chain(name: str, profile: Profile, chain_id: int) -> None:
    if chain_id < 1:
        raise ConfigError(f"chain_id {chain_id} is below 1: EIP-155 counts from there")
    if profile.has_faucet and chain_id != FAUCET_CHAIN_ID:
        raise ConfigError(
            f"profile {name} is for chain {FAUCET_CHAIN_ID} only, not for {chain_id}: its windows "
            "are too short for strangers",
            hint="profile testnet or mainnet",
        )
    if not profile.has_faucet and chain_id == FAUCET_CHAIN_ID:
        raise ConfigError(
            f"on chain {FAUCET_CHAIN_ID} anybody mints tokens, which profile {name} excludes",
            hint="use profile dev, or rehearse on another chain id: anvil --chain-id "
            f"{chain_id + 1}",
        )


def _parameters(values: Mapping[str, Any]) -> DeployParameters:
    try:
        return DeployParameters.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        said = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}: {said}" if where else said, hint=f"see {_TABLE}") from error


def _refuse_unknown(values: Mapping[str, Any], known: Collection[str], what: str) -> None:
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"see {_TABLE}"
            raise ConfigError(f"unknown {what} {key!r}", hint=hint)


def _value(values: Mapping[str, Any], key: str, kind: type) -> Any:
    if key not in values:
        raise ConfigError(f"{key} is missing", hint="name, profile and chain_id are needed")
    value = values[key]
    # In Python a bool is an int, in TOML it is not.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"{key} {value!r} is no {'number' if kind is int else 'text'}")
    return value


def _number(key: str, value: Any) -> int:
    """Return a parameter in its own unit: seconds, token wei, or a bare number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    amount, _, unit = value.partition(" ") if isinstance(value, str) else ("", "", "")
    if key in AMOUNTS and unit == "tokens":
        return parse_tokens(amount)
    if key.endswith("_s") and unit in _SECONDS and amount.isdecimal():
        return int(amount) * _SECONDS[unit]
    fitting = '"100 tokens" or wei' if key in AMOUNTS else "a whole number"
    fitting = f'"6 h" (of {", ".join(_SECONDS)}) or seconds' if key.endswith("_s") else fitting
    raise ConfigError(f"{key} {value!r} is not understood", hint=f"write {fitting}")


_BALANCE = hex(10**24)
"""Assumed balance of the account while gas is estimated."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One transaction of a deployment."""

    contract: str
    """Contract that it creates."""
    address: Address
    """Address of the contract."""
    gas: int
    """Gas of the transaction; 0 when the contract exists already."""
    is_estimated: bool = True
    """Whether the node estimated the gas; else it is computed from sizes."""


@dataclass(frozen=True, slots=True)
class DeploymentCost:
    """Estimated cost of a deployment."""

    costs: list[Cost]
    """In the order of deployment."""
    base_fee_wei: int
    """Base fee per gas of the latest block."""
    tip_wei: int
    """Priority fee per gas."""
    balance_wei: int
    """The account's balance of the chain's coin."""

    @property
    def gas(self) -> int:
        """Gas of all transactions."""
        return sum(cost.gas for cost in self.costs)

    def fee_wei(self, gas: int) -> int:
        """Return the price of gas at the current base fee."""
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


async def estimate(rpc: Rpc, plan: DeployPlan, chain_id: int) -> DeploymentCost:
    """Return the cost of deploying the contracts that are not on chain yet."""
    count = await created_count(rpc, plan)
    costs = [await _cost(rpc, plan, chain_id, place, count) for place in range(len(STEPS))]
    block, tip, balance = await rpc.try_batch(
        [*MARKET, ("eth_getBalance", [plan.account, "latest"])]
    )
    if isinstance(balance, RpcError):
        raise balance
    fees: Fees = market_fees(block, tip)
    base_fee = (fees.max_wei - fees.tip_wei) // 2
    return DeploymentCost(costs, base_fee, fees.tip_wei, from_hex(balance))


async def _cost(rpc: Rpc, plan: DeployPlan, chain_id: int, place: int, count: int) -> Cost:
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
        # Not every endpoint supports estimates with state overrides.
        return Cost(name, at, _gas_by_size(name, data), is_estimated=False)


def _state_before(
    plan: DeployPlan, chain_id: int, place: int, count: int
) -> dict[str, dict[str, str]]:
    """Return the state before a step as overrides for `eth_estimateGas`."""
    state: dict[str, dict[str, str]] = {plan.account: {"balance": _BALANCE}}
    if place:
        state[plan.factory] = {"nonce": hex(place), "code": hex0x(plan.factory_on_chain(0))}
    codes = plan.codes_on(chain_id)
    for name in STEPS[max(count, 1) : place]:
        state[plan.addresses[name]] = {"code": hex0x(codes[plan.addresses[name]])}
    return state


def _gas_by_size(name: str, data: bytes) -> int:
    """Return the approximate gas of a creation: call data (EIP-2028), code, hashing it twice,
    storage."""
    call = sum(16 if byte else 4 for byte in data)
    return 21_000 + call + 32_000 + 200 * len(contract_abi(name).runtime) + 60_000
