"""The owners of workers: each disputes the first outcome against it, as `muster dispute open`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from muster.chain import BatchView
from muster.chain.structs import CommittedWork
from muster.lab.simulator.court import CourtConnection
from muster.lab.simulator.desk import Desk
from muster.lab.simulator.world import Person
from muster.protocol.errors import ChainError, ContractRevert
from muster.protocol.jury import Ruling
from muster.protocol.merkle import batch_proof
from muster.protocol.messages import Reason, Verdict

if TYPE_CHECKING:
    from muster.lab.simulator.network import Stage

SALT = 1
"""Salt that hides a claim until it is made; nobody here tries to guess it."""


class Owners:
    """Watches the chain for all workers' owners."""

    def __init__(self, stage: Stage, desk: Desk) -> None:
        self._stage, self._desk = stage, desk
        self._view = stage.views[1]
        self._people = {str(person.address): person for person in stage.workers}
        self._done: set[str] = set()

    async def run(self) -> NoReturn:
        """Dispute outcomes that are not Accepted, until cancelled."""
        while True:
            await asyncio.sleep(self._stage.scenario.poll_s)
            owners = {worker.worker_id: worker.address for worker in self._view.workers.values()}
            for batch in list(self._view.batches.values()):
                for position, record in enumerate(batch.records or ()):
                    person = self._people[owners[record.worker_id]]
                    if record.verdict is not Verdict.ACCEPTED and person.name not in self._done:
                        await self._dispute(person, batch, position)

    async def _dispute(self, person: Person, batch: BatchView, position: int) -> None:
        stage, outcome = self._stage, batch.prove(position)
        chain = CourtConnection(stage.chain, stage.endpoints[1], person.address)
        entries = (await self._desk.batch(batch.batch_id)).submissions
        leaves = [entry.submission.leaf() for entry in entries]
        entry = entries[position]
        proof = tuple(batch_proof(leaves, position))
        work = CommittedWork(entry.submission, entry.signature, proof)
        place, ruling = f"{batch.batch_id}:{position}", Ruling(Verdict.ACCEPTED, Reason.NONE)
        try:
            await chain.once(f"announce {place}").announce(outcome, ruling, SALT)
            await chain.once(f"claim {place}").claim(outcome, work, ruling, SALT)
        except ContractRevert as refused:
            stage.note(f"claim of {person.name} refused: {refused.name}")
        except ChainError:
            return
        self._done.add(person.name)
