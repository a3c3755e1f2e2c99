"""Juries: who is drawn for a case, and how a juror commits to its vote.

The rules of docs/protocol.md section 9; the contracts' JuryLib and DisputeCourt are the Solidity
twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.ids import Address, Hash32

FRACTION_BITS = 32
"""Bits after the point of a delay."""


def jury_seed(block_hash: Hash32, leaf: Hash32) -> Hash32:
    """Return the seed of a case's draw, of its draw block's hash and the outcome's leaf."""
    return keccak(abi_words(block_hash, leaf))


def draw_jury(weights: Sequence[int], size: int, seed: Hash32) -> list[int]:
    """Return up to `size` different places in the order of delay / weight, the least first.

    Weights are stakes in wei; places of weight zero are never drawn. This is drawing one by one in
    proportion to the weights left (Efraimidis and Spirakis 2006), but no place's quotient depends
    on another's weight, so that nobody who knows the seed can try deposits until a friend is drawn.
    """
    eligible = [place for place, weight in enumerate(weights) if weight > 0]
    eligible.sort(key=lambda place: Fraction(draw_delay(seed, place), weights[place]))
    return eligible[:size]


def draw_delay(seed: Hash32, place: int) -> int:
    """Return -log2(u / 2^128) in units of 2^-32, rounded up: 1 to 128 * 2^32.

    `u` is the upper half of `keccak256(abi.encode(seed, place))` with its lowest bit set.
    """
    u = int.from_bytes(keccak(abi_words(seed, place))[:16], "big") | 1
    log = u.bit_length() - 1
    y = u << (127 - log)
    for _ in range(FRACTION_BITS):
        y = (y * y) >> 127
        bit = y >> 128
        y >>= bit
        log = (log << 1) | bit
    return (128 << FRACTION_BITS) - log


def vote_commitment(
    leaf: Hash32, juror: Address, overturn: bool, result_hash: Hash32, salt: Hash32
) -> Hash32:
    """Return what a juror commits to before it reveals its vote.

    The juror is part of it, so that another's commitment cannot be copied.
    """
    return keccak(abi_words(leaf, address_bytes(juror), int(overturn), result_hash, salt))
