"""Work that a node signed and its journal lacks: it is an old copy, or another process has the key.

Two submissions for one slot prove a fraud, so a node that finds such work submits nothing directly.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable

from muster.api import BatchEntry
from muster.chain import StreamItem
from muster.client.outage import SURVIVED
from muster.client.sources import Sources
from muster.client.worker.context import NodeContext
from muster.client.worker.journal import slot_of
from muster.protocol.eip712 import signer_of
from muster.protocol.ids import Address
from muster.protocol.messages import OutcomeRecord, Submission

logger = logging.getLogger(__name__)

LONGEST_ASK_S = 60.0
"""Longest pause in seconds between two queries about the same work."""
LOOK_UP_S = 5.0
"""Deadline in seconds for one round of queries."""


class Elsewhere:
    """Looks for work that a node signed without its journal."""

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
        self._read_stream: list[StreamItem] | None = None
        self._read_for: Address | None = None
        self._read_count = 0
        """Items of this stream that were compared with the journal, for this node."""
        self._unproven = deque[StreamItem]()
        """Those of them that the journal lacks; the one that is asked for next is first."""
        self._look_again_at = 0.0
        """Clock time of the next look for their signatures."""
        self.lacking: OutcomeRecord | None = None
        """One of them that this node signed."""

    async def look(self) -> None:
        """Look for this node's signature on accepted work that its journal lacks, for a few seconds
        only. A record alone does not count: a run could invent it for nothing.
        """
        has_news, now = self._read_outcomes(), self._clock()
        if self.lacking is not None or not (has_news or now >= self._look_again_at):
            return
        self._look_again_at = now + LONGEST_ASK_S
        try:
            async with asyncio.timeout(LOOK_UP_S):
                for _ in range(len(self._unproven)):
                    item = self._unproven[0]
                    self._unproven.rotate(-1)
                    if await self._is_signed(item):
                        self.lacking = item.record
                        return
                    what = "the journal lacks accepted work, and nobody shows this node's signature"
                    self._report(
                        (item.batch_id, item.position),
                        what,
                        step=item.record.step,
                        index=item.record.index,
                    )
        except TimeoutError:
            logger.debug("sources are too slow to show accepted work")

    def _read_outcomes(self) -> bool:
        """Note the accepted outcomes of this node's work that its journal lacks; return whether
        there are new ones."""
        context, stream = self.context, self.context.run.stream
        member = context.view.member(context.run_id, context.worker)
        if member is None:
            return False
        # A view that is rewound has another stream.
        if self._read_stream is not stream or self._read_for != member.node:
            self._read_stream, self._read_for = stream, member.node
            self._read_count, self.lacking = 0, None
            self._unproven.clear()
        known = len(self._unproven)
        for item in stream[self._read_count :]:
            record = item.record
            if record.worker_id != member.worker_id:
                continue
            slot = (context.run_id, context.worker, record.step, record.index)
            block_number = context.view.batches[item.batch_id].work_block
            is_lacking = context.journal.signed_in(slot) is None
            if is_lacking and member.node_at(block_number) == member.node:
                self._unproven.append(item)
        self._read_count = len(stream)
        return len(self._unproven) > known

    async def _is_signed(self, item: StreamItem) -> bool:
        """Return whether the chain, the orchestrator or a relay shows a submission for an accepted
        record's slot with this node's signature."""
        context, record = self.context, item.record
        slot = (context.run_id, context.worker, record.step, record.index)
        recorded = Submission(
            *slot, record.policy_version, record.file_hash, record.rollouts, record.units
        )

        def is_signed(shown: Submission, signature: bytes) -> bool:
            signer = signer_of(context.domain, shown, signature)
            return slot_of(shown) == slot and signer == self._read_for

        def is_ours(entry: BatchEntry) -> bool:
            return is_signed(entry.submission, entry.signature)

        # The chain verified whose direct work this is, but not that its record is about it.
        work = context.view.batches[item.batch_id].work
        if work is not None and is_signed(work.submission, work.node_signature):
            return True
        with contextlib.suppress(*SURVIVED):
            if context.api is not None:
                shown = (await context.api.batch(item.batch_id)).submissions
                if any(is_ours(entry) for entry in shown):
                    return True
        with contextlib.suppress(*SURVIVED):
            async with await self._open_rooms() as rooms:
                await rooms.work(recorded.leaf(), is_ours)
                return True
        return False
