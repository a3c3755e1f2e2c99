"""`muster relay run`: mirror a run's policy weights for others, and show what judges need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from muster.client.relay.mirroring import RelaySettings, serve_relay
from muster.lifecycle import run_until_stopped
from muster.settings import load_settings
from muster.settings.options import FILE, FOLDER, chain_options
from muster.telemetry import setup_logging

if TYPE_CHECKING:
    pass


@click.group()
def relay() -> None:
    """Mirror policy weights for others."""


@relay.command()
@click.option("--config", type=FILE, help="TOML file with any of these settings.")
@click.option("--run", type=int, help="Run to mirror.")
@click.option("--upstream", multiple=True, help="URL of origin or relay; repeatable.")
@chain_options
@click.option("--store", type=FOLDER, help="Folder for chunks and manifests.")
@click.option("--keep", type=int, help="Newest versions that stay.")
@click.option("--max-bytes", type=int, help="Most bytes of chunks.")
@click.option("--room-bytes", type=int, help="Most bytes of files for judges; 0 for none. [1 GiB]")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; 0 for any free one.")
@click.option("--ready-file", type=FILE, help="Receives the URL once it listens.")
@click.option("--poll-s", type=float, help="Seconds between looks at the chain.")
@click.option("--linger-s", type=float, help="Once closed, serve until idle so long. [1 day]")
@click.option("--keep-going", is_flag=True, default=None, help="Serve a closed run until stopped.")
@click.option("--token-file", type=FILE, help="Bearer token that clients must show.")
@click.option("--upstream-token-file", type=FILE, help="Bearer token that upstreams demand.")
@click.option("--connections-per-address", type=int, help="Most open connections per address.")
@click.option("--requests-per-s", type=float, help="Most requests per second and address.")
def run(config: Path | None, **flags: object) -> None:
    """Mirror a run until stopped, or until it is closed and nobody fetches any more.

    Without --upstream it serves what the store holds, such as the one that `run create` wrote.

    \b
    Example:
      muster relay run --run 1 --upstream http://origin:8800 --store ./relay --port 8700
    """
    settings = load_settings(RelaySettings, file=config, flags=flags, env_prefix="MUSTER_RELAY_")
    setup_logging("relay")
    run_until_stopped(lambda: serve_relay(settings))
