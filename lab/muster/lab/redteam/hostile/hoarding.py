"""A worker that wants every ticket of a run: it changes its node, lets tickets lapse, or fills them
with empty files, and asks again.

Tickets that it holds keep others from work until they lapse or are judged.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from muster.api import Lease, OrchestratorApi
from muster.protocol.eip712 import Domain, digest, sign
from muster.protocol.encoding import file_hash
from muster.protocol.ids import RunId
from muster.protocol.messages import Submission, Ticket

Rotate = Callable[[], Awaitable[bytes]]
"""Binds a new node to the worker on chain, and returns its private key."""


@dataclass(frozen=True, slots=True)
class Hoarder:
    """A worker of a run."""

    run_id: RunId
    """The run."""
    key: bytes
    """Its first node's private key."""
    connect: Callable[[bytes], OrchestratorApi]
    """Returns a client of the orchestrator that signs with a key."""
    domain: Domain
    """EIP-712 domain of the ContributionLedger."""


@dataclass(slots=True)
class Hoard:
    """The tickets that a hoarder got."""

    asked: int = 0
    """Number of requests for work."""
    tickets: dict[tuple[int, int], Ticket] = field(default_factory=dict)
    """Received tickets by step and index."""
    key: bytes = b""
    """The private key of its last node."""

    def held(self, now: int) -> int:
        """Return how many tickets can still be filled at a time of the chain's clock."""
        return sum(ticket.deadline >= now for ticket in self.tickets.values())


async def hoard(
    worker: Hoarder, asks: int, *, rotate: Rotate | None = None, fills: bool = False
) -> Hoard:
    """Ask for work repeatedly, each time as a new node if `rotate` is given; with `fills`, upload
    an empty file for every ticket, which frees the node for the next one.
    """
    found = Hoard(key=worker.key)
    for number in range(asks):
        async with worker.connect(found.key) as api:
            found.asked += 1
            answer = await api.lease(worker.run_id)
            if isinstance(answer, Lease):
                found.tickets[answer.ticket.step, answer.ticket.index] = answer.ticket
                if fills:
                    await _fill(api, worker, found.key, answer.ticket, b"nothing %d" % number)
        if rotate is not None:
            found.key = await rotate()
    return found


async def _fill(
    api: OrchestratorApi, worker: Hoarder, key: bytes, ticket: Ticket, body: bytes
) -> None:
    body += repr((ticket.worker, ticket.step, ticket.index)).encode()
    claim = Submission(
        run_id=worker.run_id,
        worker=ticket.worker,
        step=ticket.step,
        index=ticket.index,
        policy_version=ticket.policy_version,
        file_hash=file_hash(body),
        rollouts=1,
        units=1,
    )
    await api.submit(claim, sign(digest(worker.domain, claim.struct_hash()), key), body)
