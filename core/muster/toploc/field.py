"""Polynomials over GF(65497), many at a time: interpolation and evaluation.

65497 is the largest prime below 2^16 (2^16 - 39), so a product of two residues fits 32 bits. Knows
nothing of hidden states or of bytes. Arrays carry their axes as suffix: B polynomials, K points
or coefficients.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

PRIME = 65497
"""Order of the field."""

Residues = npt.NDArray[np.uint32]
"""Integers below PRIME."""

_BLOCK = 512
"""Polynomials per pass: the working set of a pass stays inside a core's cache."""


def interpolate(x_BK: Residues, y_BK: Residues) -> Residues:
    """Return the coefficients [B, K], constant term first, of the polynomials through K points.

    Every row is an independent set. The x of a row must be distinct; equal ones give garbage, not
    an error. Divided differences in Newton's form, expanded to monomials.
    """
    blocks = [
        _interpolate_block(x_BK[i : i + _BLOCK].T, y_BK[i : i + _BLOCK].T).T
        for i in range(0, len(x_BK), _BLOCK)
    ]
    return np.concatenate(blocks) if blocks else y_BK.copy()


def _interpolate_block(x_KB: Residues, y_KB: Residues) -> Residues:
    x_KB = np.ascontiguousarray(x_KB, np.uint32)
    c_KB = np.array(y_KB, np.uint32, order="C")
    inverses = _inverses()
    points = len(x_KB)
    for order in range(1, points):
        numerator = _subtract(c_KB[order:], c_KB[order - 1 : -1])
        # Offset by PRIME: the table covers negative differences too.
        numerator *= inverses[x_KB[order:] + np.uint32(PRIME) - x_KB[:-order]]
        c_KB[order:] = _reduce(numerator)
    for i in range(points - 2, -1, -1):
        c_KB[i:-1] = _subtract(c_KB[i:-1], _reduce(x_KB[i] * c_KB[i + 1 :]))
    return c_KB


def evaluate(coefficients_BK: Residues, x_BN: Residues) -> Residues:
    """Return the values [B, N] of every row's polynomial at that row's points.

    The coefficients are cut into rows of about sqrt(K): one exact float64 product with the low
    powers of x, then Horner's rule in the high power.
    """
    batch, terms = coefficients_BK.shape
    step = max(1, round(terms**0.5))
    rows = -(-terms // step)
    padded = np.zeros((batch, rows * step), np.float64)
    padded[:, :terms] = coefficients_BK
    powers_BNS = _powers(x_BN, step + 1)
    # Sums of `step` products below 2^32 stay far below 2^53: exact in float64, and so is the
    # floor, because a quotient's distance from the next integer is at least 1 / PRIME.
    sums_BNR = powers_BNS[:, :, :step] @ padded.reshape(batch, rows, step).transpose(0, 2, 1)
    partial_BNR = (sums_BNR - np.floor(sums_BNR / PRIME) * PRIME).astype(np.uint32)
    leap_BN = powers_BNS[:, :, step].astype(np.uint32)
    total = np.zeros(x_BN.shape, np.uint32)
    for row in range(rows - 1, -1, -1):
        total = _reduce(_reduce(total * leap_BN) + partial_BNR[:, :, row])
    return total


def _powers(x_BN: Residues, count: int) -> npt.NDArray[np.float64]:
    powers = np.empty((*x_BN.shape, count), np.float64)
    power = np.ones(x_BN.shape, np.uint32)
    for exponent in range(count):
        powers[:, :, exponent] = power
        power = _reduce(power * x_BN)
    return powers


def _reduce(product: Residues) -> Residues:
    return product - product // np.uint32(PRIME) * np.uint32(PRIME)


def _subtract(a: Residues, b: Residues) -> Residues:
    difference = a + np.uint32(PRIME) - b
    # If the difference is below PRIME, subtracting PRIME wraps around to a huge number, so the
    # minimum is the residue.
    residues: Residues = np.minimum(difference, difference - np.uint32(PRIME))
    return residues


@cache
def _inverses() -> Residues:
    """Return `table[d + PRIME]` = 1/d for -PRIME <= d < PRIME (0 for 0), by Fermat."""
    base = np.arange(PRIME, dtype=np.uint32)
    result = np.ones(PRIME, np.uint32)
    exponent = PRIME - 2
    while exponent:
        if exponent & 1:
            result = _reduce(result * base)
        base = _reduce(base * base)
        exponent >>= 1
    return np.concatenate([result, result])
