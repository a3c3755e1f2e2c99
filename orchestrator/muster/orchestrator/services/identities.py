"""Who may do what, by verified signer: nodes of active workers, validators, the trainer."""

from __future__ import annotations

from muster.chain import MemberView
from muster.orchestrator.services.projection import Projection
from muster.orchestrator.services.refusals import refuse
from muster.protocol.ids import Address

_HINTS = {
    "jailed": "wait for the jail time to end and restore the stake, then muster worker rejoin",
    "banned": "a fraud verdict excluded this worker from this run for good; see `muster audit`",
    "exiting": "this worker is leaving the run",
}


class Identities:
    """Roles as the chain grants them now."""

    def __init__(self, projection: Projection) -> None:
        self._projection = projection

    def active_worker(self, node: Address) -> MemberView:
        """Return the worker a node serves; refuses unknown nodes and inactive workers."""
        run = self._projection.run
        named = self._projection.view.worker_by_node.get(node)
        worker = None if named is None else run.members.get(named.address)
        if worker is None:
            raise refuse(
                "worker_not_active",
                f"{node} is not the node of a worker of run {run.run_id}",
                f"join it first: muster stake --run {run.run_id}",
            )
        status = worker.status.lower()
        if status != "active":
            raise refuse(
                "worker_not_active", f"worker {worker.address} is {status}", _HINTS.get(status)
            )
        return worker

    def require_validator(self, signer: Address) -> None:
        """Refuse anyone but the run's current validators."""
        if signer not in self._projection.run.validators:
            raise refuse("not_a_validator", f"{signer} does not validate for this run")

    def require_trainer(self, signer: Address) -> None:
        """Refuse anyone but the run's trainer."""
        if signer != self._projection.run.config.trainer:
            raise refuse("not_the_trainer", f"{signer} is not the trainer of this run")

    def require_reader(self, signer: Address) -> None:
        """Refuse anyone but validators, the trainer and jurors of the run's open cases: workers
        must not see others' files.
        """
        run = self._projection.run
        if signer not in run.validators and signer != run.config.trainer and not self._sits(signer):
            raise refuse(
                "not_a_reader", "only validators, the trainer and drawn jurors may fetch files"
            )

    def _sits(self, signer: Address) -> bool:
        cases = self._projection.view.cases.values()
        of_run = (c for c in cases if c.run_id == self._projection.run_id and not c.closed)
        return any(signer in case.jurors for case in of_run)
