"""What every server of chunks has: a token, limits for each address, and its announcement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from muster.protocol.errors import ConfigError

if TYPE_CHECKING:
    from muster.shardcast import ServerLimits, ShardServer


def limits_of(connections_per_address: int, requests_per_s: float) -> ServerLimits:
    """Return what one network address may take of a server; bursts may be twice the rate."""
    from muster.shardcast import ServerLimits

    burst = int(2 * requests_per_s) + 1
    return ServerLimits(
        connections_per_address=connections_per_address, requests_per_s=requests_per_s, burst=burst
    )


def read_token(file: Path | None) -> str | None:
    """Return the bearer token in a file, None without a file; raises ConfigError."""
    if file is None:
        return None
    try:
        token = file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token in {file}: {error.strerror}") from error
    if not token:
        raise ConfigError(f"the token file {file} is empty")
    return token


def announce(server: ShardServer, name: str, ready_file: Path | None) -> None:
    """Tell the operator, and whoever waits for the ready file, where a server listens.

    `name` says what it is: "relay" or "origin".
    """
    click.echo(f"{name} listens at {server.url}", err=True)
    if ready_file is not None:
        fresh = ready_file.with_name(f"{ready_file.name}.tmp")
        fresh.write_text(server.url)
        fresh.rename(ready_file)
