"""The owners of workers: each challenges the first outcome against it, as `muster dispute open`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from muster.chain import BatchView
from muster.devnet.simulator.court import CourtConnection
from muster.devnet.simulator.world import Person
from muster.protocol.errors import ChainError, ContractRevert
from muster.protocol.messages import Verdict

if TYPE_CHECKING:
    from muster.devnet.simulator.network import Stage


class Owners:
    """Watches the chain for everyone who works."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._view = stage.views[1]
        self._people = {str(person.address): person for person in stage.workers}
        self._done: set[str] = set()

    async def run(self) -> NoReturn:
        """Challenge what is not accepted, until cancelled."""
        while True:
            await asyncio.sleep(self._stage.scenario.poll_s)
            owners = {worker.worker_id: worker.address for worker in self._view.workers.values()}
            for batch in list(self._view.batches.values()):
                for position, record in enumerate(batch.records or ()):
                    person = self._people[owners[record.worker_id]]
                    if record.verdict is not Verdict.ACCEPTED and person.name not in self._done:
                        await self._challenge(person, batch, position)

    async def _challenge(self, person: Person, batch: BatchView, position: int) -> None:
        stage = self._stage
        chain = CourtConnection(stage.chain, stage.endpoints[1], person.address)
        try:
            await chain.once(f"challenge {batch.batch_id}:{position}").challenge(
                batch.prove(position), Verdict.ACCEPTED
            )
        except ContractRevert as refused:
            stage.note(f"challenge of {person.name} refused: {refused.name}")
        except ChainError:
            return
        self._done.add(person.name)
