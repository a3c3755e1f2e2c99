"""Whether the chain lets a node work for a worker: asked before a model is loaded, and always."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.protocol.errors import ConfigError, MusterError
from muster.protocol.ids import Address, RunId

if TYPE_CHECKING:
    from muster.chain import ChainView


def require_good_standing(view: ChainView, run_id: RunId, worker: Address, node: Address) -> None:
    """Raise MusterError when the chain says that this node may not work in a run for a worker."""
    member = view.member(run_id, worker)
    if member is None:
        raise ConfigError(
            f"{worker} is no worker of run {run_id}",
            hint=f"join it first: muster stake --run {run_id} --keystore FILE --node FILE",
        )
    if member.status != "Active":
        raise MusterError(
            f"worker {worker} is {member.status.lower()} in run {run_id} and may not work",
            hint="muster worker status says why; muster worker rejoin ends jail and leaving",
        )
    if node == worker:
        raise ConfigError(
            f"{node} is the worker's own (cold) key, which must not sign submissions",
            hint="keep it off this machine; --keystore is the node's (node.json)",
        )
    if member.node != node:
        raise ConfigError(
            f"worker {worker} is served by node {member.node}, not {node}",
            hint="give the keystore of that node with --keystore",
        )
