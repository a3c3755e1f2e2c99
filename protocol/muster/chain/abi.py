"""The ABI of the nine contracts: selectors, topics, argument types, from the committed artifacts.

Addresses and ABIs are never copied by hand: `artifacts/*.json` is written by
`contracts/script/export_artifacts.py` from the compiled contracts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eth_abi.abi import encode as abi_encode
from eth_abi.exceptions import EncodingError as AbiEncodingError
from eth_utils.abi import abi_to_signature, collapse_if_tuple

from muster.chain.codec import Decoder, compile_decoder
from muster.chain.conversion import to_abi
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, EncodingError

CONTRACTS = (
    "MusterToken",
    "JuryPool",
    "StakeVault",
    "WorkerRegistry",
    "RunRegistry",
    "ContributionLedger",
    "DisputeCourt",
    "FaultCourt",
    "RewardEscrow",
)
"""Every contract of a deployment."""
FACTORY = "NetworkFactory"
"""What creates them."""

ARTIFACTS = Path(__file__).with_name("artifacts")
"""Where the committed ABIs and bytecode are."""


@dataclass(frozen=True, slots=True)
class AbiFunction:
    """One function, ready to be called."""

    name: str
    """As in Solidity."""
    selector: bytes
    """First 4 bytes of the call data."""
    input_types: tuple[str, ...]
    """Canonical types of the arguments."""
    decode: Decoder
    """Turns the returned bytes into a tuple of values."""

    def encode(self, args: Sequence[Any]) -> bytes:
        """Return the call data; raises EncodingError when an argument does not fit its type."""
        return self.selector + encode_arguments(self.name, self.input_types, to_abi(args))


@dataclass(frozen=True, slots=True)
class AbiError:
    """One custom error."""

    name: str
    """As in Solidity."""
    decode: Decoder
    """Turns the bytes after the selector into its arguments."""


@dataclass(frozen=True, slots=True)
class AbiEvent:
    """One event: which arguments are topics, which are data."""

    contract: str
    """The contract that emits it."""
    name: str
    """As in Solidity."""
    topic: str
    """First topic, `0x` and hexadecimal, as JSON-RPC writes it."""
    indexed: tuple[tuple[str, Decoder], ...]
    """Snake-case name and decoder of each further topic."""
    data_names: tuple[str, ...]
    """Snake-case names of the arguments in the data."""
    structs: tuple[str | None, ...]
    """Struct name of each of those, None for other types."""
    decode_data: Decoder
    """Turns the data into the values of `data_names`."""


@dataclass(frozen=True, slots=True)
class ContractAbi:
    """Everything about one contract that is needed to deploy, call and read it."""

    contract: str
    """Its name."""
    bytecode: bytes
    """Creation code without constructor arguments."""
    runtime: bytes
    """What creation leaves on chain, with zeros in the immutables' places."""
    immutables: dict[str, tuple[int, ...]]
    """Where in it each immutable stands, a word at a time; by name, without a leading `_`."""
    constructor_types: tuple[str, ...]
    """Canonical types of the constructor's arguments."""
    functions: dict[str, AbiFunction]
    """By Solidity name; no function is overloaded."""
    events: tuple[AbiEvent, ...]
    """All events."""
    errors: dict[bytes, AbiError]
    """By selector."""

    def creation_code(self, args: Sequence[Any]) -> bytes:
        """Return the data of the transaction that deploys it with these constructor arguments."""
        return self.bytecode + encode_arguments(self.contract, self.constructor_types, args)


def encode_arguments(name: str, types: Sequence[str], args: Sequence[Any]) -> bytes:
    """Return `abi.encode` of arguments; raises EncodingError naming the function otherwise."""
    try:
        return abi_encode(types, args)
    except (AbiEncodingError, TypeError, ValueError, OverflowError) as error:
        raise EncodingError(f"arguments of {name} do not fit ({', '.join(types)}): {error}") from (
            error
        )


@cache
def artifact(contract: str) -> dict[str, Any]:
    """Return a contract's committed artifact, as JSON has it."""
    document: dict[str, Any] = json.loads((ARTIFACTS / f"{contract}.json").read_text())
    return document


@cache
def contract_abi(contract: str) -> ContractAbi:
    """Return a contract's ABI; raises ConfigError when its artifact is missing or malformed."""
    try:
        document = artifact(contract)
        return _parse(contract, document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the artifact of {contract} is missing or malformed: {error}",
            hint="run contracts/script/export_artifacts.py",
        ) from error


def snake_case(name: str) -> str:
    """Return a Solidity name the way Python writes it: `activeFrom` → `active_from`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _types(parameters: list[Any]) -> tuple[str, ...]:
    return tuple(map(collapse_if_tuple, parameters))


def _signature_hash(entry: Any) -> bytes:
    return keccak(abi_to_signature(entry).encode())


def _parse(contract: str, document: dict[str, Any]) -> ContractAbi:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for entry in document["abi"]:
        kinds.setdefault(entry["type"], []).append(entry)
    constructor = kinds.get("constructor", [{"inputs": []}])[0]
    bytecode = bytes.fromhex(document["bytecode"][2:])
    return ContractAbi(
        contract=contract,
        bytecode=bytecode,
        runtime=bytecode[document["runtime_offset"] :],
        immutables={k.removeprefix("_"): tuple(v) for k, v in document["immutables"].items()},
        constructor_types=_types(constructor["inputs"]),
        functions={entry["name"]: _function(entry) for entry in kinds.get("function", [])},
        events=tuple(_event(contract, entry) for entry in kinds.get("event", [])),
        errors={_signature_hash(entry)[:4]: _error(entry) for entry in kinds.get("error", [])},
    )


def _function(entry: dict[str, Any]) -> AbiFunction:
    return AbiFunction(
        name=entry["name"],
        selector=_signature_hash(entry)[:4],
        input_types=_types(entry["inputs"]),
        decode=compile_decoder(_types(entry["outputs"])),
    )


def _error(entry: dict[str, Any]) -> AbiError:
    return AbiError(entry["name"], compile_decoder(_types(entry["inputs"])))


def _event(contract: str, entry: dict[str, Any]) -> AbiEvent:
    indexed = [p for p in entry["inputs"] if p["indexed"]]
    data = [p for p in entry["inputs"] if not p["indexed"]]
    return AbiEvent(
        contract=contract,
        name=entry["name"],
        topic="0x" + _signature_hash(entry).hex(),
        indexed=tuple((snake_case(p["name"]), compile_decoder(_types([p]))) for p in indexed),
        data_names=tuple(snake_case(p["name"]) for p in data),
        structs=tuple(_struct_name(p) for p in data),
        decode_data=compile_decoder(_types(data)),
    )


def _struct_name(parameter: dict[str, Any]) -> str | None:
    # Solidity writes `struct IRunRegistry.RunConfig`.
    internal: str = parameter.get("internalType", "")
    return internal.rpartition(".")[2] if internal.startswith("struct ") else None
