"""`muster orchestrator admin`: the owner's commands to a running orchestrator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from muster.protocol.errors import ApiError


@click.group()
@click.option(
    "--socket", "path", metavar="FILE", envvar="MUSTER_ORCHESTRATOR_ADMIN_SOCKET",
    help="The admin_socket of the orchestrator.",
)  # fmt: skip
@click.pass_context
def admin(context: click.Context, path: str | None) -> None:
    """Look after a running orchestrator, over its owner's socket."""
    context.obj = path


@admin.command()
@click.pass_obj
def counters(path: str | None) -> None:
    """Print what it does now."""
    _order(path, "GET", "counters")


@admin.command()
@click.pass_obj
def pause(path: str | None) -> None:
    """Give no tickets from now on; what is leased may still be uploaded."""
    _order(path, "POST", "leases/pause")


@admin.command()
@click.pass_obj
def resume(path: str | None) -> None:
    """Give tickets again."""
    _order(path, "POST", "leases/resume")


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


@admin.command()
@click.pass_obj
def collect(path: str | None) -> None:
    """Drop files that nobody can need any more, now."""
    _order(path, "POST", "retention")


@admin.command()
@click.pass_obj
def rebuild(path: str | None) -> None:
    """Derive again what follows from the chain's events."""
    _order(path, "POST", "rebuild")


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
