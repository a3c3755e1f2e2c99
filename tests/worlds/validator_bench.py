"""A validator's loop among fakes."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.api import BatchEntry
from muster.client.outage import Outages
from muster.client.validator.calls import Windows
from muster.client.validator.context import ValidatorContext
from muster.client.validator.loop import ValidatorLoop
from muster.client.validator.records import EvidenceStore, OutcomeJournal
from muster.protocol.messages import OutcomeRecord, Reason, Ticket, Verdict, unpack_records
from muster.protocol.rollouts import Bounds, Rollout, decode_rollouts, encode_rollouts
from worlds import client_world
from worlds.client_chain import FakeFetcher, FakeOrchestrator, make_view


class PlainDecoder:
    """Decodes in this process, which is safe only for the tests' own files."""

    async def decode(self, data: bytes, bounds: Bounds) -> list[Rollout]:
        return decode_rollouts(data, bounds)


class Bench:
    """A validator's loop among fakes."""

    def __init__(self, state: Path, orchestrator: FakeOrchestrator | None = None) -> None:
        self.orchestrator = orchestrator or FakeOrchestrator()
        self.fetcher = FakeFetcher()
        self.engine = client_world.HashEngine()
        self.view = make_view()
        self.journal = OutcomeJournal(state)
        self.evidence = state / "evidence"
        self.seconds = 0.0
        self.chain_time = client_world.NOW + 30
        context = ValidatorContext(
            run_id=client_world.RUN,
            key=client_world.VALIDATOR_KEY,
            domain=client_world.DOMAIN,
            view=self.view,
            api=self.orchestrator,  # type: ignore[arg-type]
            fetcher=self.fetcher,  # type: ignore[arg-type]
            engine=self.engine,  # type: ignore[arg-type]
            rules=client_world.RULES,
            decoder=PlainDecoder(),  # type: ignore[arg-type]
            journal=self.journal,
            evidence=EvidenceStore(self.evidence, client_world.CALIBRATION),
            poll_s=0.001,
            file_patience_s=60,
            windows=Windows(outcome_deadline_s=800, challenge_window_s=400),
            now=self.now,
            clock=lambda: self.seconds,
        )
        self.start(context)

    def start(self, context: ValidatorContext) -> None:
        self.loop = ValidatorLoop(context)
        self.loop.outages = Outages(first_s=0.001, longest_s=0.002)

    def change(self, **changes: Any) -> None:
        """Start the validator again with other parts."""
        self.loop.examiner.close()
        self.start(replace(self.loop.context, **changes))

    async def now(self) -> int:
        return self.chain_time

    def commit(self, batch_id: int, entries: list[BatchEntry], *data: bytes) -> Any:
        batch = self.orchestrator.commit(batch_id, entries, *data)
        self.view.batches[batch_id] = batch
        return batch

    def commit_honest(self, batch_id: int, *indices: int) -> Any:
        made = [honest(client_world.make_ticket(index=i)) for i in indices]
        return self.commit(batch_id, [e for e, _ in made], *[d for _, d in made])

    async def judge(self, batch: Any) -> list[tuple[Verdict, Reason]]:
        return [(r.verdict, r.reason) for r in await self.loop.judge(batch)]

    def posted(self) -> list[OutcomeRecord]:
        return unpack_records(self.orchestrator.outcomes[-1][1])

    def close(self) -> None:
        self.loop.examiner.close()
        self.journal.close()


def honest(ticket: Ticket) -> tuple[BatchEntry, bytes]:
    rows = client_world.make_rollouts(ticket)
    return client_world.make_entry(
        ticket, client_world.make_submission(ticket, rows)
    ), encode_rollouts(rows)


async def run_until(bench: Bench, check: Callable[[], bool]) -> None:
    running = asyncio.ensure_future(bench.loop.run())
    try:
        async with asyncio.timeout(180):
            while not check():
                if running.done():
                    running.result()
                await asyncio.sleep(0.002)
                await bench.loop.on_change([])
    finally:
        running.cancel()
        await asyncio.wait([running])


ACCEPTED = (Verdict.ACCEPTED, Reason.NONE)
