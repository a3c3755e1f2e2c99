"""Deployment of the contracts: parameters and their bounds, addresses that follow from them, and
the transactions that make them so.

    deployment = await deploy_contracts(rpc_url, key, DeployParameters())

The devnet and `muster contracts deploy` go the same way. Rests on `muster.chain`.
"""

from muster.deploy.parameters import BOUNDS, PROFILES, Bound, DeployParameters, Profile
from muster.deploy.plan import DeployStage, Plan, deploy_contracts, send_plan

__all__ = [
    "BOUNDS",
    "PROFILES",
    "Bound",
    "DeployParameters",
    "DeployStage",
    "Plan",
    "Profile",
    "deploy_contracts",
    "send_plan",
]
