"""Facts on chain that the checks need: workers, policies, the end of a run, the chain's clock.

They do not depend on the orchestrator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from muster.chain import ChainView, CourtTerms, Event, LeasedWork, WorkerStatus
from muster.client.tickets import KnownPolicy, TicketTerms
from muster.lifecycle import uptime_s
from muster.protocol.eip712 import Domain
from muster.protocol.ids import Address, Hash32, PolicyVersion, RunId

if TYPE_CHECKING:
    from muster.api import BatchEntry
    from muster.chain import Chain, RunView


class OutcomePlace(NamedTuple):
    """Place of a submission on chain."""

    batch_id: int
    position: int
    """Its place in the batch."""


@dataclass(frozen=True, slots=True)
class MemberAtBlock:
    """A worker's status in a run when a block began."""

    worker_id: int
    """Its id in outcome records."""
    node: Address
    """Its node key."""
    status: WorkerStatus
    active_from: int
    """First block in which it counts as active."""

    def is_active(self, block_number: int) -> bool:
        """Return whether it may submit in that block."""
        return self.status is WorkerStatus.ACTIVE and self.active_from <= block_number


class HistoryView(ChainView):
    """A chain view that knows the status of workers in earlier blocks.

    Validators judge a batch by the block of its commitment, so that all of them agree at any time:
    a later ban does not affect work that was committed before.
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
        """Return a worker's status in a run when block `before` began; None before it joined."""
        member = self.member(run_id, worker)
        node = member.node_at(before - 1) if member else None
        changes = self._activations.get((run_id, worker), [])
        activations = [active for block, active in changes if block < before]
        if member is None or node is None or not activations:
            return None
        return MemberAtBlock(member.worker_id, node, member.status_at(before - 1), activations[-1])


def entry_of(work: LeasedWork, committed_at: int) -> BatchEntry:
    """Return work whose proofs are on chain in the form in which orchestrators show batches."""
    from muster.api import BatchEntry

    return BatchEntry(
        submission=work.submission,
        signature=work.node_signature,
        ticket=work.ticket,
        ticket_signature=work.ticket_signature,
        received_at=committed_at,
    )


def ruled_in(view: ChainView, case_id: Hash32) -> int | None:
    """Return the ruling, as a number, that a jury put in the place of what was recorded; None when
    there is no such case, or it did not.
    """
    case = view.cases.get(case_id)
    return case.ruling if case is not None and case.overturned else None


def ticket_terms(
    view: ChainView,
    run_id: RunId,
    domain: Domain,
    version: PolicyVersion,
    worker: Address,
    orchestrator: Address,
) -> TicketTerms:
    """Return the terms that a ticket for this policy version must fulfil.

    `worker` holds it; `orchestrator` is the account that signed the run's tickets when the batch
    was committed: the key may have been rotated since.
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
    """Return whether a run needs no more rollouts: its owner closed it, or it has the version of
    its last training step. `steps` is the recipe's number of steps; 0 for no end.
    """
    is_trained = bool(steps) and run.latest_version is not None and run.latest_version >= steps
    return is_trained or bool(run.closed_at)


def settled_at(
    view: ChainView, run_id: RunId, *, outcome_deadline_s: int, challenge_window_s: int
) -> int | None:
    """Return the chain time, in seconds, from which no current outcome of a run can be posted or
    challenged any more; None while a case is open; 0 for a run without batches.
    """
    run, ends = view.runs[run_id], [0]
    for batch in view.batches.values():
        if batch.run_id != run_id:
            continue
        if batch.records is None:
            # Its workers may appeal to judges of the network for the same time again.
            ends.append(batch.committed_at + outcome_deadline_s + challenge_window_s)
        else:
            ends.append(run.fraud_closes_at(batch.posted_at or 0, challenge_window_s))
    is_disputed = any(not c.closed and c.run_id == run_id for c in view.cases.values())
    return None if is_disputed else max(ends)


@dataclass(frozen=True, slots=True)
class Times:
    """Time windows on chain."""

    outcome_deadline_s: int
    """Seconds after a commitment by which outcomes are due."""
    appeal_s: int
    """Seconds after that deadline during which judges of the network can be called."""
    challenge_window_s: int
    """Seconds after outcomes during which they may be challenged."""
    court: CourtTerms
    """The court's terms."""

    @property
    def longest_s(self) -> int:
        """Seconds from a commitment until work is judged or void, whoever is silent."""
        return self.outcome_deadline_s + self.appeal_s + self.court.jury_time


async def read_times(chain: Chain) -> Times:
    """Return the time windows on chain."""
    return Times(
        outcome_deadline_s=await chain.ledger.outcome_deadline(),
        appeal_s=await chain.ledger.appeal_time(),
        challenge_window_s=await chain.ledger.challenge_window(),
        court=await chain.court.terms(),
    )


class ChainClock:
    """The minimum time of the next block: the latest block's time plus the time since it
    arrived."""

    def __init__(self, chain: Chain, clock: Callable[[], float] = uptime_s) -> None:
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
