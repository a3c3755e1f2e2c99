"""The orchestrator process: connects, catches up with the chain, serves, stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from muster.chain import Chain, ChainView, EventReader
from muster.orchestrator.app import create_app
from muster.orchestrator.db.engine import Database
from muster.orchestrator.loop import run as run_loop
from muster.orchestrator.services.clock import ChainClock
from muster.orchestrator.services.context import Services, build_services
from muster.orchestrator.services.documents import load_documents
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.errors import ConfigError
from muster.protocol.ids import RunId

logger = logging.getLogger(__name__)

STOP_S = 2
"""How long open requests may take to finish when the process stops."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, telling when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        self.listening.set()


async def serve(settings: OrchestratorSettings, key: bytes) -> None:
    """Run the orchestrator until SIGTERM or SIGINT.

    Raises ConfigError, ChainError or StorageError when it cannot start.
    """
    async with await Chain.connect(settings.rpc, settings.deployments, key=key) as chain:
        view, reader, chain_clock = ChainView(), EventReader(chain), ChainClock()
        await _catch_up(view, reader)
        chain_clock.update(await chain.now())
        run = view.runs.get(RunId(settings.run))
        if run is None:
            raise ConfigError(
                f"run {settings.run} does not exist on chain {chain.chain_id}",
                hint="create it with `muster run create`",
            )
        documents = load_documents(settings.documents, run.config)
        database = await Database.open(settings.database)
        try:
            services = await build_services(
                settings,
                chain=chain,
                view=view,
                key=key,
                documents=documents,
                database=database,
                clock=time.time,
                chain_clock=chain_clock,
            )
            await _serve_until_stopped(services, reader)
        finally:
            await database.close()


async def _catch_up(view: ChainView, reader: EventReader) -> None:
    """Read the chain's events up to now."""
    poll = await reader.poll()
    for event in poll.events:
        view.apply(event)
    logger.info("caught up with the chain", extra={"events": len(poll.events)})


async def _serve_until_stopped(services: Services, reader: EventReader) -> None:
    """Serve HTTP and run the flow until a signal comes or one of them fails."""
    settings, stop = services.settings, asyncio.Event()
    with _listen(settings.host, settings.port) as listener, _signals(stop):
        server = _Server(_uvicorn_config(create_app(services), settings))
        async with asyncio.TaskGroup() as tasks:
            flow = tasks.create_task(run_loop(services, reader))
            web = tasks.create_task(server.serve(sockets=[listener]))
            await server.listening.wait()
            _announce_url(listener, settings)
            await stop.wait()
            logger.info("stopping")
            # Streams first: they would hold the server open until its grace is over.
            services.feed.close()
            server.should_exit = True
            await web
            flow.cancel()


def _uvicorn_config(app: FastAPI, settings: OrchestratorSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies or None,
        limit_concurrency=settings.max_connections,
        h11_max_incomplete_event_size=16 * 1024,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=STOP_S,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def _announce_url(listener: socket.socket, settings: OrchestratorSettings) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    logger.info("listening", extra={"url": url, "run": settings.run})
    if settings.ready_file is not None:
        _write_whole(settings.ready_file, url + "\n")


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    temporary.replace(path)


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
