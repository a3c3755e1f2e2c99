"""Flags that commands of several packages have, each worded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from muster.settings import joined
from muster.settings.network import choose, resolve

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
ORCHESTRATOR_HELP = "The run's orchestrator."
PASSWORD_HELP = "Password; else MUSTER_PASSWORD, else ask."
CONFIRMATIONS_HELP = "Blocks on top of an event before it is acted on. [default: 0]"
RELAY_HELP = "Relay to use; repeatable."


def chain_options(command: F) -> F:
    """Add --network, --deployments and --rpc."""
    for option in (
        click.option(
            "--network",
            "network_name",
            metavar="NAME",
            expose_value=False,
            is_eager=True,
            callback=choose,
            help="Network profile; else MUSTER_NETWORK.",
        ),
        click.option(
            "--deployments", type=FOLDER, help="Contracts' folder; else MUSTER_DEPLOYMENTS."
        ),
        click.option(
            "--rpc",
            metavar="URL",
            multiple=True,
            callback=joined,
            help="RPC endpoint, repeatable; else MUSTER_RPC.",
        ),
    ):
        command = option(command)
    return command


def endpoint(options: Mapping[str, Any]) -> tuple[str, Path]:
    """Return the RPC endpoint and the folder of addresses that a command means."""
    _, rpc, deployments = resolve(options["rpc"], options["deployments"])
    return rpc, deployments


def orchestrator_option(command: F) -> F:
    """Add --orchestrator, which else is the one that the network's profile has for the run."""
    return click.option("--orchestrator", metavar="URL", help=ORCHESTRATOR_HELP)(
        _served(command, "orchestrator")
    )


def relay_option(command: F) -> F:
    """Add --relay, which else are those that the network's profile has for the run."""
    return click.option("--relay", multiple=True, metavar="URL", help=RELAY_HELP)(
        _served(command, "relay")
    )


def _served(command: F, name: str) -> F:
    """Return the command with who serves its run filled in where no flag says it."""

    @wraps(command)
    def filled(*args: Any, **options: Any) -> Any:
        if not options[name] and (options.get("run") or options.get("run_id")):
            run = options.get("run") or options.get("run_id")
            place, *_ = resolve(options["rpc"], options["deployments"])
            served = place.served(run)
            options[name] = served.orchestrator if name == "orchestrator" else served.relays
        return command(*args, **options)

    return filled  # type: ignore[return-value]  # of the same form
