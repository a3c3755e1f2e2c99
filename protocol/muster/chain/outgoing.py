"""A transaction before it is mined: its fields, its fees, its signature, and a node's refusals.

Pure: nothing here talks to a node or remembers anything. eth_account is imported by what signs: it
takes half a second, and most commands only read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import ceil
from typing import Any

from hexbytes import HexBytes

from muster.protocol.encoding import hex0x
from muster.protocol.errors import EncodingError, RpcError
from muster.protocol.ids import Address, to_address

MIN_BUMP = 1.1
"""Nodes refuse a replacement whose fees are not at least so many times those it replaces."""

_FIELDS = ("chainId", "nonce", "gas", "maxFeePerGas", "maxPriorityFeePerGas", "data")


class Refusal(Enum):
    """Why a node did not take a transaction."""

    KNOWN = auto()
    """It has it already."""
    NONCE_USED = auto()
    """A mined transaction has its nonce: this one, or another."""
    NONCE_TAKEN = auto()
    """A waiting transaction has its nonce and pays as much."""
    FEE_TOO_LOW = auto()
    """It pays less than the node or the next block demands."""
    OTHER = auto()
    """It will not be taken however often it is sent."""


# Lower case, without spaces: some clients name an error, others write a sentence. In this order.
_PHRASES: tuple[tuple[Refusal, tuple[str, ...]], ...] = (
    (Refusal.KNOWN, ("alreadyknown", "alreadyimported", "alreadyinmempool", "knowntransaction")),
    (Refusal.NONCE_USED, ("noncetoolow", "invalidnonce", "nonceistoolow", "oldnonce")),
    (Refusal.NONCE_TAKEN, ("replacement", "samenonce")),
    (Refusal.FEE_TOO_LOW, ("underpriced", "maxfeepergasless", "feetoolow")),
)


def refusal_of(error: RpcError) -> Refusal:
    """Return what an answer to `eth_sendRawTransaction` means; each client has its own words."""
    text = str(error).lower().replace(" ", "")
    for refusal, phrases in _PHRASES:
        if any(phrase in text for phrase in phrases):
            return refusal
    return Refusal.OTHER


@dataclass(frozen=True, slots=True)
class Fees:
    """What a transaction offers per gas, in wei (EIP-1559)."""

    max_wei: int
    """At most, base fee and tip together."""
    tip_wei: int
    """To the block's producer."""

    @classmethod
    def of_market(cls, base_fee_wei: int, tip_wei: int) -> Fees:
        """Return what outlasts six full blocks in a row: twice the base fee, and the tip."""
        return cls(2 * base_fee_wei + tip_wei, tip_wei)

    def times(self, factor: float) -> Fees:
        """Return both fees multiplied and rounded up."""
        return Fees(ceil(self.max_wei * factor), ceil(self.tip_wei * factor))

    def at_least(self, other: Fees) -> Fees:
        """Return the higher of each fee."""
        return Fees(max(self.max_wei, other.max_wei), max(self.tip_wei, other.tip_wei))

    def at_most(self, most_wei: int) -> Fees:
        """Return the fees with both capped."""
        return Fees(min(self.max_wei, most_wei), min(self.tip_wei, most_wei))


@dataclass(frozen=True, slots=True)
class Signed:
    """A transaction that can be sent."""

    tx_hash: str
    """Its hash, `0x` and hexadecimal."""
    raw: bytes
    """What is sent: the EIP-2718 envelope with the signature."""

    def __repr__(self) -> str:
        return f"Signed({self.tx_hash})"


@dataclass(frozen=True, slots=True)
class Unsigned:
    """An EIP-1559 transaction without its signature."""

    chain_id: int
    """EIP-155 chain id."""
    nonce: int
    """Its place among the account's transactions."""
    to: Address | None
    """The contract, None to create one."""
    data: bytes
    """What it is called with."""
    gas: int
    """Gas limit."""
    fees: Fees
    """What it pays."""

    @classmethod
    def from_raw(cls, raw: bytes) -> Unsigned:
        """Return what a signed transaction says; raises EncodingError when it does not parse."""
        from eth_account.typed_transactions.typed_transaction import TypedTransaction

        try:
            fields = TypedTransaction.from_bytes(HexBytes(raw)).as_dict()
            chain_id, nonce, gas, most, tip, data = (fields[name] for name in _FIELDS)
            to = bytes(fields["to"]) if fields.get("to") else b""
        except Exception as error:  # the library raises whatever its parsers raise
            raise EncodingError(f"not a signed transaction: {type(error).__name__}") from error
        return cls(
            chain_id, nonce, to_address(to) if to else None, bytes(data), gas, Fees(most, tip)
        )

    @property
    def purpose(self) -> str:
        """What it is for: whom it calls, and with which selector."""
        return f"{self.to or 'create'}:{self.data[:4].hex()}"

    def signed(self, key: bytes) -> Signed:
        """Return it with the key's signature."""
        from eth_account import Account

        fields: dict[str, Any] = {
            "type": 2,
            "chainId": self.chain_id,
            "nonce": self.nonce,
            "gas": self.gas,
            "maxFeePerGas": self.fees.max_wei,
            "maxPriorityFeePerGas": self.fees.tip_wei,
            "value": 0,
            "data": hex0x(self.data),
            **({"to": self.to} if self.to else {}),
        }
        signed = Account.sign_transaction(fields, key)
        return Signed(hex0x(signed.hash), bytes(signed.raw_transaction))
