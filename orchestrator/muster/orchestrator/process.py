"""The orchestrator process: connects, catches up with the chain, opens its disk, serves."""

from __future__ import annotations

import gc
import logging
import time

from muster.chain import Chain, ChainView, EventReader, find_run
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.places import is_url
from muster.orchestrator.server import serve_until_stopped
from muster.orchestrator.services.clock import ChainClock
from muster.orchestrator.services.context import build_services
from muster.orchestrator.services.documents import load_documents
from muster.orchestrator.services.leadership import Leadership
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.errors import ConfigError
from muster.protocol.ids import RunId

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
        view, chain_clock = ChainView(), ChainClock()
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
            # What is loaded by now stays: sparing the collector from it halves the slowest answers.
            gc.collect()
            gc.freeze()
            leadership = None
            if database.is_shared:
                leadership = Leadership(str(settings.database), chain)
            await serve_until_stopped(services, reader, leadership)
        finally:
            await database.close()
