"""The network between nodes and the orchestrator: delay, loss, and direct calls instead of HTTP.

`SimulatedApi` has the interface of `OrchestratorApi`; behind it are the services of the one
orchestrator.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from muster.api import Lease, NoWork
from muster.api.answers import BatchContents, HeartbeatAnswer
from muster.lab.simulator.clock import charged
from muster.orchestrator.http.errors import refuse, unknown_batch
from muster.orchestrator.intake.intake import AlreadyHeld
from muster.orchestrator.leases.leases import SignedTicket
from muster.orchestrator.services import Services
from muster.protocol.errors import ApiError
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId
from muster.protocol.messages import HardwareReport, Submission, Ticket

T = TypeVar("T")

ORCHESTRATOR = "orchestrator"
"""Name of the orchestrator in the meter."""


@dataclass(slots=True)
class Link:
    """Delay and loss of a node's requests."""

    rng: random.Random
    """Draws delays and losses."""
    latency_s: float
    """Mean one-way delay: three quarters of it are fixed, a quarter is exponential."""
    loss: float
    """Share of requests, and of answers, that are lost."""
    timeout_s: float = 10.0
    """Seconds after which a node gives up a lost request."""
    is_up: bool = True
    """Whether messages pass at all."""

    async def passes(self) -> None:
        """Delay one message; raises ApiError when it is lost."""
        if not self.is_up or self.rng.random() < self.loss:
            await asyncio.sleep(self.timeout_s)
            raise ApiError("no answer from the orchestrator", status=503, code="unreachable")
        await asyncio.sleep(self.latency_s * (0.75 + 0.25 * self.rng.expovariate(1.0)))


class Desk:
    """The orchestrator's end of the network, as `muster.orchestrator.http` is for HTTP."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.requests: Counter[str] = Counter()
        """Number of requests that arrived, by kind."""

    async def heartbeat(
        self, node: Address, version: PolicyVersion | None, state: str, software: str,
        hardware: tuple[HardwareReport, bytes] | None,
    ) -> HeartbeatAnswer:  # fmt: skip
        """Store a heartbeat."""
        services = self.services
        worker = services.identities.active_worker(node)
        writes = [services.heartbeats.beat(node, version, state, software)]
        if hardware is not None:
            report, signature = hardware
            writes.append(services.hardware.note(node, report.to_json(), signature))
        await services.group.add(*writes, caller=node)
        return HeartbeatAnswer(
            status=worker.status.lower(),
            policy_version=services.projection.run.latest_version,
            wants_hardware=services.hardware.wants(node),
        )

    async def lease(
        self, node: Address, holding: Sequence[Ticket], version: PolicyVersion | None
    ) -> Lease | NoWork:
        """Return a ticket or when to ask again."""
        services = self.services
        worker = services.identities.active_worker(node)
        held = frozenset((each.step, each.index) for each in holding)
        signed = await services.leases.lease(worker, held, version)
        if isinstance(signed, SignedTicket):
            return Lease(ticket=signed.ticket, signature=signed.signature)
        reason = None if signed is None else signed.value
        return NoWork(retry_after_s=services.settings.retry_after_s, reason=reason)

    async def submit(
        self, node: Address, submission: Submission, signature: bytes, body: bytes
    ) -> Hash32:
        """Take in a file."""
        services = self.services
        worker = services.identities.active_worker(node)
        admitted = await services.intake.admit(worker, submission, signature)
        if not isinstance(admitted, AlreadyHeld):
            await services.intake.store(admitted, _stream(body))
        return submission.file_hash

    async def called(self, validator: Address, after: int) -> dict[int, int]:
        """Return how many validators are called, by batch."""
        services = self.services
        services.identities.require_validator(validator)
        due = await services.outcomes.calls(after=after, limit=1000)
        return {batch: len(calls.called) for batch, calls in due}

    async def batch(self, batch_id: int) -> BatchContents:
        """Return a batch's submissions."""
        services = self.services
        found = services.projection.batch(batch_id)
        contents = found and await services.batching.contents(found)
        if not contents:
            raise unknown_batch(batch_id, read_to=services.projection.view.block_number)
        return contents

    async def file(self, reader: Address, name: Hash32) -> bytes:
        """Return a submission's file."""
        services = self.services
        services.identities.require_reader(reader)
        place = await services.files.find(name)
        if place is None:
            raise refuse("file_unknown", "this orchestrator has no file with this hash")
        return Path(place).read_bytes()

    async def outcomes(
        self, validator: Address, batch_id: int, records: bytes, signature: bytes
    ) -> None:
        """Take a validator's outcomes."""
        self.services.identities.require_validator(validator)
        await self.services.outcomes.receive(validator, batch_id, records, signature)


async def _stream(body: bytes) -> AsyncIterator[bytes]:
    yield body


class SimulatedApi:
    """A node's client of the orchestrator, in place of `OrchestratorApi`."""

    def __init__(self, desk: Desk, account: Address, link: Link) -> None:
        self._desk, self._account, self.link = desk, account, link

    async def _ask(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        try:
            await self.link.passes()
        except BaseException:
            work.close()
            raise
        self._desk.requests[what] += 1
        answer = await charged(ORCHESTRATOR, work)
        await self.link.passes()
        return answer

    async def heartbeat(
        self,
        _run_id: RunId,
        *,
        policy_version: PolicyVersion | None,
        state: str,
        software: str,
        hardware: tuple[HardwareReport, bytes] | None = None,
    ) -> HeartbeatAnswer:
        """Send a heartbeat."""
        said = (policy_version, state, software, hardware)
        return await self._ask("heartbeat", self._desk.heartbeat(self._account, *said))

    async def lease(
        self,
        _run_id: RunId,
        holding: Sequence[Ticket] = (),
        *,
        version: PolicyVersion | None = None,
    ) -> Lease | NoWork:
        """Return a ticket, or when to ask again."""
        return await self._ask("lease", self._desk.lease(self._account, holding, version))

    async def submit(self, submission: Submission, signature: bytes, body: bytes) -> Hash32:
        """Upload a file."""
        work = self._desk.submit(self._account, submission, signature, body)
        return await self._ask("submit", work)

    async def called(self, *, after: int = 0) -> dict[int, int]:
        """Return how many validators are called, by batch."""
        return await self._ask("called", self._desk.called(self._account, after))

    async def batch(self, batch_id: int) -> BatchContents:
        """Return a batch's submissions."""
        return await self._ask("batch", self._desk.batch(batch_id))

    async def file(self, name: Hash32) -> bytes:
        """Return a file."""
        return await self._ask("file", self._desk.file(self._account, name))

    async def post_outcomes(self, batch_id: int, records: bytes, signature: bytes) -> None:
        """Hand over outcomes."""
        work = self._desk.outcomes(self._account, batch_id, records, signature)
        await self._ask("outcomes", work)
