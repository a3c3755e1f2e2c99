"""Events of the contracts, the receipts that hold them, and how logs are decoded into events.

A table leads from a log's address and first topic to a compiled decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.chain.abi import AbiEvent, contract_abi
from muster.chain.conversion import from_abi
from muster.chain.structs import LeasedWork, RunConfig, RunTerms, SlashSubject
from muster.protocol.errors import ChainError, EncodingError
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import Submission

_STRUCTS: dict[str | None, Any] = {
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
    """The block's time, Unix seconds."""
    log_index: int
    """Position in the block."""
    tx_hash: str
    """The transaction, `0x` and hexadecimal."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A transaction that was mined and succeeded."""

    tx_hash: str
    block_number: int
    """The block it is in."""
    gas_used: int
    """What it cost."""
    events: list[Event]
    """The events it emitted from our contracts, in order."""

    def event(self, name: str) -> Event:
        """Return its first event of a name; raises ChainError when there is none."""
        for event in self.events:
            if event.name == name:
                return event
        raise ChainError(f"transaction {self.tx_hash} emitted no {name}")


class EventTable:
    """Knows which log of a deployment is which event."""

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
