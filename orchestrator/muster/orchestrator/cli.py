"""`muster orchestrator`: the commands that run the process, and the owner's commands to it."""

from pathlib import Path
from typing import Any

import click

from muster.protocol.errors import ApiError
from muster.settings.flags import CONFIRMATIONS_HELP, FILE, PASSWORD_HELP, chain_options


@click.group()
def orchestrator() -> None:
    """Lease work and record outcomes."""


@orchestrator.command()
@click.option("--config", type=FILE, help="TOML file with any of these settings.")
@click.option("--run", type=int, help="Run to serve.")
@chain_options
@click.option("--keystore", metavar="FILE", help="Keystore of the run's orchestrator account.")
@click.option("--password-file", metavar="FILE", help=PASSWORD_HELP)
@click.option(
    "--documents", metavar="DIR", help="Folder of recipe, calibration and task set, named by hash."
)
@click.option("--files", metavar="DIR", help="Folder for submission files.")
@click.option("--retention-s", type=int, help="Delete files this long after they are final.")
@click.option("--bucket", metavar="URL", help="S3 storage instead of --files: s3://bucket/prefix.")
@click.option("--database", metavar="FILE|URL", help="SQLite file or PostgreSQL; can be rebuilt.")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on; 0 for any free one.")
@click.option("--admin-socket", metavar="FILE", help="Unix socket of muster orchestrator admin.")
@click.option("--ready-file", metavar="FILE", help="Write the URL here once it listens.")
@click.option("--origin", metavar="URL", help="URL of the trainer's policy weights.")
@click.option(
    "--relay",
    "relays",
    metavar="URL",
    multiple=True,
    help="URL of a relay of these weights; repeatable.",
)
@click.option(
    "--evaluator",
    "evaluators",
    metavar="ADDRESS",
    multiple=True,
    help="Account that may report evaluations; repeatable.",
)
@click.option(
    "--public-rpc",
    metavar="URL",
    multiple=True,
    help="Chain endpoint to tell new nodes; repeatable.",
)
@click.option("--public-url", metavar="URL", help="This orchestrator's URL to tell new nodes.")
@click.option(
    "--tokenizer",
    metavar="FILE",
    help="Tokenizer that shows samples as text. [default: the relays']",
)
@click.option("--lease-s", type=int, help="Seconds from lease to deadline.")
@click.option("--call-timeout-s", type=int, help="Seconds until a silent validator is replaced.")
@click.option("--commit-interval-s", type=float, help="Minimum time between two batches.")
@click.option("--poll-s", type=float, help="Seconds between two polls of the chain.")
@click.option("--confirmations", metavar="N|safe|finalized", help=CONFIRMATIONS_HELP)
@click.option("--retry-after-s", type=float, help="Seconds that nodes wait when there is no work.")
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


@click.group()
@click.option(
    "--socket", "path", metavar="FILE", envvar="MUSTER_ORCHESTRATOR_ADMIN_SOCKET",
    help="The admin_socket of the orchestrator.",
)  # fmt: skip
@click.pass_context
def admin(context: click.Context, path: str | None) -> None:
    """Control a running orchestrator over its owner's socket."""
    context.obj = path


@admin.command("drop-lease")
@click.argument("node")
@click.pass_obj
def drop_lease(path: str | None, node: str) -> None:
    """End a node's lease now, so that it gets another ticket."""
    from muster.protocol.ids import to_address

    _order(path, "DELETE", f"leases/{to_address(node)}")


@admin.command("log-level")
@click.argument("level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"]))
@click.pass_obj
def log_level(path: str | None, level: str) -> None:
    """Set the log level."""
    _order(path, "PUT", "log-level", {"level": level})


def _plain(name: str, method: str, what: str, meaning: str) -> None:
    """Add a command without arguments."""
    command = click.pass_obj(lambda path: _order(path, method, what))
    admin.command(name, help=meaning)(command)


_plain("counters", "GET", "counters", "Print counters of leases, submissions and batches.")
_plain(
    "pause", "POST", "leases/pause",
    "Stop giving tickets; leased work may still be uploaded.",
)  # fmt: skip
_plain("resume", "POST", "leases/resume", "Give tickets again.")
_plain("collect", "POST", "retention", "Delete files that are no longer needed, now.")
_plain("rebuild", "POST", "rebuild", "Recompute the state from the chain's events.")


def _order(path: str | None, method: str, what: str, body: dict[str, Any] | None = None) -> None:
    """Send an order and print the answer; raises ApiError."""
    import json

    import httpx

    if path is None:
        # Checked here, not required by the group, so that each command's --help works without it.
        raise click.UsageError("Missing option '--socket' before the command.")
    if not Path(path).is_socket():
        raise _absent(path, "there is no socket at this path")
    transport = httpx.HTTPTransport(uds=path)
    try:
        with httpx.Client(transport=transport, base_url="http://owner", timeout=60.0) as http:
            answer = http.request(method, f"/admin/{what}", json=body)
    except httpx.TransportError as error:
        raise _absent(path, str(error)) from error
    if answer.status_code >= 400:
        problem = answer.json()["error"]
        raise ApiError(
            problem["message"],
            status=answer.status_code,
            code=problem["code"],
            hint=problem["hint"],
        )
    click.echo(json.dumps(answer.json(), indent=2))


def _absent(path: str, why: str) -> ApiError:
    return ApiError(
        f"no orchestrator listens on {path}: {why}",
        status=503,
        code="unreachable",
        hint="start the orchestrator as this user with this admin_socket, or correct --socket",
    )


orchestrator.add_command(admin)
