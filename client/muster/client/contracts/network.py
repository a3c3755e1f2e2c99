"""NETWORK.toml: what a network's contracts are asked to be, checked before anything else is done.

name = "my network"                        parts networks of the same parameters
profile = "testnet"                        dev, testnet or mainnet
chain_id = 11155111                        the endpoint must serve it
owner = "0x…"                              gets the initial supply; else the deploying account
insurance = "0x…"                          gets the insured share of slashes; else the owner

[parameters]                               what differs from the profile
challenge_window_s = "6 h"                 seconds, or text in s, min, h or d
required_worker_stake = "250 tokens"       wei, or text in tokens
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.client.quantities import parse_tokens
from muster.deploy import PROFILES, DeployParameters, Plan, Profile
from muster.deploy.parameters import DAY, FAUCET_CHAIN_ID, HOUR, MINUTE
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address

KEYS = ("name", "profile", "chain_id", "owner", "insurance", "parameters")
NUMBERS = frozenset(DeployParameters.model_fields) - {"owner", "insurance"}
"""What [parameters] may set."""
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
    """The network's."""
    profile: str
    """The kind of chain."""
    chain_id: int
    """The chain."""
    parameters: DeployParameters
    """What the contracts are fixed to, the profile's defaults included."""

    def plan(self, account: Address) -> Plan:
        """Return the deployment when an account makes it."""
        return Plan(self.name, account, self.parameters)


def read_network(path: Path) -> NetworkFile:
    """Return what a file asks for; raises ConfigError that names the value, its bound and why."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
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
            hint=f"profile dev; or rehearse on another chain id: anvil --chain-id {chain_id + 1}",
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
    # bool is an int to Python, and none to TOML.
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
