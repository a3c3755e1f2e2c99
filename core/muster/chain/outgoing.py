"""A transaction before it is mined: its fields, its fees, its signature, and a node's refusals.

Nothing here talks to a node or keeps state. Only signing imports eth_account: the import takes half
a second, and most commands only read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import Enum, auto
from math import ceil
from typing import Any

from hexbytes import HexBytes

from muster.chain.rpc import Call, from_hex, garbled
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError, EncodingError, RpcError
from muster.protocol.ids import Address, to_address

MIN_BUMP = 1.1
"""Least factor on the fees of a replaced transaction: nodes refuse replacements below it."""

MARKET: list[Call] = [
    ("eth_getBlockByNumber", ["latest", False]),
    ("eth_maxPriorityFeePerGas", []),
]
"""The requests whose answers `market_fees` takes."""
TELL_SENT: ContextVar[Callable[[str], None] | None] = ContextVar("TELL_SENT", default=None)
"""Called with the hash of each transaction that may have left and that no journal outlives the
process with: repeating its command would send another one."""
_DEFAULT_TIP_WEI = 10**9
HIGHEST_FEE = "MUSTER_MAX_FEE_GWEI"
_FIELDS = ("chainId", "nonce", "gas", "maxFeePerGas", "maxPriorityFeePerGas", "data")


class SendRefusal(Enum):
    """Why a node did not take a transaction. Each leaves less open than the one before."""

    KNOWN = auto()
    """The node has it already."""
    NONCE_USED = auto()
    """Its nonce is used by a mined transaction: this one, or another."""
    NONCE_TAKEN = auto()
    """A pending transaction with its nonce pays as much."""
    FEE_TOO_LOW = auto()
    """It pays less than the node or the next block requires."""
    OTHER = auto()
    """Another reason: its words may be of any client."""


# Lower case, without spaces: some clients name an error, others write a sentence. In this order.
_PHRASES: tuple[tuple[SendRefusal, tuple[str, ...]], ...] = (
    (
        SendRefusal.KNOWN,
        ("alreadyknown", "alreadyimported", "alreadyinmempool", "knowntransaction", "samehash"),
    ),
    (SendRefusal.NONCE_USED, ("noncetoolow", "invalidnonce", "nonceistoolow", "oldnonce")),
    (SendRefusal.NONCE_TAKEN, ("replacement", "replaceexisting", "samenonce", "ownnonce")),
    (SendRefusal.FEE_TOO_LOW, ("underpriced", "maxfeepergasless", "feetoolow")),
)


def refusal_of(error: RpcError) -> SendRefusal:
    """Return the meaning of an `eth_sendRawTransaction` error; each client has its own wording."""
    text = str(error).lower().replace(" ", "")
    for refusal, phrases in _PHRASES:
        if any(phrase in text for phrase in phrases):
            return refusal
    return SendRefusal.OTHER


@dataclass(frozen=True, slots=True)
class Fees:
    """Fees of a transaction per gas, in wei (EIP-1559)."""

    max_wei: int
    """Most for base fee and tip together."""
    tip_wei: int
    """To the block's producer."""

    def times(self, factor: float) -> Fees:
        """Return both fees multiplied and rounded up."""
        return Fees(ceil(self.max_wei * factor), ceil(self.tip_wei * factor))

    def at_least(self, other: Fees) -> Fees:
        """Return the higher of each fee."""
        return Fees(max(self.max_wei, other.max_wei), max(self.tip_wei, other.tip_wei))

    def at_most(self, other: Fees) -> Fees:
        """Return the lower of each fee."""
        return Fees(min(self.max_wei, other.max_wei), min(self.tip_wei, other.tip_wei))

    def can_replace(self, other: Fees) -> bool:
        """Return whether nodes take a transaction with these fees in the place of another."""
        return (
            min(self.max_wei - other.max_wei * MIN_BUMP, self.tip_wei - other.tip_wei * MIN_BUMP)
            >= 0
        )


def highest_fee(environ: Mapping[str, str] = os.environ) -> int:
    """Return the highest allowed price per gas in wei: MUSTER_MAX_FEE_GWEI, or 1,000 gwei.

    Raises ConfigError when the variable is not a price.
    """
    text = environ.get(HIGHEST_FEE, "1000")
    try:
        gwei = Decimal(text)
        if 0 < gwei <= 10**6:
            return int(gwei * 10**9)
    except InvalidOperation:
        pass
    raise ConfigError(
        f"{HIGHEST_FEE} is {text!r}", hint="a price per gas in gwei, above 0 and at most 1000000"
    )


def market_fees(block: Any, tip: Any) -> Fees:
    """Return the market's present fees, from the answers to `MARKET`."""
    if isinstance(block, RpcError):
        raise block
    # Endpoints without the method accept any tip.
    tip_wei = _DEFAULT_TIP_WEI if isinstance(tip, RpcError) else from_hex(tip)
    if not isinstance(block, dict):
        raise garbled("no latest block")
    # Twice the base fee outlasts six full blocks in a row.
    return Fees(2 * from_hex(block.get("baseFeePerGas", "0x0")) + tip_wei, tip_wei)


def purpose_of(to: Address | None, data: bytes) -> str:
    """Return a transaction's purpose: the called contract and selector."""
    return f"{to or 'create'}:{data[:4].hex()}"


@dataclass(frozen=True, slots=True)
class SignedTransaction:
    """A transaction that can be sent."""

    tx_hash: str
    """Its hash, `0x` and hexadecimal."""
    raw: bytes
    """Bytes to send: the EIP-2718 envelope with the signature."""

    def __repr__(self) -> str:
        return f"Signed({self.tx_hash})"


@dataclass(frozen=True, slots=True)
class UnsignedTransaction:
    """An EIP-1559 transaction without its signature."""

    chain_id: int
    """EIP-155 chain id."""
    nonce: int
    """Its place among the account's transactions."""
    to: Address | None
    """The contract, None to create one."""
    data: bytes
    """Call data."""
    gas: int
    """Gas limit."""
    fees: Fees
    """Its fees."""

    @classmethod
    def from_raw(cls, raw: bytes) -> UnsignedTransaction:
        """Return a signed transaction's fields; raises EncodingError when it does not parse."""
        from eth_account.typed_transactions.typed_transaction import TypedTransaction

        try:
            fields = TypedTransaction.from_bytes(HexBytes(raw)).as_dict()
            chain_id, nonce, gas, most, tip, data = (fields[name] for name in _FIELDS)
            to = bytes(fields["to"]) if fields.get("to") else b""
        except Exception as error:  # the library passes on any error of its parsers
            raise EncodingError(f"not a signed transaction: {type(error).__name__}") from error
        return cls(
            chain_id, nonce, to_address(to) if to else None, bytes(data), gas, Fees(most, tip)
        )

    def signed(self, key: bytes) -> SignedTransaction:
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
        return SignedTransaction(hex0x(signed.hash), bytes(signed.raw_transaction))
