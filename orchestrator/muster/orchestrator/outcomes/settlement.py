"""Settlement: fraud outcomes are executed at once, doubtful ones when nobody can overturn them, and
finalised when the challenge window is over. Batches that nobody judged become void, and the money
reserved for them is released.

Step 10 of one rollout, for fraud; honest workers claim their reward themselves. Anyone may send
these transactions; the orchestrator does it for the network.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from muster.chain import Batch, OutcomeProof, SlashState
from muster.chain.frauds import charge_of
from muster.orchestrator.outcomes.breaker import suspects
from muster.orchestrator.ports import ChainPort, Constants
from muster.orchestrator.projection import Judged, Projection
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ChainError
from muster.protocol.ids import Address, RunId, Step
from muster.protocol.jury import summons_of
from muster.protocol.messages import OutcomeRecord, Verdict

OutcomePlace = tuple[int, int]
"""Batch id and position of an outcome."""


class Settlement:
    """Lists the outcomes to execute and finalise now, from the chain alone."""

    def __init__(
        self, projection: Projection, constants: Constants, *, now: Callable[[], int]
    ) -> None:
        self._projection = projection
        self._constants = constants
        self._now = now

    @property
    def challenge_window_s(self) -> int:
        """Seconds during which an outcome may be challenged."""
        return self._constants.challenge_s

    def to_execute(self, failing_check: int | None = None) -> list[OutcomePlace]:
        """Return the outcomes with a standing verdict of fraud that can be executed now.

        Empty while slashing is paused: the ledger would refuse. Frauds at `failing_check`, the
        check that many workers fail, are doubtful and wait for juries, see `_waits`.
        """
        view, commit_time_s = self._projection.view, self._constants.commit_time_s
        if self._projection.run.is_slashing_paused(self._now()):
            return []
        run_id = self._projection.run_id
        executed = {(s.owner, s.offence, s.tag) for s in view.slashes if s.run_id == run_id}
        overturned = (
            (case.batch_id, case.position)
            for case in view.cases.values()
            if case.overturned and case.run_id == run_id
        )
        return [
            place
            for place in dict.fromkeys([*self._projection.frauds, *overturned])
            if self._projection.batch(place[0]) is not None
            and (charge := charge_of(view, *place, commit_time_s=commit_time_s)) is not None
            and charge not in executed
            and not self._waits(place, failing_check)
        ]

    def _waits(self, place: OutcomePlace, failing_check: int | None) -> bool:
        """Return whether a fraud verdict is doubtful and can still be overturned.

        It is doubtful while many workers fail its check, and from a pause about it until the end of
        its challenge window, which the pause extends. It never waits after a jury's verdict, nor
        once its worker withdraws stake: escrow can be returned, but withdrawn stake cannot be
        slashed.
        """
        view, run = self._projection.view, self._projection.run
        batch = view.batches[place[0]]
        record = (batch.records or ())[place[1]]
        worker = view.worker_by_id.get(record.worker_id)
        member = None if worker is None else run.members.get(worker.address)
        is_leaving = member is None or member.unbonding_wei > 0
        if record.verdict is not Verdict.FRAUD or batch.posted_at is None or is_leaving:
            return False
        if record.reason.check == failing_check:
            return True
        if not suspects(run, Judged(*place, record), batch.posted_at, self.challenge_window_s):
            return False
        closes_at = run.fraud_closes_at(batch.posted_at, self.challenge_window_s)
        return self._now() < closes_at or place in self._projection.disputed

    def to_finalise(self) -> list[OutcomePlace]:
        """Return the executed frauds that nobody can challenge any more, with stake in escrow."""
        view, disputed = self._projection.view, self._projection.disputed
        return [
            (slash.batch_id, slash.position)
            for slash in view.slashes
            if slash.batch_id is not None
            and slash.position is not None
            and slash.state is SlashState.ESCROWED
            and (slash.batch_id, slash.position) not in disputed
            and self._is_over(slash.batch_id)
        ]

    def to_void(self) -> list[Batch]:
        """Return the unjudged batches for which workers can no longer appeal."""
        constants, now = self._constants, self._now()
        return [
            batch.header()
            for batch in self._projection.unsettled
            if now >= batch.due_at(constants.outcome_deadline_s) + constants.appeal_s
            and not self._is_in_court(batch.batch_id)
        ]

    def _is_in_court(self, batch_id: int) -> bool:
        case = self._projection.view.cases.get(summons_of(batch_id))
        return case is not None and not case.closed

    def proof(self, place: OutcomePlace) -> OutcomeProof:
        """Return an outcome with its Merkle proof."""
        batch_id, position = place
        return self._projection.view.batches[batch_id].prove(position)

    def name(self, what: str, place: OutcomePlace) -> str:
        """Return the name of an action on an outcome. It holds the record, since a reorganisation
        can change batch ids, and whether a jury found the fraud, which may follow another one.
        """
        batch_id, position = place
        record = OutcomeRecord.from_bytes(self.proof(place).record)
        case = self._projection.view.cases.get(record.leaf(batch_id, position))
        by = " of a jury" if case is not None and case.overturned else ""
        shown = hex0x(keccak(record.to_bytes()))
        return f"{what} fraud{by} in batch {batch_id} at {position}: {shown}"

    def _is_over(self, batch_id: int) -> bool:
        batch = self._projection.batch(batch_id)
        if batch is None or batch.posted_at is None:
            return False
        window_s = self.challenge_window_s
        return self._now() >= self._projection.run.fraud_closes_at(batch.posted_at, window_s)


logger = logging.getLogger(__name__)

MAX_KNOWN = 10_000
"""Most cached answers."""
FRESH_S = 5.0
"""Seconds after which an unpaid slot is queried again."""
TIMEOUT_S = 1.0
"""Seconds that a page waits for the answer."""


class Payments:
    """Tells whether slots were paid, from the escrow contract, with a cache.

    Only one query runs at a time: pages are public, the chain's endpoint is not.
    """

    def __init__(
        self, chain: ChainPort, run_id: RunId, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._chain = chain
        self._run_id = run_id
        self._monotonic = monotonic
        self._asking = asyncio.Lock()
        self._known: dict[tuple[Address, int, int], tuple[bool, float]] = {}

    async def is_paid(self, worker: Address, step: int, index: int) -> bool | None:
        """Return whether a slot was paid; None when the chain does not answer in time."""
        slot = (worker, step, index)
        try:
            async with asyncio.timeout(TIMEOUT_S), self._asking:
                paid, asked_at = self._known.get(slot, (False, float("-inf")))
                if self._monotonic() - asked_at < FRESH_S:
                    return paid
                paid = await self._chain.escrow.is_paid(self._run_id, worker, Step(step), index)
        except (TimeoutError, ChainError) as error:
            logger.warning("the chain does not answer what was paid", extra={"error": str(error)})
            return None
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[slot] = (paid, self._monotonic())
        return paid
