"""Settlement: fraud outcomes are executed at once and finalised when nobody can challenge any more.

Step 10 of one rollout, for the dishonest; the honest claim their reward themselves. Anyone could
send these transactions; the orchestrator does so that nobody has to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muster.orchestrator.services.projection import Projection
from muster.protocol.ids import Hash32
from muster.protocol.merkle import merkle_proof

Place = tuple[int, int]
"""Batch id and position of an outcome."""


@dataclass(frozen=True, slots=True)
class FraudProof:
    """One fraud outcome with its place and the proof that it was posted."""

    batch_id: int
    """The batch."""
    position: int
    """Place in the batch."""
    record: bytes
    """The 56-byte outcome record."""
    proof: list[Hash32]
    """Merkle proof to the batch's outcomes root."""


class Settlement:
    """What is to be executed or finalised now, derived from the chain alone."""

    def __init__(
        self, projection: Projection, *, challenge_window_s: int, now: Callable[[], int]
    ) -> None:
        self._projection = projection
        self._challenge_window_s = challenge_window_s
        self._now = now

    def to_execute(self) -> list[Place]:
        """Return the fraud outcomes that have not been executed, in chain order."""
        executed = {(s.batch_id, s.position) for s in self._projection.view.slashes}
        return [place for place in self._projection.frauds if place not in executed]

    def to_finalise(self) -> list[Place]:
        """Return the executed frauds whose window is over and whose stake is still in escrow."""
        return [
            (slash.batch_id, slash.position)
            for slash in self._projection.view.slashes
            if slash.batch_id is not None
            and slash.position is not None
            and slash.state.lower() == "escrowed"
            and self._is_over(slash.batch_id)
        ]

    def proof(self, place: Place) -> FraudProof:
        """Return an outcome with its Merkle proof."""
        batch_id, position = place
        records = self._projection.view.batches[batch_id].records or ()
        leaves = [record.leaf(batch_id, i) for i, record in enumerate(records)]
        return FraudProof(
            batch_id, position, records[position].to_bytes(), merkle_proof(leaves, position)
        )

    def _is_over(self, batch_id: int) -> bool:
        batch = self._projection.batch(batch_id)
        if batch is None or batch.posted_at is None:
            return False
        return self._now() >= batch.posted_at + self._challenge_window_s
