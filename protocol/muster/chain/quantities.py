"""Numbers, hashes and blocks as JSON-RPC writes them; anything else is the endpoint's fault."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

from muster.protocol.errors import ChainUnreachable
from muster.protocol.ids import Hash32

_QUANTITY = re.compile(r"0x[0-9a-fA-F]{1,64}")
_HASH = re.compile(r"0x[0-9a-fA-F]{64}")


def from_hex(value: Any) -> int:
    """Return a quantity of at most 256 bits; raises ChainUnreachable for anything else."""
    if not isinstance(value, str) or _QUANTITY.fullmatch(value) is None:
        raise garbled(f"{str(value)[:80]!r} is no quantity")
    return int(value, 16)


def hash_from_hex(value: Any) -> Hash32:
    """Return 32 bytes; raises ChainUnreachable for anything else."""
    if not isinstance(value, str) or _HASH.fullmatch(value) is None:
        raise garbled(f"{str(value)[:80]!r} is no hash")
    return Hash32(bytes.fromhex(value[2:]))


def member(value: Any, name: str) -> Any:
    """Return a member of a JSON object; raises ChainUnreachable when there is none."""
    if not isinstance(value, dict) or name not in value:
        raise garbled(f"no {name!r} in {str(value)[:80]!r}")
    return value[name]


def garbled(what: str) -> ChainUnreachable:
    """Return the error of an endpoint that answers what it cannot."""
    return ChainUnreachable(f"the RPC endpoint answers nonsense: {what}", hint="is --rpc right?")


@dataclass(frozen=True, slots=True)
class LatestBlock:
    """A block's place in the chain; most often the chain's head."""

    number: int
    """Its height."""
    hash: Hash32
    """Its hash."""
    timestamp: int
    """Its time."""

    @classmethod
    def from_rpc(cls, block: Any) -> Self:
        """Parse what `eth_getBlockByNumber` answers; raises ChainUnreachable."""
        return cls(
            number=from_hex(member(block, "number")),
            hash=hash_from_hex(member(block, "hash")),
            timestamp=from_hex(member(block, "timestamp")),
        )
