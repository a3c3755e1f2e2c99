"""The cost of a transaction on a chain: gas, and a data fee by the chain's own rule.

Pure arithmetic on measured transactions and given fees; no fee of today's chains is assumed.
Amounts are in wei of the chain's coin.

Sources: OP stack specs, Fjord "L1-Cost fees" and Jovian "Operator Fee"; Arbitrum Nitro,
arbos/l1pricing/l1pricing.go; EIP-7623 "Increase calldata cost".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MILLION = 10**6
FASTLZ_INTERCEPT = -42_585_600
"""Intercept in millionths of a byte; with the next two, the regression of the Fjord spec."""
FASTLZ_COEFFICIENT = 836_500
"""Millionths of a byte in a batch, per byte after FastLZ."""
LEAST_SIZE = 100
"""Smallest size in bytes that the Fjord spec counts."""
UNITS_PER_BYTE = 16
"""Arbitrum's units of a compressed byte; also the gas of a byte of calldata that is not zero."""
TRANSACTION_GAS = 21_000
TOKENS_PER_NONZERO = 4
"""EIP-7623: a zero byte is one token, any other byte four."""
FLOOR_PER_TOKEN = 10
"""EIP-7623: the least gas of a token of calldata."""


class ChainKind(StrEnum):
    """How a chain charges for transactions."""

    BASE = "base"
    """An OP stack chain: gas, and the estimated share of the L1's fee."""
    ARBITRUM = "arbitrum"
    """A Nitro chain: gas, and compressed bytes at the chain's own price for them."""
    ETHEREUM = "ethereum"
    """An L1: gas alone, with the floor for calldata."""
    OWN = "own"
    """A chain that nobody else uses: gas alone, at the price its owner sets."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The measured size of one transaction."""

    gas: int
    """Gas it used."""
    zero_bytes: int
    """Bytes of its calldata that are zero."""
    nonzero_bytes: int
    """The other bytes of its calldata."""
    fastlz_bytes: int
    """Length of the signed transaction under FastLZ."""
    brotli_bytes: int
    """Length of the signed transaction under Brotli at Nitro's level."""


@dataclass(frozen=True, slots=True)
class Fees:
    """What a chain and its L1 charge, in wei."""

    gas_price: int
    """Per gas, base fee and tip together."""
    base_fee: int = 0
    """Per gas on the L1."""
    blob_fee: int = 0
    """Per blob gas on the L1."""
    data_price: int = 0
    """Per unit of data on a Nitro chain (`ArbGasInfo.getL1BaseFeeEstimate`)."""

    def times(self, factor: int) -> Fees:
        """Return every fee multiplied."""
        return Fees(
            self.gas_price * factor,
            self.base_fee * factor,
            self.blob_fee * factor,
            self.data_price * factor,
        )


@dataclass(frozen=True, slots=True)
class OpScalars:
    """What an OP stack chain's owner sets (`SystemConfig`)."""

    base_fee_scalar: int
    """Millionths of the L1's base fee."""
    blob_fee_scalar: int
    """Millionths of the L1's blob fee."""
    operator_fee_scalar: int = 0
    """Hundreds of wei per gas."""
    operator_fee_constant: int = 0
    """Wei per transaction."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What transactions cost, in wei."""

    execution_wei: int = 0
    """Their gas."""
    data_wei: int = 0
    """Their data, where that is charged apart."""

    @property
    def wei(self) -> int:
        """Both."""
        return self.execution_wei + self.data_wei

    def times(self, count: int) -> Cost:
        """Return the cost of `count` of them."""
        return Cost(self.execution_wei * count, self.data_wei * count)


def cost_of(kind: ChainKind, taken: Footprint, fees: Fees, scalars: OpScalars) -> Cost:
    """Return the cost of a transaction on a chain; `scalars` matter only on an OP stack chain."""
    if kind is ChainKind.BASE:
        operator = operator_fee(taken.gas, scalars)
        data = op_data_fee(taken.fastlz_bytes, fees, scalars)
        return Cost(taken.gas * fees.gas_price + operator, data)
    if kind is ChainKind.ARBITRUM:
        data = UNITS_PER_BYTE * taken.brotli_bytes * fees.data_price
        return Cost(taken.gas * fees.gas_price, data)
    gas = max(taken.gas, floor_gas(taken)) if kind is ChainKind.ETHEREUM else taken.gas
    return Cost(gas * fees.gas_price)


def op_data_fee(fastlz_bytes: int, fees: Fees, scalars: OpScalars) -> int:
    """Return an OP stack chain's fee for a transaction's data (Fjord spec), rounded down."""
    millionths = FASTLZ_INTERCEPT + FASTLZ_COEFFICIENT * fastlz_bytes
    per_byte = UNITS_PER_BYTE * scalars.base_fee_scalar * fees.base_fee
    per_byte += scalars.blob_fee_scalar * fees.blob_fee
    return max(LEAST_SIZE * MILLION, millionths) * per_byte // MILLION**2


def operator_fee(gas: int, scalars: OpScalars) -> int:
    """Return an OP stack operator's own fee (Jovian spec)."""
    return gas * scalars.operator_fee_scalar * 100 + scalars.operator_fee_constant


def floor_gas(taken: Footprint) -> int:
    """Return the least gas that a transaction with this calldata is charged (EIP-7623)."""
    tokens = taken.zero_bytes + TOKENS_PER_NONZERO * taken.nonzero_bytes
    return TRANSACTION_GAS + FLOOR_PER_TOKEN * tokens


# The compressed length of FastLZ, level 1

_TABLE_BITS = 13
_WINDOW = 8192
"""Greatest distance of a match, in bytes."""
_LONGEST_MATCH = 262
_LONGEST_LITERALS = 32
_TAIL = 13
"""Number of last bytes in which no match begins."""


def fastlz_length(data: bytes) -> int:
    """Return the length that FastLZ (level 1) compresses data to, as the OP stack counts it.

    Greedy LZ77 over three-byte sequences with one candidate per hash; op-geth's `FlzCompressLen`
    is the reference, and its vectors are in the tests.
    """
    table = [0] * (1 << _TABLE_BITS)
    limit = max(len(data) - _TAIL, 0)
    place, anchor, length = 2, 0, 0
    while True:
        place, found = _next_match(data, table, place, limit)
        if found is None:
            return length + _literals(len(data) - anchor)
        if place > anchor:
            length += _literals(place - anchor)
        same = _same(data, found + 3, place + 3, limit + 9)
        length += _match(same)
        # The table also gets two sequences after the match.
        place += same
        for _ in range(2):
            table[_hash(data, place)] = place
            place += 1
        anchor = place


def _next_match(data: bytes, table: list[int], place: int, limit: int) -> tuple[int, int | None]:
    """Return where the next match begins and what it repeats; None when there is none."""
    while place < limit:
        slot = _hash(data, place)
        candidate, table[slot] = table[slot], place
        near = place - candidate < _WINDOW
        # The last place before the limit goes into the table, but begins no match.
        if (
            near
            and place + 1 < limit
            and data[place : place + 3] == data[candidate : candidate + 3]
        ):
            return place, candidate
        place += 1
    return place, None


def _hash(data: bytes, place: int) -> int:
    sequence = int.from_bytes(data[place : place + 3], "little")
    return (2_654_435_769 * sequence & 0xFFFFFFFF) >> (32 - _TABLE_BITS)


def _literals(count: int) -> int:
    whole, rest = divmod(count, _LONGEST_LITERALS)
    return whole * (_LONGEST_LITERALS + 1) + (rest + 1 if rest else 0)


def _same(data: bytes, earlier: int, later: int, end: int) -> int:
    """Return how many bytes a comparison reads, including the differing one."""
    count = 0
    while later + count < end:
        count += 1
        if data[earlier + count - 1] != data[later + count - 1]:
            break
    return count


def _match(count: int) -> int:
    whole, rest = divmod(count - 1, _LONGEST_MATCH)
    return 3 * whole + (3 if rest >= 6 else 2)
