"""Deployment of the contracts: parameters and their bounds, the resulting addresses, and the
transactions.

    deployment = await deploy_contracts(rpc_url, key, DeployParameters())

The devnet and `muster contracts deploy` use the same functions. Depends on `muster.chain`.
"""

from muster.deploy.parameters import (
    BOUNDS as BOUNDS,
    PROFILES as PROFILES,
    Bound as Bound,
    DeployParameters as DeployParameters,
    Profile as Profile,
)
from muster.deploy.plan import (
    DeployPlan as DeployPlan,
    DeployStage as DeployStage,
    deploy_contracts as deploy_contracts,
    send_plan as send_plan,
)
