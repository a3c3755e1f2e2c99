"""Settlement: fraud outcomes are executed at once and finalised when nobody can challenge any more.

Step 10 of one rollout, for the dishonest; the honest claim their reward themselves. Anyone could
send these transactions; the orchestrator does so that nobody has to.
"""

from __future__ import annotations

from collections.abc import Callable

from muster.chain import OutcomeProof, SlashState
from muster.orchestrator.services.projection import Projection
from muster.protocol.ids import Hash32
from muster.protocol.messages import Verdict

Place = tuple[int, int]
"""Batch id and position of an outcome."""


class Settlement:
    """What is to be executed or finalised now, derived from the chain alone."""

    def __init__(
        self, projection: Projection, *, challenge_window_s: int, now: Callable[[], int]
    ) -> None:
        self._projection = projection
        self.challenge_window_s = challenge_window_s
        self._now = now

    def to_execute(self) -> list[Place]:
        """Return the outcomes whose standing verdict is fraud and that were not executed.

        None while slashing is paused: the ledger would refuse.
        """
        view = self._projection.view
        if self._projection.run.is_slashing_paused(self._now()):
            return []
        executed = {slash.offence for slash in view.slashes}
        overturned = [
            (case.batch_id, case.position) for case in view.cases.values() if case.overturned
        ]
        return [
            place
            for place in dict.fromkeys([*self._projection.frauds, *overturned])
            if self._projection.batch(place[0]) is not None
            and self._offence(place) not in executed
            and view.standing_verdict(*place) is Verdict.FRAUD
        ]

    def _offence(self, place: Place) -> Hash32 | None:
        """Return the judged file's name in slashes: it is slashed once, whatever its batch."""
        batch = self._projection.view.batches[place[0]]
        return (batch.records or ())[place[1]].offence(batch.run_id)

    def to_finalise(self) -> list[Place]:
        """Return the executed frauds that nobody can challenge any more, with stake in escrow."""
        view = self._projection.view
        disputed = {(c.batch_id, c.position) for c in view.cases.values() if not c.closed}
        return [
            (slash.batch_id, slash.position)
            for slash in view.slashes
            if slash.batch_id is not None
            and slash.position is not None
            and slash.state is SlashState.ESCROWED
            and (slash.batch_id, slash.position) not in disputed
            and self._is_over(slash.batch_id)
        ]

    def proof(self, place: Place) -> OutcomeProof:
        """Return an outcome with its Merkle proof."""
        batch_id, position = place
        return self._projection.view.batches[batch_id].prove(position)

    def _is_over(self, batch_id: int) -> bool:
        batch = self._projection.batch(batch_id)
        if batch is None or batch.posted_at is None:
            return False
        window_s = self.challenge_window_s
        return self._now() >= self._projection.run.fraud_closes_at(batch.posted_at, window_s)
