"""The flags that the commands of the audit share: where a history is read, how it is printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from muster.client.options import FILE, FOLDER, chain_options, endpoint
from muster.protocol.errors import ConfigError
from muster.settings import urls_of
from muster.settings.options import RELAY_HELP

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
        chain_options,
    ):
        command = option(command)
    return command


def wanted_of(options: Mapping[str, Any]) -> Wanted:
    """Return where the history is read."""
    from muster.client.audit.history import Wanted
    from muster.client.audit.sources import Proof

    if options["dump"] is not None and (options["rpc"] or options["since"]):
        raise ConfigError(
            "--dump is read instead of a chain", hint="leave out --rpc and --since, or --dump"
        )
    rpc, deployments = endpoint(options)
    return Wanted(
        rpcs=tuple(urls_of(rpc)),
        deployments=deployments,
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
        click.option("--relay", multiple=True, metavar="URL", help=RELAY_HELP),
        click.option(
            "--evidence", type=FOLDER, multiple=True, help="Copy of the evidence; repeatable."
        ),
    ):
        command = option(command)
    return command
