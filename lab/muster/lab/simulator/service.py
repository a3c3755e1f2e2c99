"""The simulated network's orchestrator: the production services on a database in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.lab.simulator.chain import EPOCH
from muster.lab.simulator.connection import ChainConnection
from muster.lab.simulator.scenario import CALIBRATION, RUN, Scenario
from muster.orchestrator.clock import BlockClock
from muster.orchestrator.db import Database, open_database
from muster.orchestrator.db.query import plain
from muster.orchestrator.db.statements import SubmissionRow, in_batch
from muster.orchestrator.loop import run as run_orchestrator
from muster.orchestrator.services import Services
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.ids import Hash32
from muster.protocol.messages import Submission

if TYPE_CHECKING:
    from muster.lab.simulator.network import Stage

_RECEIVED = plain("SELECT file_hash, received_at FROM submissions")


class Service:
    """One orchestrator; `open` makes its services."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._folder = stage.folder / "orchestrator"
        self._database: Database | None = None

    async def open(self) -> Services:
        """Return the services, over an empty database."""
        stage, scenario = self._stage, self._stage.scenario
        self._folder.mkdir()
        tasks = self._folder / "tasks.jsonl"
        stage.tasks.write(tasks)
        self._database = await open_database(self._folder / "orchestrator.sqlite3")
        connection = ChainConnection(stage.chain, stage.endpoints[0], stage.config.orchestrator)
        connection.composed = self._composed
        loop = asyncio.get_running_loop()
        clock = BlockClock(loop.time)
        clock.update(await connection.now())
        return await Services(
            _settings(scenario, self._folder),
            chain=connection,
            view=stage.views[0],
            key=stage.keys["orchestrator"],
            documents={
                stage.config.recipe_hash: stage.recipe.to_bytes(),
                stage.config.calibration_hash: CALIBRATION.to_bytes(),
                stage.config.task_set_hash: tasks,
            },
            database=self._database,
            clock=lambda: EPOCH + loop.time(),
            chain_clock=clock,
        ).load()

    def tasks(self, services: Services) -> Coroutine[Any, Any, None]:
        """Return the orchestrator's background tasks, to be run."""
        return run_orchestrator(services, self._stage.endpoints[0])

    async def uploads(self) -> dict[Hash32, float]:
        """Return the virtual time of each file's upload."""
        assert self._database is not None
        [rows] = await self._database.search(_RECEIVED)
        return {Hash32(name): at - EPOCH for name, at in rows}

    async def close(self) -> None:
        """Close the database."""
        if self._database is not None:
            await self._database.close()

    async def _composed(self, root: Hash32) -> list[Submission]:
        assert self._database is not None
        [rows] = await self._database.search(in_batch(root=root))
        return [SubmissionRow(*row).claim for row in rows]


def _settings(scenario: Scenario, folder: Path) -> OrchestratorSettings:
    return OrchestratorSettings(
        run=int(RUN),
        keystore=folder / "unused",
        files=folder / "files",
        lease_s=scenario.lease_s,
        retry_after_s=scenario.retry_after_s,
        commit_interval_s=scenario.commit_interval_s,
        batch_limit=scenario.batch_limit,
        poll_s=scenario.poll_s,
    )
