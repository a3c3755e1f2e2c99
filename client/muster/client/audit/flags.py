"""The flags that the commands of the audit share: where a history is read, how it is printed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.client.options import (
    DEPLOYMENTS_VARIABLE,
    FILE,
    FOLDER,
    RPC_VARIABLE,
)
from muster.protocol.errors import ConfigError
from muster.settings import DEFAULT_RPC, DEPLOYMENTS, urls_of

if TYPE_CHECKING:
    from muster.client.audit.history import History, Wanted

F = TypeVar("F", bound=Callable[..., Any])

PROOFS = ("none", "blocks", "chain")
"""How much of a source must be proven: `muster.client.audit.sources.Proof`."""


def source_options(command: F) -> F:
    """Add where the history comes from."""
    for option in (
        click.option("--since", type=FILE, help="An earlier dump that must still hold."),
        click.option(
            "--prove",
            type=click.Choice(PROOFS),
            default="blocks",
            show_default=True,
            help="What the endpoint must prove by block hashes.",
        ),
        click.option("--dump", type=FILE, help="Read this dump instead of a chain."),
        click.option(
            "--deployments", type=FOLDER, help="Contracts' addresses; else MUSTER_DEPLOYMENTS."
        ),
        click.option(
            "--rpc",
            multiple=True,
            metavar="URL",
            help="RPC endpoint; else MUSTER_RPC, else local. Given again: compared.",
        ),
    ):
        command = option(command)
    return command


def wanted_of(options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Wanted:
    """Return where the history is read: from flags, environment or defaults."""
    from muster.client.audit.history import Wanted
    from muster.client.audit.sources import Proof

    if options["dump"] is not None and (options["rpc"] or options["since"]):
        raise ConfigError(
            "--dump is read instead of a chain", hint="leave out --rpc and --since, or --dump"
        )
    deployments = options["deployments"] or environ.get(DEPLOYMENTS_VARIABLE)
    return Wanted(
        rpcs=tuple(options["rpc"] or urls_of(environ.get(RPC_VARIABLE) or DEFAULT_RPC)),
        deployments=Path(deployments or DEPLOYMENTS),
        dump=options["dump"],
        proof=Proof(options["prove"]),
        since=options["since"],
    )


def read_history(options: Mapping[str, Any], *, keeps_blocks: bool = False) -> History:
    """Return the history that the flags name."""
    import asyncio

    from muster.client.audit.history import read

    return asyncio.run(read(wanted_of(options), keeps_blocks=keeps_blocks))


def copy_options(command: F) -> F:
    """Add where copies of the evidence are."""
    for option in (
        click.option(
            "--relay", multiple=True, metavar="URL", help="Where policies are; repeatable."
        ),
        click.option(
            "--evidence", type=FOLDER, multiple=True, help="Copy of the evidence; repeatable."
        ),
    ):
        command = option(command)
    return command
