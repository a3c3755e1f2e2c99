"""Whether a node may work for its worker in a run, and whether it is needed where it may not."""

import logging

from muster.chain import ChainView
from muster.client.worker.journal import SubmissionJournal
from muster.protocol.errors import ConfigError, MusterError
from muster.protocol.ids import Address, RunId

logger = logging.getLogger(__name__)


def require_good_standing(view: ChainView, run_id: RunId, worker: Address, node: Address) -> None:
    """Raise MusterError when this node may not work for the worker in the run, by the chain."""
    member = view.member(run_id, worker)
    if member is None:
        raise ConfigError(
            f"{worker} is not a worker of run {run_id}",
            hint=f"check --worker and --run, or join the run: muster stake --run {run_id} "
            "--keystore FILE --node FILE",
        )
    if member.status != "Active":
        raise MusterError(
            f"worker {worker} is {member.status.lower()} in run {run_id} and may not work",
            hint="muster worker status says why; muster worker rejoin ends jail and leaving",
        )
    if node == worker:
        raise ConfigError(
            f"{node} is the worker's own (cold) key, which must not sign submissions",
            hint="keep the cold key off this machine and give the node's keystore "
            "(node.json) with --keystore",
        )
    if member.node != node:
        raise ConfigError(
            f"worker {worker} is served by node {member.node}, not {node}",
            hint="give the keystore of that node with --keystore",
        )


def require_needed(
    journal: SubmissionJournal, view: ChainView, run_id: RunId, worker: Address, node: Address
) -> None:
    """Raise MusterError when this node may not work for the worker in the run. One whose worker is
    inactive may run as long as work of it waits for an outcome or is called fraud, to defend it.
    """
    try:
        require_good_standing(view, run_id, worker, node)
    except ConfigError:
        raise
    except MusterError as error:
        if not journal.open_versions(run_id):
            raise
        said = "no more work, starting for work that is not judged yet or is called fraud"
        logger.warning(said, extra={"error": str(error)})
