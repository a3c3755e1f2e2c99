"""`muster orchestrator`: the command line of the orchestrator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from muster.orchestrator.admin_cli import admin
from muster.settings.options import CONFIRMATIONS_HELP, FILE, PASSWORD_HELP, chain_options


@click.group()
def orchestrator() -> None:
    """Lease work and record outcomes."""


orchestrator.add_command(admin)


@orchestrator.command()
@click.option("--config", type=FILE, help="TOML file with any of these settings.")
@click.option("--run", type=int, help="Run to serve.")
@chain_options
@click.option("--keystore", metavar="FILE", help="Keystore of the run's orchestrator account.")
@click.option("--password-file", metavar="FILE", help=PASSWORD_HELP)
@click.option("--documents", metavar="DIR", help="Recipe, calibration and task set, by hash.")
@click.option("--files", metavar="DIR", help="Where submission files are kept.")
@click.option("--retention-s", type=int, help="Drop files so long after they are final.")
@click.option("--bucket", metavar="URL", help="S3 storage for them instead: s3://bucket/prefix.")
@click.option("--database", metavar="FILE|URL", help="SQLite file or PostgreSQL; can be rebuilt.")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; 0 for any free one.")
@click.option("--admin-socket", metavar="FILE", help="Unix socket for the owner's commands.")
@click.option("--ready-file", metavar="FILE", help="Receives the URL once it listens.")
@click.option("--origin", metavar="URL", help="Where the trainer serves policy weights.")
@click.option("--relay", "relays", metavar="URL", multiple=True, help="A mirror of them.")
@click.option("--public-rpc", metavar="URL", multiple=True, help="Told to newcomers; repeatable.")
@click.option("--public-url", metavar="URL", help="This orchestrator's, told to newcomers.")
@click.option("--tokenizer", metavar="FILE", help="For samples as text. [default: the relays']")
@click.option("--lease-s", type=int, help="Seconds from lease to deadline.")
@click.option("--call-timeout-s", type=int, help="When a silent validator is replaced.")
@click.option("--commit-interval-s", type=float, help="Least time between two batches.")
@click.option("--poll-s", type=float, help="Seconds between looks at the chain.")
@click.option("--confirmations", metavar="N|safe|finalized", help=CONFIRMATIONS_HELP)
@click.option("--retry-after-s", type=float, help="What nodes wait when there is no work.")
def run(config: Path | None, **flags: Any) -> None:
    """Serve one run until SIGTERM or SIGINT."""
    import uvloop

    from muster.orchestrator.process import serve
    from muster.orchestrator.settings import OrchestratorSettings
    from muster.settings import load_settings
    from muster.telemetry import setup_logging
    from muster.wallet import open_wallet

    setup_logging("orchestrator")
    settings = load_settings(
        OrchestratorSettings, file=config, flags=flags, env_prefix="MUSTER_ORCHESTRATOR_"
    )
    key = open_wallet(settings.keystore, settings.password_file).key
    uvloop.run(serve(settings, key))
