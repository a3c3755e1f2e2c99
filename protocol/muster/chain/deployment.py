"""Where a deployment's contracts are: one JSON file per chain id, written by the deployer.

Those of known networks come with the software, in `networks` beside this file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from muster.chain.abi import CONTRACTS
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, to_address
from muster.settings import DEPLOYMENTS

_KNOWN = Path(__file__).with_name("networks")
_HINT = "deploy the contracts, or pass the right folder with --deployments"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A set of contracts that refer to one another."""

    chain_id: int
    """EIP-155 chain id."""
    deploy_block: int
    """Block of the first deployment; no event is older."""
    contracts: Mapping[str, Address]
    """Address by contract name."""
    parameters: Mapping[str, int | str] = field(default_factory=dict)
    """What it was deployed with, for people; programs ask the contracts."""


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    chain_id: Annotated[int, Field(ge=1)]
    deploy_block: Annotated[int, Field(ge=0)]
    contracts: dict[str, Annotated[str, BeforeValidator(to_address)]]
    parameters: dict[str, int | str] = {}


def deployment_path(directory: Path, chain_id: int) -> Path:
    """Return the file of a chain's deployment."""
    # As it is where nobody has a home: Path.expanduser would raise.
    return Path(os.path.expanduser(directory), f"{chain_id}.json")


def load_deployment(directory: Path, chain_id: int) -> Deployment:
    """Return the deployment on a chain; raises ConfigError when it is missing or malformed.

    The default folder need not hold those of known networks.
    """
    path = deployment_path(directory, chain_id)
    known = deployment_path(_KNOWN, chain_id)
    if directory == DEPLOYMENTS and not path.exists() and known.exists():
        path = known
    try:
        deployment = parse_deployment(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"no contracts are recorded for chain {chain_id}: {path} does not exist",
            hint=_other_chains(path.parent) or _HINT,
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint=_HINT) from error
    except ValueError as error:
        raise ConfigError(f"{path} is malformed: {error}", hint=_HINT) from error
    if deployment.chain_id != chain_id:
        raise ConfigError(f"{path} is for chain {deployment.chain_id}", hint=_HINT)
    return deployment


def _other_chains(directory: Path) -> str | None:
    chains = sorted(int(path.stem) for path in directory.glob("*.json") if path.stem.isdecimal())
    if not chains:
        return None
    return (
        f"{directory} has chain {', '.join(map(str, chains))}: name an endpoint of that with --rpc,"
        " or another folder with --deployments"
    )


def parse_deployment(text: str) -> Deployment:
    """Return the deployment that a JSON document describes; raises ConfigError."""
    try:
        document = _Document.model_validate(json.loads(text))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"{where or 'document'}: {problem['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error
    if missing := [name for name in CONTRACTS if name not in document.contracts]:
        raise ConfigError(f"it lacks {', '.join(missing)}")
    if unknown := [name for name in document.contracts if name not in CONTRACTS]:
        raise ConfigError(f"it names unknown contracts: {', '.join(unknown)}")
    return Deployment(
        chain_id=document.chain_id,
        deploy_block=document.deploy_block,
        contracts={name: Address(address) for name, address in document.contracts.items()},
        parameters=document.parameters,
    )


def save_deployment(directory: Path, deployment: Deployment) -> Path:
    """Write a deployment to its file, whole or not at all, and return the path."""
    path = deployment_path(directory, deployment.chain_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "chain_id": deployment.chain_id,
        "deploy_block": deployment.deploy_block,
        "contracts": dict(deployment.contracts),
        "parameters": dict(deployment.parameters),
    }
    fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fresh.write_text(json.dumps(document, indent=2) + "\n")
    fresh.replace(path)
    return path
