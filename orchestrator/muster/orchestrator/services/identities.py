"""Who may do what, by verified signer: nodes of active workers, validators, the trainer."""

from __future__ import annotations

from muster.chain import WorkerView
from muster.orchestrator.services.projection import Projection
from muster.orchestrator.services.refusals import refuse
from muster.protocol.ids import Address

_HINTS = {
    "jailed": "wait for the jail time to end and restore the stake, then unjail",
    "banned": "a fraud verdict excluded this worker for good; see `muster audit`",
    "exiting": "this worker is leaving the network",
}


class Identities:
    """Roles as the chain grants them now."""

    def __init__(self, projection: Projection) -> None:
        self._projection = projection

    def active_worker(self, node: Address) -> WorkerView:
        """Return the worker a node serves; refuses unknown nodes and inactive workers."""
        worker = self._projection.view.worker_by_node.get(node)
        if worker is None:
            raise refuse(
                "worker_not_active",
                f"{node} is not the node of any registered worker",
                "stake and register first: muster stake",
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
        """Refuse anyone but validators and the trainer: workers must not see others' files."""
        run = self._projection.run
        if signer not in run.validators and signer != run.config.trainer:
            raise refuse("not_a_reader", "only validators and the trainer may fetch files")
