"""Whether the chain lets a node work for a worker: asked before a model is loaded, and always."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.protocol.errors import ConfigError, MusterError
from muster.protocol.ids import Address

if TYPE_CHECKING:
    from muster.chain import ChainView


def require_good_standing(view: ChainView, worker: Address, node: Address) -> None:
    """Raise MusterError when the chain says that this node may not work for this worker."""
    account = view.workers.get(worker)
    if account is None:
        raise ConfigError(
            f"{worker} is not registered as a worker",
            hint="stake first: muster stake --keystore FILE --node FILE",
        )
    if account.status.lower() != "active":
        raise MusterError(
            f"worker {worker} is {account.status.lower()} and may not work",
            hint="muster worker status says why; muster worker rejoin ends jail and leaving",
        )
    if node == worker:
        raise ConfigError(
            f"{node} is the worker's own (cold) key, which must not sign submissions",
            hint="keep it off this machine; --keystore is the node's (node.json)",
        )
    if account.node != node:
        raise ConfigError(
            f"worker {worker} is served by node {account.node}, not {node}",
            hint="give the keystore of that node with --keystore",
        )
