"""What the typed contracts stand on: who calls for them, and the receipts of transactions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from muster.chain.conversion import from_abi
from muster.chain.events import Event
from muster.protocol.errors import ChainError

T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Receipt:
    """A transaction that was mined and succeeded."""

    tx_hash: str
    """Its hash."""
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


class Caller(Protocol):
    """What a contract needs of the connection."""

    async def read(self, contract: str, function: str, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return what a view returns."""

    async def write(self, contract: str, function: str, args: Sequence[Any]) -> Receipt:
        """Send a transaction."""


class Contract:
    """A contract, called as the class derived from this one."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def _read(self, kind: type[T], function: str, *args: Any) -> T:
        (value,) = await self._caller.read(type(self).__name__, function, args)
        return from_abi(kind, value)

    async def _find(self, kind: type[T], function: str, *args: Any) -> T | None:
        value, exists = await self._caller.read(type(self).__name__, function, args)
        return from_abi(kind, value) if exists else None

    async def _pair(
        self, first: type[T], second: type[S], function: str, *args: Any
    ) -> tuple[T, S]:
        values = await self._caller.read(type(self).__name__, function, args)
        return from_abi(first, values[0]), from_abi(second, values[1])

    async def _write(self, function: str, *args: Any) -> Receipt:
        return await self._caller.write(type(self).__name__, function, args)
