"""What a proof commits to, in numpy: the largest entries of chunks, and the index modulus.

Owns the canonical choice among ties. Knows nothing of polynomials. Axes: B chunks of E elements,
K chosen entries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from muster.protocol.errors import ProofError
from muster.toploc.chunks import SIGN_BIT, Patterns
from muster.toploc.field import PRIME, Residues

_SMALL_CHUNK = 8192
"""Elements up to which chunks are ranked whole, many in one call."""


def select_top(patterns_BE: Patterns, count: int) -> npt.NDArray[np.int64]:
    """Return [B, K]: flat indices of each chunk's `count` largest magnitudes.

    Among equal magnitudes the smaller index is chosen. The order within a row is unspecified: the
    polynomial through the points does not depend on it.
    """
    magnitudes = patterns_BE & np.uint16(0xFFFF ^ SIGN_BIT)
    elements = patterns_BE.shape[1]
    if count >= elements:
        return np.broadcast_to(np.arange(elements), patterns_BE.shape)
    if elements <= _SMALL_CHUNK:
        descending = np.uint16(0xFFFF) - magnitudes
        return np.argsort(descending, axis=1, kind="stable")[:, :count]
    return np.stack([_select_large(row, count) for row in magnitudes])


def _select_large(magnitudes_E: Patterns, count: int) -> npt.NDArray[np.int64]:
    cut = np.partition(magnitudes_E, len(magnitudes_E) - count)[-count]
    above = np.flatnonzero(magnitudes_E > cut)
    at_cut = np.flatnonzero(magnitudes_E == cut)
    return np.concatenate([above, at_cut[: count - len(above)]])


def find_moduli(indices_BK: npt.NDArray[np.int64]) -> Residues:
    """Return [B]: per chunk the largest modulus up to PRIME that keeps its indices distinct.

    Raises ProofError when there is none, which takes indices that no hidden state has.
    """
    moduli = np.full(len(indices_BK), PRIME, np.uint32)
    pending = np.flatnonzero((indices_BK >= PRIME).any(axis=1))
    for modulus in range(PRIME, indices_BK.shape[1] - 1, -1):
        moduli[pending] = modulus
        residues = np.sort(indices_BK[pending] % modulus, axis=1)
        pending = pending[(residues[:, 1:] == residues[:, :-1]).any(axis=1)]
        if not len(pending):
            return moduli
    raise ProofError("no modulus keeps the chosen indices distinct")
