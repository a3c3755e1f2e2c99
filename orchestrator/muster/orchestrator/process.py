"""The orchestrator process: connects, catches up with the chain, opens its disk, serves.

The documents that a run pins on chain are checked against their hashes first. Recipe and
calibration are read into memory. A task set, which may be large, stays on disk. The server ends at
a signal; it knows no chain and no files.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import uvicorn
from fastapi import FastAPI

from muster.chain import Chain, ChainView, EventReader, RunConfig, find_run
from muster.lifecycle import first_error
from muster.lifecycle.files import write_durably
from muster.orchestrator.admin import admin_listener, create_admin_app
from muster.orchestrator.clock import BlockClock
from muster.orchestrator.db import open_database
from muster.orchestrator.db.postgres import LEADER_LOCK
from muster.orchestrator.db.query import is_url
from muster.orchestrator.http.app import create_app
from muster.orchestrator.http.connections import protocol_of
from muster.orchestrator.loop import run as run_loop
from muster.orchestrator.metrics import IS_LEADER
from muster.orchestrator.ports import ReaderPort
from muster.orchestrator.services import Documents, Services
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, StorageError
from muster.protocol.ids import Hash32, RunId
from muster.tasks import has_root

if TYPE_CHECKING:
    from muster.chain import JournalStore
    from muster.chain.send_journal import PostgresStore

STOP_S = 2
"""Seconds that open requests get to finish when the process stops."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; it reports when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.servers = []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to stop, or cancelled."""
        try:
            await super().serve(sockets)
        finally:
            # When cancelled, uvicorn leaves its listeners in the event loop, which would then
            # mistake the next socket with the same number for one that it already watches; and its
            # connections, whose requests would find the database closed.
            for listening in self.servers:
                listening.close()
            for connection in tuple(self.server_state.connections):
                connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then report it."""
        await super().startup(sockets)
        self.listening.set()


async def serve_until_stopped(
    services: Services, reader: ReaderPort, leadership: Leadership | None = None
) -> None:
    """Serve HTTP and run the flow until SIGTERM or SIGINT comes, or one of them fails."""
    try:
        await _serve(services, reader, leadership)
    except BaseExceptionGroup as group:
        # The first failure ended the other tasks, so only it is raised.
        raise first_error(group) from group


async def _serve(services: Services, reader: ReaderPort, leadership: Leadership | None) -> None:
    settings, stop = services.settings, asyncio.Event()
    with _listen(settings.host, settings.port) as listener, _signals(stop):
        server = _Server(_uvicorn_config(create_app(services), settings))
        async with _admin(services), asyncio.TaskGroup() as tasks:
            flow = tasks.create_task(run_loop(services, reader, leadership))
            web = tasks.create_task(server.serve(sockets=[listener]))
            await server.listening.wait()
            _announce_url(listener, settings)
            await stop.wait()
            logger.info("stopping")
            # Streams first: they would keep the server open until its grace period is over.
            services.feed.close()
            server.should_exit = True
            await web
            flow.cancel()


@contextlib.asynccontextmanager
async def _admin(services: Services) -> AsyncIterator[None]:
    """Serve the owner's socket, if it is configured."""
    path = services.settings.admin_socket
    if path is None:
        yield
        return
    with admin_listener(path) as listener:
        config = uvicorn.Config(
            create_admin_app(services),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=STOP_S,
        )
        server = _Server(config)
        async with asyncio.TaskGroup() as tasks:
            web = tasks.create_task(server.serve(sockets=[listener]))
            await server.listening.wait()
            try:
                yield
            finally:
                server.should_exit = True
                await web


def _uvicorn_config(app: FastAPI, settings: OrchestratorSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol_of(settings),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies or None,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=STOP_S,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is explicit, because asyncio sets TCP_NODELAY only on sockets that name TCP.
    # Otherwise every answer would wait 40 ms for the peer's acknowledgement of its headers.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
        write_durably(settings.ready_file, url.encode() + b"\n")


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


logger = logging.getLogger(__name__)

JOURNAL = "transactions.sqlite3"
"""In the files folder: unlike the database, it cannot be rebuilt. A shared database has its own
journal."""


async def serve(settings: OrchestratorSettings, key: bytes) -> None:
    """Run the orchestrator until SIGTERM or SIGINT.

    Raises ConfigError, ChainError or StorageError when it cannot start.
    """
    journal = None if is_url(settings.database) else settings.files / JOURNAL
    async with await Chain.connect(
        settings.rpc, settings.deployments, key=key, journal=journal
    ) as chain:
        view, chain_clock = ChainView(), BlockClock()
        reader = EventReader(chain, confirmations=settings.confirmations)
        run_id = RunId(settings.run)
        run = await find_run(chain, reader, view, run_id, pause_s=settings.poll_s)
        logger.info("caught up with the chain", extra={"runs": len(view.runs)})
        chain_clock.update(await chain.now())
        documents = load_documents(settings.documents, run.config)
        database = await open_database(settings.database)
        try:
            services = await Services(
                settings,
                chain=chain,
                view=view,
                key=key,
                documents=documents,
                database=database,
                clock=time.time,
                chain_clock=chain_clock,
            ).load()
            # Loaded objects are frozen: when the garbage collector skips them, the slowest answers
            # take half the time.
            gc.collect()
            gc.freeze()
            leadership = None
            if database.is_shared:
                leadership = Leadership(str(settings.database), chain)
            await serve_until_stopped(services, reader, leadership)
        finally:
            await database.close()


def load_documents(folder: Path, config: RunConfig) -> Documents:
    """Return the run's recipe, calibration and task set by hash.

    Raises ConfigError when one is missing or is not what the chain pins.
    """
    return {
        config.recipe_hash: _load(folder, "recipe", config.recipe_hash),
        config.calibration_hash: _load(folder, "calibration", config.calibration_hash),
        config.task_set_hash: _task_set(folder, config.task_set_hash),
    }


def _load(folder: Path, name: str, pinned: Hash32) -> bytes:
    path = _find(folder, name, pinned)
    data = path.read_bytes()
    if keccak(data) != pinned:
        raise _other(path, name, folder)
    return data


def _task_set(folder: Path, pinned: Hash32) -> Path:
    path = _find(folder, "task set", pinned)
    if not has_root(path, pinned):
        raise _other(path, "task set", folder)
    return path


def _find(folder: Path, name: str, pinned: Hash32) -> Path:
    for path in (folder / pinned.hex(), folder / hex0x(pinned)):
        if path.is_file():
            return path
    raise ConfigError(f"the run's {name} {pinned.hex()} is not in {folder}", hint=_hint(folder))


def _other(path: Path, name: str, folder: Path) -> ConfigError:
    return ConfigError(f"{path} is not the {name} that the chain pins", hint=_hint(folder))


def _hint(folder: Path) -> str:
    return f"copy it to {folder} from the folder of `muster run create --documents`"


# The election of the leader: the replica that holds the database's leader lock writes to the chain.
# The lock belongs to the same connection over which the leader journals its transactions. A replica
# that loses the lock cannot journal, so two leaders cannot both send. The next leader finds the
# journaled transactions of the earlier one and sends them again as they are.

CAMPAIGN_S = 1.0
"""Seconds between two attempts to get the lock."""
CHECK_S = 1.0
"""Seconds between two checks that the lock is still held."""


class SenderPort(Protocol):
    """A sender of transactions whose journal can be replaced."""

    async def journal_in(self, store: JournalStore) -> None:
        """Send with this journal from now on."""


class Leadership:
    """This replica's part in the election."""

    def __init__(self, url: str, chain: SenderPort) -> None:
        self._url = url
        self._chain = chain

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Wait until this replica leads; inside, it may send.

        Raises StorageError inside once the lock is lost.
        """
        store = await self._win()
        try:
            await self._chain.journal_in(store)
            IS_LEADER.set(1)
            logger.info("this replica now writes to the chain")
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(_watch(store))
                yield
                watch.cancel()
        finally:
            IS_LEADER.set(0)
            await asyncio.to_thread(store.close)

    async def _win(self) -> PostgresStore:
        from muster.chain.send_journal import PostgresStore

        while True:
            try:
                store = await asyncio.to_thread(PostgresStore.acquire, self._url, LEADER_LOCK)
            except StorageError as error:
                logger.warning(
                    "the database does not answer: no replica can be elected to write to the chain",
                    extra={"error": str(error)},
                )
            else:
                if store is not None:
                    return store
            await asyncio.sleep(CAMPAIGN_S)


async def _watch(store: PostgresStore) -> None:
    while True:
        await asyncio.sleep(CHECK_S)
        await asyncio.to_thread(store.check)
