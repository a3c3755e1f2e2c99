"""Addresses of a deployment's contracts: one JSON file per chain id, written by the deployer.

The files of known networks come with the software, in `networks` beside this file.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from muster.chain.abi import CONTRACTS
from muster.protocol.documents import first_fault
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, to_address
from muster.settings import DEPLOYMENTS, permission_hint

_KNOWN = Path(__file__).with_name("networks")
_HINT = "deploy the contracts, or pass the right folder with --deployments"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A set of contracts that refer to one another."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    chain_id: Annotated[int, Field(ge=1, strict=True)]
    """EIP-155 chain id."""
    deploy_block: Annotated[int, Field(ge=0, strict=True)]
    """Block of the first deployment; no event is older."""
    contracts: Mapping[str, Annotated[Address, BeforeValidator(to_address)]]
    """Address by contract name."""
    parameters: Mapping[str, StrictInt | StrictStr] = field(default_factory=dict)
    """Parameters of the deployment, for people; programs read them from the contracts."""


_DEPLOYMENT = TypeAdapter(Deployment)


def deployment_path(directory: Path, chain_id: int) -> Path:
    """Return the file of a chain's deployment."""
    # Path.expanduser would raise for an account without a home.
    return Path(os.path.expanduser(directory), f"{chain_id}.json")


def load_deployment(directory: Path, chain_id: int) -> Deployment:
    """Return the deployment on a chain; raises ConfigError when it is missing or malformed.

    Files of known networks need not be in the default folder.
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
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint=permission_hint(error) or _HINT
        ) from error
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
        f"{directory} has chain {', '.join(map(str, chains))}: give an endpoint of that "
        "chain with --rpc, or another folder with --deployments"
    )


def parse_deployment(text: str) -> Deployment:
    """Return the deployment that a JSON document describes; raises ConfigError."""
    try:
        deployment = _DEPLOYMENT.validate_python(json.loads(text))
    except ValidationError as error:
        raise ConfigError(first_fault(error)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from error
    if missing := [name for name in CONTRACTS if name not in deployment.contracts]:
        raise ConfigError(f"it lacks {', '.join(missing)}")
    if unknown := [name for name in deployment.contracts if name not in CONTRACTS]:
        raise ConfigError(f"it names unknown contracts: {', '.join(unknown)}")
    return deployment


def save_deployment(directory: Path, deployment: Deployment) -> Path:
    """Write a deployment to its file atomically, and return the path."""
    path = deployment_path(directory, deployment.chain_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several processes of a machine may save the same deployment at the same time.
    fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fresh.write_text(json.dumps(asdict(deployment), indent=2) + "\n")
    fresh.replace(path)
    return path
