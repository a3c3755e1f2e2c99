"""What the chain says about workers, policies, the end of a run and its own clock, for the checks.

An orchestrator that is gone changes nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from muster.chain import ChainView, Event, LeasedWork, WorkerStatus
from muster.client.tickets import KnownPolicy, TicketTerms
from muster.protocol.eip712 import Domain
from muster.protocol.ids import Address, PolicyVersion, RunId

if TYPE_CHECKING:
    from muster.api import BatchEntry
    from muster.chain import Chain, RunView


class OutcomePlace(NamedTuple):
    """Where a submission is."""

    batch_id: int
    position: int
    """Its place there."""


@dataclass(frozen=True, slots=True)
class MemberAtBlock:
    """A worker as it stood in a run when a block began."""

    worker_id: int
    """Its number in outcome records."""
    node: Address
    """Its node key."""
    status: WorkerStatus
    active_from: int
    """First block in which it counts as active."""

    def is_active(self, block_number: int) -> bool:
        """Return whether it may submit in that block."""
        return self.status is WorkerStatus.ACTIVE and self.active_from <= block_number


class HistoryView(ChainView):
    """A chain view that knows how workers stood in earlier blocks.

    Validators judge by the block a batch was committed in, so that all of them answer alike
    whenever they ask: a ban that came since does not touch work that was committed before.
    """

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self._activations: dict[tuple[RunId, Address], list[tuple[int, int]]] = {}

    def _take_in(self, event: Event) -> None:
        super()._take_in(event)
        if event.name in ("WorkerJoined", "WorkerReturned"):
            change = (event.block_number, event.args["active_from"])
            holder = (event.args["run_id"], event.args["worker"])
            self._activations.setdefault(holder, []).append(change)

    def standing(self, run_id: RunId, worker: Address, *, before: int) -> MemberAtBlock | None:
        """Return how a worker stood in a run when block `before` began; None before it joined."""
        member = self.member(run_id, worker)
        node = member.node_at(before - 1) if member else None
        changes = self._activations.get((run_id, worker), [])
        activations = [active for block, active in changes if block < before]
        if member is None or node is None or not activations:
            return None
        return MemberAtBlock(member.worker_id, node, member.status_at(before - 1), activations[-1])


def entry_of(work: LeasedWork, committed_at: int) -> BatchEntry:
    """Return work that is on chain with its proofs as orchestrators show what they committed."""
    from muster.api import BatchEntry

    return BatchEntry(
        submission=work.submission,
        signature=work.node_signature,
        ticket=work.ticket,
        ticket_signature=work.ticket_signature,
        received_at=committed_at,
    )


def ticket_terms(
    view: ChainView,
    run_id: RunId,
    domain: Domain,
    version: PolicyVersion,
    worker: Address,
    orchestrator: Address,
) -> TicketTerms:
    """Return what a ticket for this policy version must be.

    `worker` holds it; `orchestrator` signs the run's tickets, or did when the batch was committed:
    its key may be rotated since.
    """
    run = view.runs[run_id]
    checkpoint = run.checkpoints.get(version)
    policies = {}
    if checkpoint is not None:
        member = run.members.get(worker)
        beacon = checkpoint.beacon if member is None else member.beacon_under(checkpoint)
        policies[version] = KnownPolicy(root=checkpoint.manifest_root, beacon=beacon)
    return TicketTerms(
        domain=domain,
        orchestrator=orchestrator,
        run_id=run_id,
        worker=worker,
        policies=policies,
    )


def is_over(run: RunView, steps: int) -> bool:
    """Return whether nothing more is generated for a run: its owner closed it, or it has the
    version of its last training step. `steps` is the recipe's number of steps; 0 for no end.
    """
    is_trained = bool(steps) and run.latest_version is not None and run.latest_version >= steps
    return is_trained or bool(run.closed_at)


def settled_at(
    view: ChainView, run_id: RunId, *, outcome_deadline_s: int, challenge_window_s: int
) -> int | None:
    """Return the chain's time from which no outcome of a run can be given or challenged any more,
    as things stand; None while a case about one is open. Seconds; 0 for a run without batches.
    """
    run, ends = view.runs[run_id], [0]
    for batch in view.batches.values():
        if batch.run_id != run_id:
            continue
        if batch.records is None:
            # Its workers may bring it before judges of the network for as long again.
            ends.append(batch.committed_at + outcome_deadline_s + challenge_window_s)
        else:
            ends.append(run.fraud_closes_at(batch.posted_at or 0, challenge_window_s))
    is_disputed = any(not c.closed and c.run_id == run_id for c in view.cases.values())
    return None if is_disputed else max(ends)


class ChainClock:
    """The time that the next block will have at least: between blocks it goes on as ours does."""

    def __init__(self, chain: Chain, clock: Callable[[], float] = time.monotonic) -> None:
        self._chain = chain
        self._clock = clock
        self._head: tuple[int, int, float] | None = None

    async def now(self) -> float:
        """Return Unix seconds; raises ChainError."""
        return (await self.head())[1]

    async def head(self) -> tuple[int, float]:
        """Return the number of the newest block, and Unix seconds; raises ChainError."""
        block, now = await self._chain.latest_block(), self._clock()
        if self._head is None or self._head[:2] != (block.number, block.timestamp):
            self._head = (block.number, block.timestamp, now)
        return block.number, block.timestamp + now - self._head[2]
