"""What TOPLOC's comparison misses: polynomials that claim the same everywhere.

The comparison looks only where the largest entries are, and those are alike: their magnitudes
cluster just above the cut. A constant polynomial therefore fits without any knowledge of where they
are (87 % of chunks of Gaussian hidden states of width 5120 under the customary limits). So proofs
are also evaluated at *decoys*, entries far below the largest. An honest polynomial is pseudo-random
there; one that claims large entries there too was not built from entries at all. With the modulus
fixed by the encoding, what is left to a forger is to guess at most K places and their values.

Axes: B chunks, E elements of a chunk, K coefficients, P entries of the pool, D decoys, G entries
that one decoy is chosen from.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from muster.toploc.chunks import SIGN_BIT, Patterns
from muster.toploc.field import Residues, evaluate

DECOYS = 32
"""Entries looked at per chunk."""

_POOL = 4 * DECOYS
"""Evenly spaced entries. The smallest of every four is a decoy, so that none is of the largest."""

_MAGNITUDE = np.uint16(0xFFFF ^ SIGN_BIT)


def has_decoys(elements: int, points: int) -> bool:
    """Return whether a chunk is screened: not where a proof covers more than half of it."""
    return elements >= max(2 * points, _POOL)


def decoy_matches(
    patterns_BE: Patterns, moduli_B: Residues, coefficients_BK: Residues
) -> npt.NDArray[np.int64]:
    """Return [B] the decoys at which a proof claims an entry as large as the chunk's larger ones.

    That is: above the decoy's own magnitude and not above the chunk's largest. Honest proofs match
    a decoy with the probability that a random 16-bit pattern falls there, about 1 to 5 %.
    """
    chunks, elements = patterns_BE.shape
    if not has_decoys(elements, coefficients_BK.shape[1]):
        return np.zeros(chunks, np.int64)
    pool_P = np.arange(_POOL) * (elements - 1) // (_POOL - 1)
    magnitudes_BDG = (patterns_BE[:, pool_P] & _MAGNITUDE).reshape(chunks, DECOYS, 4)
    chosen_BD1 = magnitudes_BDG.argmin(axis=2)[:, :, None]
    own_BD = np.take_along_axis(magnitudes_BDG, chosen_BD1, axis=2)[:, :, 0]
    places_BD = pool_P.reshape(DECOYS, 4)[np.arange(DECOYS), chosen_BD1[:, :, 0]]
    x_BD = (places_BD % moduli_B[:, None]).astype(np.uint32)
    claims_BD = evaluate(coefficients_BK, x_BD).astype(np.uint16) & _MAGNITUDE
    largest_B = (patterns_BE & _MAGNITUDE).max(axis=1)
    is_match_BD = (claims_BD > own_BD) & (claims_BD <= largest_B[:, None])
    matches: npt.NDArray[np.int64] = is_match_BD.sum(axis=1).astype(np.int64)
    return matches
