"""The owner's commands to a running orchestrator, over a unix socket, if one is configured.

There are no passwords: only the user that runs the process may open the socket. The network cannot
reach it, and the public application has none of these routes. A setting lasts until this process
ends; each replica has its own.
"""

import contextlib
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, ConfigDict
from sqlalchemy import bindparam, update

from muster.api.answers import AccountAddress
from muster.orchestrator.db import statements
from muster.orchestrator.db.query import Query
from muster.orchestrator.db.tables import IS_UNFILLED, leases
from muster.orchestrator.http.errors import add_error_handlers, refuse
from muster.orchestrator.http.requests import ServicesDep
from muster.orchestrator.services import Services
from muster.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/admin")

_END_LEASES = Query(
    update(leases)
    .where(leases.c.node == bindparam("node"), IS_UNFILLED, leases.c.deadline >= bindparam("now"))
    .values(deadline=bindparam("ended"))
    .returning(leases.c.id)
)


class LogLevel(BaseModel):
    """The log level to set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    """Name of a level of the standard library's `logging`."""


@router.get("/counters")
async def counters(services: ServicesDep) -> dict[str, Any]:
    """Return counters for the owner."""
    [[(submissions,)], [(leases,)]] = await services.database.search(
        statements.received_submissions(), statements.unfilled(now=services.chain_clock.now())
    )
    committed, judged = services.projection.batch_counts
    return {
        "run": services.run_id,
        "leases_are_paused": services.leases.are_paused,
        "log_level": logging.getLevelName(logging.getLogger().getEffectiveLevel()),
        "open_leases": leases,
        "submissions": int(submissions),
        "batches_committed": committed,
        "batches_judged": judged,
        "pending_transactions": await services.chain.pending_transactions(),
        "listeners": services.feed.listeners,
        "chain_error": services.chain_health.error,
    }


@router.post("/leases/pause")
async def pause_leases(services: ServicesDep) -> dict[str, Any]:
    """Stop giving tickets; leased work may still be uploaded."""
    return _switch(services, True)


@router.post("/leases/resume")
async def resume_leases(services: ServicesDep) -> dict[str, Any]:
    """Give tickets again."""
    return _switch(services, False)


@router.delete("/leases/{node}")
async def drop_lease(node: AccountAddress, services: ServicesDep) -> dict[str, Any]:
    """End a node's lease now, so that it gets another ticket; the signed one stays valid until its
    deadline."""
    now = services.chain_clock.now()
    async with services.database.transaction() as asked:
        [ended] = await asked.ask(_END_LEASES(node=node, now=now, ended=now - 1))
    dropped = len(ended)
    logger.warning("lease dropped by the owner", extra={"node": node, "count": dropped})
    return {"dropped": dropped}


@router.put("/log-level")
async def set_log_level(order: LogLevel) -> dict[str, Any]:
    """Set the log level."""
    logging.getLogger().setLevel(order.level)
    return {"log_level": order.level}


@router.post("/retention")
async def collect(services: ServicesDep) -> dict[str, Any]:
    """Delete files that nobody can need any more, now instead of within ten minutes."""
    if services.retention is None:
        raise refuse(
            "not_configured", "files are kept for ever", "start the orchestrator with --retention-s"
        )
    return {"dropped": await services.retention.collect()}


@router.post("/rebuild")
async def rebuild(services: ServicesDep) -> dict[str, Any]:
    """Derive the projection again from the chain events that were read."""
    services.projection.rebuild()
    await services.batching.load()
    services.wakes.chain_changed()
    committed, judged = services.projection.batch_counts
    return {"batches_committed": committed, "batches_judged": judged}


def _switch(services: Services, paused: bool) -> dict[str, Any]:
    services.leases.are_paused = paused
    logger.warning("leases paused or resumed by the owner", extra={"are_paused": paused})
    return {"leases_are_paused": paused}


def create_admin_app(services: Services) -> FastAPI:
    """Return the application behind the owner's socket."""
    app = FastAPI(title="Muster orchestrator, owner", docs_url=None, redoc_url=None)
    app.state.services = services
    add_error_handlers(app)
    app.include_router(router)
    return app


@contextlib.contextmanager
def admin_listener(path: Path) -> Iterator[socket.socket]:
    """Listen on a unix socket that only this user may open; remove it afterwards.

    Raises ConfigError when the path is taken by another file or process.
    """
    _clear(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {path}: {error.strerror or error}",
                hint="give a short path in a folder that this user may write",
            ) from error
        finally:
            os.umask(before)
        listener.listen(16)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _clear(path: Path) -> None:
    """Remove the socket of a killed process."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(
            f"{path} exists and is not a socket", hint="choose another file with --admin-socket"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(
        f"another process listens on {path}", hint="choose another file with --admin-socket"
    )
