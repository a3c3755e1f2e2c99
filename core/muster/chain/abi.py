"""The ABI of the nine contracts: selectors, topics, argument types, errors and hints for users.

ABIs are never copied by hand: `contracts/script/export_artifacts.py` writes `artifacts/*.json` from
the compiled contracts. A table maps a log's address and first topic to the compiled decoder of its
event.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Protocol, get_args, get_origin, get_type_hints

from eth_abi.abi import encode as abi_encode
from eth_abi.exceptions import EncodingError as AbiEncodingError
from eth_utils.abi import abi_to_signature, collapse_if_tuple

from muster.chain.conversion import Decoder, compile_decoder, from_abi, to_abi
from muster.chain.structs import CommittedWork, LeasedWork, RunConfig, RunTerms, SlashSubject
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ChainError, ConfigError, ContractRevert, EncodingError
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import Submission

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
"""The contract that creates them."""

ARTIFACTS = Path(__file__).with_name("artifacts")
"""Folder of the committed ABIs and bytecode."""


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
    """Deployed code, with zeros in place of the immutables."""
    immutables: dict[str, tuple[int, ...]]
    """Offsets of each immutable's words in `runtime`, by name without a leading `_`."""
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
    """Return `abi.encode` of arguments; raises EncodingError that names the function."""
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


# --------------------------------------------------------------- typed contracts


class Caller(Protocol):
    """The connection that contracts call through."""

    async def read(self, contract: str, function: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the result of a view."""

    async def write(self, contract: str, function: str, args: Sequence[Any]) -> Receipt:
        """Send a transaction."""


class Contract:
    """A contract. A derived class declares functions; calling one calls the contract's function.

    A declaration that returns a Receipt sends a transaction, any other one reads. `X | None` is a
    value that may not exist. A tuple with a Receipt begins with a number from an event: the
    annotation names the event and the argument.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def __init_subclass__(cls) -> None:
        for name, declared in list(vars(cls).items()):
            if not name.startswith("_"):
                setattr(cls, name, _calling(cls.__name__, declared))


def _calling(contract: str, declared: Callable[..., Any]) -> Callable[..., Any]:
    """Return the implementation of a declared function."""
    signature = inspect.signature(declared)

    @wraps(declared)
    async def call(self: Contract, *args: Any, **named: Any) -> Any:
        function = _solidity_name(contract, declared.__name__)
        given = signature.bind(self, *args, **named).args[1:]
        returned = get_type_hints(declared, include_extras=True)["return"]
        if returned is Receipt:
            return await self._caller.write(contract, function, given)
        if get_origin(returned) is Annotated:
            receipt = await self._caller.write(contract, function, given)
            event, number = returned.__metadata__
            return receipt.event(event).args[number], receipt
        values = await self._caller.read(contract, function, given)
        kinds = get_args(returned) if len(values) > 1 else (returned,)
        if NoneType in kinds:
            return from_abi(kinds[0], values[0]) if values[1] else None
        found = tuple(map(from_abi, kinds, values))
        return found if len(found) > 1 else found[0]

    return call


@cache
def _solidity_name(contract: str, name: str) -> str:
    return next(each for each in contract_abi(contract).functions if snake_case(each) == name)


# ------------------------------------------------------------------------ reverts

_TEXT = AbiError("Error", compile_decoder(("string",)))
_PANIC = AbiError("Panic", compile_decoder(("uint256",)))

HINTS = {
    "ERC20InsufficientBalance": "the account holds too few tokens; a development chain has a "
    "faucet: muster stake --faucet",
    "ERC20InsufficientAllowance": "approve the contract for the amount first",
    "RegistryStakeTooLow": "add stake in that run: muster stake --run ID --amount TOKENS",
    "RegistryStillJailed": "wait until the jail time is over",
    "RegistryNodeTaken": "use a fresh node key: muster wallet new FILE",
    "RegistryWrongStatus": (
        "muster worker status says what it is in that run; a validator "
        "of a run does not work for it"
    ),
    "RegistryInvalidNodeSignature": "name the worker's node key: --node KEYSTORE",
    "RunInvalidValidator": (
        "the account must be invited (muster run invite), have no seat "
        "yet, and be no worker of the run"
    ),
    "RunStakeTooLow": "add stake in that run: muster stake --run ID --amount TOKENS",
    "RunTermsChanged": (
        "read the terms again: muster run show; while a change is announced, nobody can join"
    ),
    "PoolStakeTooLow": "add stake: muster juror join --amount TOKENS",
    "PoolPlaceHeld": (
        "a case may still draw who left the bench: join again after the time in the message"
    ),
    "CourtNotAnnounced": (
        "a claim must be announced first, and made within 256 blocks: run "
        "the same command again, it does both"
    ),
    "CourtNoJurors": "nobody is on the network's bench: muster juror status counts them",
    "CourtMayNotClaim": (
        "this account may be drawn as a juror of the case: claim from another account; or the case "
        "has its 16 claims, and only its worker may add one"
    ),
    "CourtWindowClosed": "the challenge window is over, and the outcome is final",
    "LedgerInvalidTicket": "only work with a ticket of the run's orchestrator counts, at most 60 s "
    "after its deadline",
    "LedgerWrongTime": "the message says from when and until when it is possible",
    "VaultInsufficientStake": "muster worker status shows the stake in each run",
    "LedgerUnauthorized": "only the run's orchestrator may do this: check --keystore",
    "LedgerPaused": "the run's owner paused submissions: wait until the owner resumes the run",
    "LedgerNotFinal": "wait until the challenge window is over",
    "FactoryTaken": (
        "the contract exists already: run the same command again, it deploys what is missing"
    ),
    "FactoryUnauthorized": "continue the deployment with the account that began it",
    "EscrowNotFinal": "wait until the challenge window is over",
    "EscrowUnderfunded": "ask the run's owner to fund the run",
    "RunUnauthorized": "is it the right keystore?",
    "VaultNotWithdrawable": "wait until the unbonding period is over",
}
"""Hints for users, by error."""


@cache
def error_table() -> dict[bytes, AbiError]:
    """Return every error of every contract by selector, including Solidity's own two."""
    table = {
        keccak(b"Error(string)")[:4]: _TEXT,
        keccak(b"Panic(uint256)")[:4]: _PANIC,
    }
    for contract in (*CONTRACTS, FACTORY):
        table |= contract_abi(contract).errors
    return table


def decode_revert(data: bytes, *, tx: str | None = None) -> ContractRevert:
    """Return the error that a revert's bytes encode.

    An unknown selector is shown as it is. A failure without a reason has no bytes.
    """
    if len(data) < 4:
        return ContractRevert(ContractRevert.NO_REASON, tx=tx, hint="it may have run out of gas")
    known = error_table().get(data[:4])
    if known is None:
        return ContractRevert(
            hex0x(data[:4]),
            (hex0x(data[4:]),) if data[4:] else (),
            tx=tx,
            hint=f"none of the {len(error_table())} errors of Muster's contracts: are they the "
            "version in --deployments?",
        )
    try:
        args = tuple(_shown(value) for value in known.decode(data[4:]))
    except EncodingError:
        args = (hex0x(data[4:]),)
    return ContractRevert(known.name, args, tx=tx, hint=HINTS.get(known.name))


def _shown(value: Any) -> object:
    return hex0x(value) if isinstance(value, bytes) else value


# ------------------------------------------------------------------------ events

_STRUCTS: dict[str | None, Any] = {
    "CommittedWork": CommittedWork,
    "LeasedWork": LeasedWork,
    "RunConfig": RunConfig,
    "Submission": Submission,
    "Terms": RunTerms,
    "Verdict": SlashSubject,
}


@dataclass(frozen=True, slots=True)
class Event:
    """One contract event."""

    contract: str
    """The contract's name."""
    name: str
    """As in Solidity."""
    args: dict[str, Any]
    """By snake-case name; addresses checksummed, `bytes32` as Hash32, structs as dataclasses."""
    block_number: int
    """The block's height."""
    block_hash: Hash32
    block_timestamp: int
    """The block's time, Unix seconds; 0 in a receipt whose endpoint does not tell it."""
    log_index: int
    """Position in the block."""
    tx_hash: str
    """The transaction, `0x` and hexadecimal."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A transaction that was mined and succeeded."""

    tx_hash: str
    block_number: int
    gas_used: int
    """Gas that it used."""
    events: list[Event]
    """The events it emitted from our contracts, in order."""
    cost_wei: int = 0
    """Wei that its sender paid for gas, and on an OP stack chain for data on its L1."""

    def event(self, name: str) -> Event:
        """Return its first event of a name; raises ChainError when there is none."""
        for event in self.events:
            if event.name == name:
                return event
        raise ChainError(f"transaction {self.tx_hash} emitted no {name}")


class EventTable:
    """Decodes a deployment's logs into events."""

    def __init__(self, contracts: Mapping[str, Address]) -> None:
        self._events: dict[tuple[str, str], AbiEvent] = {
            (address.lower(), event.topic): event
            for contract, address in contracts.items()
            for event in contract_abi(contract).events
        }

    def topics(self) -> dict[Address, list[str]]:
        """Return the first topics of each contract's events, by address."""
        topics: dict[Address, list[str]] = {}
        for address, topic in self._events:
            topics.setdefault(Address(address), []).append(topic)
        return topics

    def decode(self, log: Mapping[str, Any], timestamp: int | None = None) -> Event | None:
        """Return the event of a JSON-RPC log; None when our contracts have no such event.

        The time is the log's own unless given. Raises EncodingError when the log is malformed.
        """
        try:
            topics = log["topics"]
            event = (
                self._events.get((log["address"].lower(), topics[0].lower())) if topics else None
            )
            if event is None or log.get("removed"):
                return None
            return Event(
                contract=event.contract,
                name=event.name,
                args=_arguments(event, topics, bytes.fromhex(log["data"][2:])),
                block_number=int(log["blockNumber"], 16),
                block_hash=Hash32(bytes.fromhex(log["blockHash"][2:])),
                block_timestamp=int(log["blockTimestamp"], 16) if timestamp is None else timestamp,
                log_index=int(log["logIndex"], 16),
                tx_hash=log["transactionHash"],
            )
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            if isinstance(error, EncodingError):
                raise
            raise EncodingError(f"malformed log: {type(error).__name__} {error}") from error


def _arguments(event: AbiEvent, topics: list[str], data: bytes) -> dict[str, Any]:
    if len(topics) != len(event.indexed) + 1:
        raise EncodingError(f"{event.name} has {len(event.indexed) + 1} topics, got {len(topics)}")
    args = {
        name: decode(bytes.fromhex(topic[2:]))[0]
        for (name, decode), topic in zip(event.indexed, topics[1:], strict=True)
    }
    for name, struct, value in zip(
        event.data_names, event.structs, event.decode_data(data), strict=True
    ):
        args[name] = value if struct is None else from_abi(_STRUCTS[struct], value)
    return args
