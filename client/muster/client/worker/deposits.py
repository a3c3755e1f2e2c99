"""Files and proofs of work that others have to judge, in the rooms of relays."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from muster.client.chain_facts import entry_of
from muster.client.sources import Sources
from muster.client.worker.context import NodeContext
from muster.client.worker.journal import SignedSubmission
from muster.protocol.ids import Hash32

logger = logging.getLogger(__name__)

FIRST_OFFER_S, LONGEST_OFFER_S = 5.0, 60.0
"""Shortest and longest pause in seconds between two offers of work to rooms that refused it."""
KEPT_S = 300.0
"""Seconds after which rooms that had work are asked whether they still do."""


@dataclass(slots=True)
class _Offers:
    """The offers of a piece of work to rooms."""

    taken: set[str] = field(default_factory=set)
    """URLs of the rooms that have it."""
    is_over: bool = False
    """Whether all rooms had it the last time."""
    pause_s: float = FIRST_OFFER_S
    """Pause in seconds after the next refusal."""
    again_at: float = 0.0
    """Clock time of the next offer."""


class Deposits:
    """Offers a node's work to the rooms of a run."""

    def __init__(
        self,
        context: NodeContext,
        open_rooms: Callable[[], Awaitable[Sources]],
        report: Callable[..., None],
        clock: Callable[[], float],
    ) -> None:
        """`report` warns about something once, as `Steps.report` does."""
        self.context = context
        self._open_rooms = open_rooms
        self._report = report
        self._clock = clock
        self._offers: dict[Hash32, _Offers] = {}

    def forget(self, signed: SignedSubmission) -> None:
        """Offer work anew: a full room may have dropped what no case was about."""
        self._offers.pop(signed.submission.leaf(), None)

    async def offer(self, signed: SignedSubmission) -> bool:
        """Offer work to the rooms that do not have it, unless they were asked just now; return
        whether all had it the last time.
        """
        # A room may not have read the chain yet, be full, or be away for a while. One that has the
        # work may drop it, if it is full and this worker has most there.
        offers = self._offers.setdefault(signed.submission.leaf(), _Offers())
        if self._clock() >= offers.again_at:
            if offers.is_over:
                offers.taken.clear()
            offers.is_over = await self.deposit(signed, offers.taken)
            offers.again_at = self._clock() + (KEPT_S if offers.is_over else offers.pause_s)
            offers.pause_s = min(2 * offers.pause_s, LONGEST_OFFER_S)
        return offers.is_over

    async def deposit(self, signed: SignedSubmission, taken: set[str]) -> bool:
        """Upload file and proofs to all rooms but those in `taken`, which grows; return whether
        none refused them, and whether there is a room at all if relays are known.
        """
        context = self.context
        data = await asyncio.to_thread(context.journal.data, signed)
        if data is None:
            what = "the file is lost: the work may be judged only if somebody else has it"
            self._report(signed.slot, what, **signed.fields)
            return False
        entry = entry_of(self.context.work(signed), signed.ticket.deadline)
        async with await self._open_rooms() as rooms:
            refused = await rooms.deposit(data, entry, without=taken)
        if not rooms.urls and rooms.unasked:
            self._report(
                context.run_id,
                "no relay can be given files: the work may be judged only if somebody else has it",
                relays=rooms.unasked,
                hint="name relays with --relay: those that an orchestrator names must be without "
                "a path, and public unless the orchestrator is in a private network",
            )
            return False
        for url, why in refused.items():
            self._report((signed.slot, url), "a relay does not take the file", why=why)
        new = set(rooms.urls) - refused.keys() - taken
        taken |= new
        if new:
            logger.info("file and proofs are in rooms of relays", extra=signed.fields)
        return not refused
