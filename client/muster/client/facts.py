"""What the chain view says about workers and policies, frozen for the checks."""

from __future__ import annotations

from dataclasses import dataclass

from muster.api import BatchEntry
from muster.chain import ChainView, Event, LeasedWork, WorkerStatus
from muster.client.tickets import KnownPolicy, TicketTerms
from muster.protocol.eip712 import Domain
from muster.protocol.ids import Address, PolicyVersion, RunId


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker as it stood in a run when a block began."""

    worker_id: int
    """Its number in outcome records."""
    node: Address
    """Its node key."""
    status: WorkerStatus
    """Its status."""
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

    def _reset(self) -> None:
        super()._reset()
        self._activations: dict[tuple[RunId, Address], list[tuple[int, int]]] = {}

    def _take_in(self, event: Event) -> None:
        super()._take_in(event)
        if event.name in ("WorkerJoined", "WorkerReturned"):
            change = (event.block_number, event.args["active_from"])
            holder = (event.args["run_id"], event.args["worker"])
            self._activations.setdefault(holder, []).append(change)

    def standing(self, run_id: RunId, worker: Address, *, before: int) -> Standing | None:
        """Return how a worker stood in a run when block `before` began; None before it joined."""
        member = self.member(run_id, worker)
        node = member.node_at(before - 1) if member else None
        changes = self._activations.get((run_id, worker), [])
        activations = [active for block, active in changes if block < before]
        if member is None or node is None or not activations:
            return None
        return Standing(member.worker_id, node, member.status_at(before - 1), activations[-1])


def entry_of(work: LeasedWork, committed_at: int) -> BatchEntry:
    """Return work that is on chain with its proofs as orchestrators show what they committed."""
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
