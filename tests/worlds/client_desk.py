"""A worker's loop among fakes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from muster.client.outage import Outages
from muster.client.worker.context import WorkerContext
from muster.client.worker.journal import SubmissionJournal
from muster.client.worker.loop import WorkerLoop
from muster.lifecycle.outage import Outage
from muster.protocol.errors import ChainUnreachable
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.recipe import Recipe
from worlds import client_world
from worlds.client_chain import WORKER_ID, FakeFetcher, FakeOrchestrator, make_batch, make_view

Check = Callable[[], bool]


class Desk:
    """A worker's loop among fakes."""

    def __init__(
        self,
        state: Path,
        loop_class: type[WorkerLoop] = WorkerLoop,
        *,
        engine: client_world.HashEngine | None = None,
        recipe: Recipe = client_world.RECIPE,
        keep_going: bool = False,
    ) -> None:
        self.orchestrator = FakeOrchestrator()
        self.fetcher = FakeFetcher()
        self.engine = engine or client_world.HashEngine()
        self.view = make_view()
        self.journal = SubmissionJournal(state)
        self.chain_errors = 0
        self.now_s = client_world.NOW
        context = WorkerContext(
            run_id=client_world.RUN,
            worker=client_world.WORKER,
            key=client_world.NODE_KEY,
            domain=client_world.DOMAIN,
            view=self.view,
            now=self.now,
            api=self.orchestrator,  # type: ignore[arg-type]
            fetcher=self.fetcher,  # type: ignore[arg-type]
            engine=self.engine,  # type: ignore[arg-type]
            rules=replace(client_world.RULES, recipe=recipe),
            journal=self.journal,
            poll_s=0.001,
            heartbeat_s=0.005,
            keep_going=keep_going,
        )
        self.loop = loop_class(context)
        quick = {"first_s": 0.001, "longest_s": 0.002}
        self.loop.held.outages = Outages(**quick)
        self.loop.held.refusals = Outage("a ticket that can be worked on", **quick)

    async def now(self) -> int:
        if self.chain_errors:
            self.chain_errors -= 1
            raise ChainUnreachable("no answer")
        return self.now_s

    def post(self, batch_id: int, *records: OutcomeRecord) -> Any:
        self.view.batches[batch_id] = make_batch(batch_id, [], list(records))
        return SimpleNamespace(name="OutcomesPosted", args={"batch_id": batch_id})

    def close(self) -> None:
        self.loop.compute.close()
        self.journal.close()


async def run_until(loop: WorkerLoop, check: Check) -> None:
    """Run the loop until the check is true, three minutes at most; raises what the loop raises."""
    running = asyncio.ensure_future(loop.run())
    try:
        async with asyncio.timeout(180):
            while not check():
                if running.done():
                    running.result()
                await asyncio.sleep(0.002)
    finally:
        running.cancel()
        await asyncio.wait([running])


def make_record(
    verdict: Verdict = Verdict.ACCEPTED, reason: Reason = Reason.NONE, *, index: int = 0
) -> OutcomeRecord:
    """Return an outcome of the file that an honest worker makes for a ticket."""
    ticket = client_world.make_ticket(index=index)
    submission = client_world.make_submission(ticket, client_world.make_rollouts(ticket), units=20)
    honest = client_world.as_claimed(submission, WORKER_ID)
    return replace(honest, verdict=verdict, reason=reason)
