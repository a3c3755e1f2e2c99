"""Settlement: fraud outcomes are executed at once and finalised when nobody can challenge any more.

Step 10 of one rollout, for the dishonest; the honest claim their reward themselves. Anyone could
send these transactions; the orchestrator does so that nobody has to.
"""

from __future__ import annotations

from collections.abc import Callable

from muster.chain import OutcomeProof, SlashState
from muster.orchestrator.services.breaker import suspects
from muster.orchestrator.services.projection import Judged, Projection
from muster.protocol.breaker import check_of
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

    def to_execute(self, failing_check: int | None = None) -> list[Place]:
        """Return the outcomes whose standing verdict is fraud and that are to be executed now.

        None while slashing is paused: the ledger would refuse. Frauds that many failures alike
        make doubtful wait for juries, see `_waits`; `failing_check` is the check that many fail.
        """
        view = self._projection.view
        if self._projection.run.is_slashing_paused(self._now()):
            return []
        executed = {slash.offence for slash in view.slashes}
        # Offences are hashed, and a long run has many: not those of places that were executed.
        done = {(slash.batch_id, slash.position) for slash in view.slashes}
        overturned = [
            (case.batch_id, case.position) for case in view.cases.values() if case.overturned
        ]
        return [
            place
            for place in dict.fromkeys([*self._projection.frauds, *overturned])
            if place not in done
            and self._projection.batch(place[0]) is not None
            and self._offence(place) not in executed
            and view.standing_verdict(*place) is Verdict.FRAUD
            and not self._waits(place, failing_check)
        ]

    def _waits(self, place: Place, failing_check: int | None) -> bool:
        """Return whether a fraud verdict is doubtful and can still be overturned.

        It is while many fail its check, and from a pause about it until its challenge window, which
        the pause prolongs, is over. Never where a jury found it, nor once its worker's stake is on
        the way out: an escrow can be given back, stake that left cannot be slashed.
        """
        view, run = self._projection.view, self._projection.run
        batch = view.batches[place[0]]
        record = (batch.records or ())[place[1]]
        worker = view.worker_by_id.get(record.worker_id)
        is_leaving = worker is None or worker.unbonding_wei > 0
        if record.verdict is not Verdict.FRAUD or batch.posted_at is None or is_leaving:
            return False
        if check_of(record.reason) == failing_check:
            return True
        if not suspects(run, Judged(*place, record), batch.posted_at, self.challenge_window_s):
            return False
        closes_at = run.fraud_closes_at(batch.posted_at, self.challenge_window_s)
        return self._now() < closes_at or self._is_disputed(place)

    def _is_disputed(self, place: Place) -> bool:
        cases = self._projection.view.cases.values()
        return any((c.batch_id, c.position) == place and not c.closed for c in cases)

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
