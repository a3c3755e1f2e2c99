"""What the chain view says about workers and policies, frozen for the checks. Pure."""

from __future__ import annotations

from muster.chain import ChainView
from muster.client.tickets import KnownPolicy, TicketTerms
from muster.protocol.eip712 import Domain
from muster.protocol.ids import Address, PolicyVersion, RunId


def ticket_terms(
    view: ChainView,
    run_id: RunId,
    domain: Domain,
    worker: Address,
    version: PolicyVersion,
) -> TicketTerms:
    """Return what a ticket of this worker for this policy version must be."""
    run = view.runs[run_id]
    checkpoint = run.checkpoints.get(version)
    policies = {}
    if checkpoint is not None:
        policies[version] = KnownPolicy(
            root=checkpoint.manifest_root,
            beacon=checkpoint.beacon,
            block_number=checkpoint.block_number,
        )
    account = view.workers.get(worker)
    return TicketTerms(
        domain=domain,
        orchestrator=run.config.orchestrator,
        run_id=run_id,
        worker=worker,
        active_from=account.active_from if account else 0,
        policies=policies,
    )
