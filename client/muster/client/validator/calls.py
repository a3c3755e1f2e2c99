"""A validator's calls: the batches that it must judge now, and those that it judges once more.

The order of a batch and its age follow from the chain. Silence and disagreement happen off chain:
of these the orchestrator tells, by how many it says are called. It can call more, never fewer: a
validator that the batch's age calls judges, whatever the orchestrator says, and stays called.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from muster.chain.structs import BatchStatus
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ApiError
from muster.protocol.ids import Address, BatchName, RunId
from muster.protocol.messages import Verdict
from muster.protocol.schedule import (
    Timing,
    batch_seed,
    called_by_age,
    draw_order,
    is_reaudited,
    order_of_batch,
    timeout_of,
)

if TYPE_CHECKING:
    from muster.chain import BatchView, ChainView, RunView
    from muster.client.validator.place import ValidatorPlace

logger = logging.getLogger(__name__)

ASK_S = 1.0
"""Shortest time between two questions to the orchestrator about who is called."""


@dataclass(frozen=True, slots=True)
class Windows:
    """How long the chain gives."""

    outcome_deadline_s: int
    """Seconds after a commitment by which outcomes are due."""
    challenge_window_s: int
    """Seconds after outcomes during which they may be challenged."""

    @property
    def whole_s(self) -> int:
        """Both together."""
        return self.outcome_deadline_s + self.challenge_window_s


def recent_batches(view: ChainView, run_id: RunId, whole_s: int) -> list[BatchView]:
    """Return a run's batches about which there may be something to do, oldest first.

    Those that were over when the newest one was committed are not looked at: a run has many. What
    was taken out of an older batch has a late number and an early time: it ends no search.
    """
    batches = view.batches
    if not batches:
        return []
    over_at = next(reversed(batches.values())).committed_at - whole_s
    newest_first = takewhile(
        lambda b: b.committed_at > over_at or b.split_from is not None, reversed(batches.values())
    )
    mine = (b for b in newest_first if b.run_id == run_id)
    return sorted(mine, key=lambda batch: batch.batch_id)


def order_of(batch: BatchView, run: RunView) -> tuple[Address, ...]:
    """Return the order in which a run's validators are called for a batch."""
    seed = batch_seed(batch.beacon, batch.run_id, batch.batch_id, batch.root)
    return order_of_batch(seed, batch.seated, run.validators)


class CallDuty:
    """One validator's calls in one run."""

    def __init__(self, place: ValidatorPlace) -> None:
        self.place = place
        self.me = address_of(place.key)
        self._called = set[BatchName]()
        self._asked_at = float("-inf")

    async def due(self) -> tuple[list[BatchView], bool]:
        """Return what to judge or to hand over now, oldest first, and whether there is more that
        this validator may be called for later.
        """
        waiting = self._waiting()
        if not waiting:
            self._called.clear()
            return [], False
        now = await self.place.now()
        open_batches = [b for b in waiting if now < self._timing(b).due_at]
        self._called |= {b.name for b in open_batches if self._is_called(b, now)}
        uncalled = [b for b in open_batches if b.name not in self._called]
        if self.place.checks_everything:
            mine = [b for b in open_batches if b.name in self._called]
            return mine + uncalled, False
        if uncalled and self.place.clock() >= self._asked_at + ASK_S:
            self._called |= await self._ask(uncalled)
        mine = [b for b in open_batches if b.name in self._called]
        return mine, len(mine) < len(open_batches)

    def _waiting(self) -> list[BatchView]:
        """Return the run's batches whose outcomes may be due, oldest first."""
        return [b for b in self._recent() if b.status is BatchStatus.COMMITTED]

    def _recent(self) -> list[BatchView]:
        return recent_batches(self.place.view, self.place.run_id, self.place.windows.whole_s)

    def _timing(self, batch: BatchView) -> Timing:
        deadline_s = self.place.windows.outcome_deadline_s
        return Timing(batch.committed_at, deadline_s, timeout_of(deadline_s))

    def _is_called(self, batch: BatchView, now: int) -> bool:
        # A judged batch is handed over until its outcomes are posted.
        if self.place.journal.judged(batch.name) is not None or batch.name in self._called:
            return True
        order, quorum = order_of(batch, self.place.run), self.place.run.config.terms.quorum
        return self.me in called_by_age(order, quorum, self._timing(batch), now)

    async def _ask(self, uncalled: list[BatchView]) -> set[BatchName]:
        """Return which of these the orchestrator calls this validator for."""
        self._asked_at = self.place.clock()
        try:
            called = await self.place.api.called(after=uncalled[0].batch_id - 1)
        except ApiError as error:
            # The batch's age calls in the end.
            logger.debug("no answer about who is called", extra={"error": str(error)})
            return set()
        return {
            batch.name
            for batch in uncalled
            if self.me in order_of(batch, self.place.run)[: called.get(batch.batch_id, 0)]
        }

    async def reaudits(self) -> list[BatchView]:
        """Return the accepted batches that this validator checks once more, oldest first."""
        found = [b for b in self._recent() if self._is_mine_to_reaudit(b)]
        if not found:
            return []
        now = await self.place.now()
        return [
            b for b in found if now < (b.posted_at or 0) + self.place.windows.challenge_window_s
        ]

    def _is_mine_to_reaudit(self, batch: BatchView) -> bool:
        if not batch.records or batch.posted_beacon is None:
            return False
        seed = batch_seed(batch.posted_beacon, batch.run_id, batch.batch_id, batch.root)
        if not is_reaudited(seed) or self.place.journal.judged(batch.name) is not None:
            return False
        if any(record.verdict is not Verdict.ACCEPTED for record in batch.records):
            return False
        seats = self.place.run.seats
        fresh = [v for v in self.place.run.validators if not seats[v] & batch.signers]
        return draw_order(seed, fresh)[:1] == (self.me,)
