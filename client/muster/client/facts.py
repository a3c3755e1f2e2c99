"""What the chain view says about workers and policies, frozen for the checks."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from muster.chain import ChainView, Event
from muster.client.tickets import KnownPolicy, TicketTerms
from muster.protocol.eip712 import Domain
from muster.protocol.ids import Address, PolicyVersion, RunId

ACTIVE = "Active"
"""Status of a worker that may submit."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A worker as of the end of a block in which it changed."""

    block_number: int
    """That block."""
    worker_id: int
    """Its number in outcome records."""
    node: Address
    """Its node key."""
    status: str
    """Its status."""
    active_from: int
    """First block in which it counts as active."""

    def is_active(self, block_number: int) -> bool:
        """Return whether it may submit in a block, if nothing changed before."""
        return self.status == ACTIVE and self.active_from <= block_number


class HistoryView(ChainView):
    """A chain view that remembers how workers stood in earlier blocks.

    Validators judge by the block a batch was committed in, so that all of them answer alike
    whenever they ask: a ban that came since does not touch work that was committed before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._standings: dict[Address, list[Standing]] = {}

    def apply(self, event: Event) -> None:
        """Take in one event."""
        super().apply(event)
        account = self.workers.get(event.args.get("worker", ""))
        if event.contract == "WorkerRegistry" and account is not None:
            self._standings.setdefault(account.address, []).append(
                Standing(
                    event.block_number,
                    account.worker_id,
                    account.node,
                    account.status,
                    account.active_from,
                )
            )

    def rewind(self, block_number: int) -> None:
        """Forget everything after a block."""
        super().rewind(block_number)
        for standings in self._standings.values():
            while standings and standings[-1].block_number > block_number:
                standings.pop()

    def standing(self, worker: Address, *, before: int) -> Standing | None:
        """Return how a worker stood when block `before` began, or None when it was no worker."""
        standings = self._standings.get(worker, [])
        known = bisect_left(standings, before, key=lambda standing: standing.block_number)
        return standings[known - 1] if known else None


def ticket_terms(
    view: ChainView,
    run_id: RunId,
    domain: Domain,
    version: PolicyVersion,
    holder: tuple[Address, int],
) -> TicketTerms:
    """Return what a ticket for this policy version must be; `holder` is the worker that holds it
    and the first block in which it is active.
    """
    run = view.runs[run_id]
    checkpoint = run.checkpoints.get(version)
    policies = {}
    if checkpoint is not None:
        policies[version] = KnownPolicy(
            root=checkpoint.manifest_root,
            beacon=checkpoint.beacon,
            block_number=checkpoint.block_number,
        )
    return TicketTerms(
        domain=domain,
        orchestrator=run.config.orchestrator,
        run_id=run_id,
        worker=holder[0],
        active_from=holder[1],
        policies=policies,
    )
