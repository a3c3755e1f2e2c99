"""The orchestrator process: connects, catches up with the chain, opens its disk, serves.

The documents that a run pins on chain are checked against their hashes first. Recipe and
calibration are read into memory. A task set, which may be large, stays on disk.
"""

from __future__ import annotations

import gc
import logging
import time
from pathlib import Path

from muster.chain import Chain, ChainView, EventReader, RunConfig, find_run
from muster.orchestrator.clock import BlockClock
from muster.orchestrator.db.database import open_database
from muster.orchestrator.db.query import is_url
from muster.orchestrator.leadership import Leadership
from muster.orchestrator.server import serve_until_stopped
from muster.orchestrator.services import Documents, build_services
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, MusterError
from muster.protocol.ids import Hash32, RunId
from muster.tasks import document_root

logger = logging.getLogger(__name__)

JOURNAL = "transactions.sqlite3"
"""In the files folder: unlike the database, it cannot be rebuilt. A shared database has its own."""


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
        if run is None:
            raise ConfigError(
                f"run {settings.run} does not exist on chain {chain.chain_id}",
                hint="create it with `muster run create`",
            )
        documents = load_documents(settings.documents, run.config)
        database = await open_database(settings.database)
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
            # Objects loaded by now stay: without them the collector halves the slowest answers.
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
    try:
        found = document_root(path)
    except MusterError as error:
        raise _other(path, "task set", folder) from error
    if found != pinned:
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
    return f"put it into {folder} under that name; `muster run create` wrote it (--documents)"
