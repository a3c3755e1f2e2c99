"""Turns hidden states, as the decode loop yields them step by step, into proofs per sample.

Holds at most one unfinished chunk per row, so memory does not grow with the completion's length.
Axes: R rows of the batch, C tokens of a chunk, H hidden units.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from muster.protocol.recipe import ProofRecipe
from muster.toploc import build_proofs_many

_PENDING_ELEMENTS = 1 << 25
"""Entries of finished chunks that wait for a joint build: 64 MiB of patterns."""


class Commitments:
    """The growing proofs of one batch."""

    def __init__(self, rows: int, hidden_size: int, longest: int, proof: ProofRecipe) -> None:
        self._proof = proof
        self._chunk_RCH = np.empty((rows, min(proof.chunk_tokens, longest), hidden_size), np.uint16)
        self._pending: list[tuple[int, npt.NDArray[np.uint16]]] = []
        self._pending_elements = 0
        self._proofs: list[list[bytes]] = [[] for _ in range(rows)]

    def add(
        self,
        rows: npt.NDArray[np.int64],
        hidden: npt.NDArray[np.uint16],
        position: int,
        is_last: npt.NDArray[np.bool_],
    ) -> None:
        """Take the hidden states that predicted completion token `position` of some rows.

        A chunk closes when it is full or the row's token was its last.
        """
        offset = position % self._proof.chunk_tokens
        self._chunk_RCH[rows, offset] = hidden
        closes = is_last if offset + 1 < self._proof.chunk_tokens else np.ones_like(is_last)
        for row in rows[closes].tolist():
            chunk = self._chunk_RCH[row, : offset + 1].copy()
            self._pending.append((row, chunk))
            self._pending_elements += chunk.size
        if self._pending_elements > _PENDING_ELEMENTS:
            self._build()

    def finish(self) -> list[list[bytes]]:
        """Return every row's proofs; raises ProofError when hidden states were not finite."""
        self._build()
        return self._proofs

    def _build(self) -> None:
        built = build_proofs_many(
            [chunk for _, chunk in self._pending],
            chunk_tokens=self._proof.chunk_tokens,
            topk=self._proof.topk,
        )
        for (row, _), proofs in zip(self._pending, built, strict=True):
            self._proofs[row] += proofs
        self._pending, self._pending_elements = [], 0
