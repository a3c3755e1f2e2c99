"""Chooses a command's network: the addresses of its chain, its contracts and its services.

This module decides for every command. The first of these that has a value counts: a flag
(`--network NAME` is one), the process's own variable, MUSTER_RPC and MUSTER_DEPLOYMENTS, the file
of --config, the network profile, a chain on this machine. The profile is that of MUSTER_NETWORK,
else the current one, else the devnet that runs on this machine.

Profiles are in `~/.config/muster/config.toml`. The devnet describes itself in a file beside it, and
locks that file while it runs, so that a killed devnet does not seem to be running.
"""

import fcntl
import json
import os
import re
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from muster.protocol.documents import first_fault
from muster.protocol.errors import ConfigError

_IS_CHECKOUT = (Path(__file__).parents[3] / "contracts").is_dir()
DEPLOYMENTS = Path("contracts/deployments" if _IS_CHECKOUT else "~/.muster/deployments")
"""Default folder of the contracts' addresses."""
DEFAULT_RPC = "http://127.0.0.1:8545"
"""The endpoint of a chain on this machine."""
SHARED = {"rpc": "MUSTER_RPC", "deployments": "MUSTER_DEPLOYMENTS"}
"""Environment variables with the chain's endpoint and addresses, for every command."""
NETWORK_VARIABLE = "MUSTER_NETWORK"
"""Environment variable with the network profile, for every command."""
CONFIG_FILE, DEVNET_FILE = "config.toml", "devnet.json"
DEVNET = "devnet"
"""The name of the network that runs on this machine: no profile may have it."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_CHOSEN = "muster.network"
_LOCK_TRIES, _LOCK_PAUSE_S = 50, 0.01
"""Tries to lock the file: a reader locks it for a moment to see whether it is locked."""


class Served(BaseModel):
    """The services of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    orchestrator: str | None = None
    """URL of its orchestrator."""
    relays: tuple[str, ...] = ()
    """URLs of the user's own relays; when empty, the orchestrator names them."""


class NetworkProfile(BaseModel):
    """A network with a name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chain_id: Annotated[int, Field(ge=1)]
    """EIP-155 chain id."""
    rpc: Annotated[tuple[str, ...], Field(min_length=1)]
    """RPC endpoints; several are compared."""
    deployments: Path
    """Folder with the contracts' addresses, one file per chain id."""
    runs: dict[str, Served] = {}
    """The services of each run, by its number."""

    @field_validator("runs")
    @classmethod
    def _are_numbers(cls, value: dict[str, Served]) -> dict[str, Served]:
        for run in value:
            if not (run.isascii() and run.isdigit() and int(run) > 0):
                raise ValueError(f"a run is a number, got {run[:20]!r}")
        return value

    def served(self, run: int | None) -> Served:
        """Return the services of a run; without a number, those of the only known run."""
        if run is None and len(self.runs) == 1:
            return next(iter(self.runs.values()))
        return self.runs.get(str(run), Served())


class Profiles(BaseModel):
    """The content of config.toml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    current: str | None = None
    """The default profile of commands."""
    networks: dict[str, NetworkProfile] = {}
    """Profiles by name."""

    @field_validator("networks")
    @classmethod
    def _have_names(cls, value: dict[str, NetworkProfile]) -> dict[str, NetworkProfile]:
        for name in value:
            require_name(name)
        return value


@dataclass(frozen=True, slots=True)
class ChosenNetwork:
    """The network of a command."""

    rpc: str | None
    """RPC endpoints, separated by commas; None if nothing sets them."""
    deployments: Path | None
    """Folder with the contracts' addresses; None if nothing sets it."""
    name: str | None = None
    """The network's name, if one of its endpoints or its contracts are used."""
    profile: NetworkProfile | None = None
    """The profile of that name."""

    def served(self, run: object) -> Served:
        """Return the services of a run, as far as the network's profile has them."""
        number = int(run) if isinstance(run, int) or str(run).isdecimal() else None  # type: ignore[call-overload]  # text of the environment
        return self.profile.served(number) if self.profile else Served()


# ------------------------------------------------------------------ the decision


def chosen_network(
    rpc: str | None,
    deployments: Path | str | None,
    environ: Mapping[str, str] = os.environ,
) -> ChosenNetwork:
    """Return the network, given the values from flags, variables and file.

    Raises ConfigError for an unknown network, and for a wrong file of profiles.
    """
    folder = Path(deployments) if deployments else None
    if rpc and folder and typed_network() is None:
        return ChosenNetwork(rpc, folder)
    name, profile = _network(environ)
    if profile is None or (rpc and folder):
        return ChosenNetwork(rpc or None, folder)
    return ChosenNetwork(rpc or ",".join(profile.rpc), folder or profile.deployments, name, profile)


def resolve(
    rpc: str | None, deployments: Path | None, environ: Mapping[str, str] = os.environ
) -> tuple[ChosenNetwork, str, Path]:
    """Return the network from flags, or else variables, profile, devnet or defaults, with its
    endpoints and its folder of addresses.
    """
    if typed_network() is None:
        rpc = rpc or environ.get(SHARED["rpc"])
        deployments = deployments or _path(environ.get(SHARED["deployments"]))
    chosen = chosen_network(rpc, deployments, environ)
    return chosen, chosen.rpc or DEFAULT_RPC, chosen.deployments or DEPLOYMENTS


def typed_network() -> str | None:
    """Return the value of --network of the running command; None without it."""
    import click

    context = click.get_current_context(silent=True)
    return context.meta.get(_CHOSEN) if context else None


def choose(_context: Any, _option: object, name: str | None) -> None:
    """Store the value of --network: the callback of the option."""
    if name is not None:
        _context.meta[_CHOSEN] = name


def _network(environ: Mapping[str, str]) -> tuple[str | None, NetworkProfile | None]:
    asked = typed_network() or environ.get(NETWORK_VARIABLE)
    known = read_profiles(environ)
    name = asked or known.current
    if name == DEVNET or name is None:
        devnet = running_devnet(environ)
        if devnet is None and name is not None:
            raise ConfigError(
                "no devnet runs on this machine",
                hint="`muster devnet` starts one; `muster network list` shows what else there is",
            )
        return (DEVNET, devnet) if devnet else (None, None)
    return name, known_profile(known, name)


def known_profile(known: Profiles, name: str) -> NetworkProfile:
    """Return the profile of a name; raises ConfigError when there is none."""
    if name not in known.networks:
        names = ", ".join(known.networks) or "none"
        raise ConfigError(
            f"no network is called {name!r}; known are: {names}",
            hint="`muster network add` or `muster join` adds one",
        )
    return known.networks[name]


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


# ---------------------------------------------------------------------- profiles


def require_name(name: str) -> None:
    """Raise ConfigError when a profile cannot have this name."""
    if not _NAME.fullmatch(name) or name == DEVNET:
        raise ConfigError(
            f"{name[:80]!r} cannot be a network's name",
            hint=f"letters, digits, dots and dashes, at most 63; {DEVNET!r} is this machine's",
        )


def config_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of profiles; None for a user without a home."""
    if base := environ.get("XDG_CONFIG_HOME"):
        return Path(base, "muster")
    home = environ.get("HOME")
    return Path(home, ".config", "muster") if home else None


def read_profiles(environ: Mapping[str, str] = os.environ) -> Profiles:
    """Return the profiles; raises ConfigError for a file that is wrong."""
    folder = config_folder(environ)
    file = folder / CONFIG_FILE if folder else None
    hint = "correct the file, or remove it and add the networks again"
    if file is None:
        return Profiles()
    try:
        return Profiles.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Profiles()
    except ValidationError as error:
        raise ConfigError(f"{file}: {first_fault(error)}", hint=hint) from error
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", hint=hint) from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}", hint=error.hint) from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}", hint=hint) from error


def write_profiles(profiles: Profiles, environ: Mapping[str, str] = os.environ) -> Path:
    """Write the profiles atomically, and return the file: only its owner may read it, because URLs
    of endpoints may contain keys.
    """
    folder = config_folder(environ)
    if folder is None:
        raise ConfigError("neither HOME nor XDG_CONFIG_HOME is set", hint="set one of them")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / CONFIG_FILE
    fresh = file.with_name(f"{CONFIG_FILE}.{os.getpid()}.tmp")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(_toml(profiles).encode())
    fresh.replace(file)
    return file


def _toml(profiles: Profiles) -> str:
    lines = ["# Networks that `muster` knows: muster network --help"]
    if profiles.current:
        lines.append(f"current = {_quoted(profiles.current)}")
    for name, profile in profiles.networks.items():
        table = f"networks.{_quoted(name)}"
        lines += ["", f"[{table}]", f"chain_id = {profile.chain_id}", f"rpc = {_list(profile.rpc)}"]
        lines.append(f"deployments = {_quoted(str(profile.deployments))}")
        for run, served in profile.runs.items():
            lines += ["", f"[{table}.runs.{run}]"]
            if served.orchestrator:
                lines.append(f"orchestrator = {_quoted(served.orchestrator)}")
            lines.append(f"relays = {_list(served.relays)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # JSON strings are valid TOML strings, except for one character that JSON does not escape.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _list(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


# ------------------------------------------------------------------------ devnet


class Devnet:
    """Announces this process's devnet to other commands on this machine."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def tell(self, profile: NetworkProfile) -> None:
        """Announce the devnet's addresses and runs, unless another devnet is announced."""
        if self._descriptor is None:
            return
        # One line: a concurrent reader may see the rest of the older line after its end.
        line = profile.model_dump_json().encode() + b"\n"
        os.pwrite(self._descriptor, line, 0)
        os.ftruncate(self._descriptor, len(line))


@contextmanager
def announced(environ: Mapping[str, str] = os.environ) -> Iterator[Devnet]:
    """Hold the lock of the devnet that commands on this machine find by themselves.

    If another devnet holds it already, this one can be reached only by flags.
    """
    descriptor = _open_devnet(environ)
    try:
        yield Devnet(descriptor)
    finally:
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            os.close(descriptor)


def _open_devnet(environ: Mapping[str, str]) -> int | None:
    folder = config_folder(environ)
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / DEVNET_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None  # the home is not writable: the devnet is reached by flags
    for _ in range(_LOCK_TRIES):
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            return descriptor
        time.sleep(_LOCK_PAUSE_S)
    os.close(descriptor)
    return None


def running_devnet(environ: Mapping[str, str] = os.environ) -> NetworkProfile | None:
    """Return the devnet that runs on this machine; None when there is none, or it has announced
    nothing yet. Raises ConfigError when its file is damaged.
    """
    folder = config_folder(environ)
    if folder is None:
        return None
    path = folder / DEVNET_FILE
    try:
        file = path.open("rb")
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            line = file.readline()
            try:
                return NetworkProfile.model_validate_json(line) if line else None
            except ValidationError as error:
                raise ConfigError(
                    f"{path} is damaged: {first_fault(error)}",
                    hint="stop `muster devnet` and start it again: it writes the file anew",
                ) from error
    return None
