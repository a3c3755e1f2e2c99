"""What validators' fingerprints of a submission must be, taken while its hidden states are there.

The states of one block are held at a time, whatever the size of the submission.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from muster.client.validator.checks import Claim
from muster.protocol.checking import block_seed, split_blocks
from muster.protocol.ids import Address
from muster.toploc.chunks import Patterns
from muster.toploc.projections import project


class Sketch:
    """Takes a submission's rows in order; nothing is computed without seats."""

    def __init__(self, claim: Claim, seats: Sequence[Address], lengths: Sequence[int]) -> None:
        policy = claim.terms.policies.get(claim.submission.policy_version)
        self._seats = tuple(seats) if policy is not None else ()
        self._beacon = policy.beacon if policy is not None else b""
        self._leaf = claim.submission.leaf()
        self._ends = {rows.stop for rows in split_blocks(lengths)}
        self._rows = 0
        self._blocks = 0
        self._held: list[Patterns] = []
        self._found: dict[Address, list[bytes]] = {seat: [] for seat in self._seats}

    def take(self, hidden_TH: Patterns) -> None:
        """Take the hidden states of the next row."""
        if not self._seats:
            return
        self._rows += 1
        self._held.append(hidden_TH)
        if self._rows in self._ends:
            self._finish_block(np.concatenate(self._held))

    def _finish_block(self, hidden_TH: Patterns) -> None:
        for seat, parts in self._found.items():
            seed = block_seed(seat, self._beacon, self._leaf, self._blocks)  # type: ignore[arg-type]
            parts.append(project(hidden_TH, seed))
        self._held, self._blocks = [], self._blocks + 1

    def fingerprints(self) -> dict[Address, bytes]:
        """Return each seat's fingerprints of the whole submission."""
        return {seat: b"".join(parts) for seat, parts in self._found.items()}
