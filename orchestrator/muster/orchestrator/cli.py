"""`muster orchestrator`: the command line, of the process and of its owner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from muster.protocol.errors import ApiError
from muster.settings.options import CONFIRMATIONS_HELP, FILE, PASSWORD_HELP, chain_options


@click.group()
def orchestrator() -> None:
    """Lease work and record outcomes."""


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
@click.option(
    "--evaluator", "evaluators", metavar="ADDRESS", multiple=True, help="May report evaluations."
)
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


@click.group()
@click.option(
    "--socket", "path", metavar="FILE", envvar="MUSTER_ORCHESTRATOR_ADMIN_SOCKET",
    help="The admin_socket of the orchestrator.",
)  # fmt: skip
@click.pass_context
def admin(context: click.Context, path: str | None) -> None:
    """Look after a running orchestrator, over its owner's socket."""
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
    """Log more, or less."""
    _order(path, "PUT", "log-level", {"level": level})


def _plain(name: str, method: str, what: str, meaning: str) -> None:
    """Add a command that takes nothing."""
    command = click.pass_obj(lambda path: _order(path, method, what))
    admin.command(name, help=meaning)(command)


_plain("counters", "GET", "counters", "Print what it does now.")
_plain(
    "pause", "POST", "leases/pause",
    "Give no tickets from now on; what is leased may still be uploaded.",
)  # fmt: skip
_plain("resume", "POST", "leases/resume", "Give tickets again.")
_plain("collect", "POST", "retention", "Drop files that nobody can need any more, now.")
_plain("rebuild", "POST", "rebuild", "Derive again what follows from the chain's events.")


def _order(path: str | None, method: str, what: str, body: dict[str, Any] | None = None) -> None:
    """Send an order and print what came of it; raises ApiError."""
    import json

    import httpx

    if path is None:
        # Not required of the group: each command's help is shown without it.
        raise click.UsageError("Missing option '--socket' before the command.")
    if not Path(path).is_socket():
        raise _absent(path, "there is no such socket")
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
        hint="does it run as this user, with this admin_socket?",
    )


orchestrator.add_command(admin)
