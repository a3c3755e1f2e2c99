"""Random failures of a network: reorganisations, outages and full disks, each at its own times."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from muster.lab.simulator.scenario import FOUNDED
from muster.protocol.messages import Verdict

if TYPE_CHECKING:
    from muster.lab.simulator.network import Stage


class Fate:
    """Plays the failures in a stage's scenario."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def run(self) -> None:
        """Play the failures of the scenario, each kind independently."""
        scenario = self._stage.scenario
        async with asyncio.TaskGroup() as fates:
            if scenario.is_silenced:
                fates.create_task(self._silence())
            for mean, befall in (
                (scenario.reorganise_s, self._reorganise),
                (scenario.outage_s, self._cut_off),
                (scenario.disk_full_s, self._fill_disk),
            ):
                if mean:
                    fates.create_task(self._often(mean, befall))

    async def _silence(self) -> None:
        """Cut honest validators off until an accusation is posted; later the jury needs them."""
        honest = [p for p in self._stage.validators if p.conduct == "honest"]
        for person in honest:
            person.link.is_up = False
        while not self._is_accused():
            await asyncio.sleep(1.0)
        for person in honest:
            person.link.is_up = True
        self._stage.note("the honest are back")

    def _is_accused(self) -> bool:
        batches = self._stage.chain.state.batches.values()
        return any(record.verdict == Verdict.FRAUD for b in batches for record in b.records)

    async def _often(
        self, mean: float, befall: Callable[[random.Random], Coroutine[Any, Any, None]]
    ) -> None:
        rng = self._stage.rng("fate", befall.__name__)
        while not self._stage.is_over:
            await asyncio.sleep(rng.expovariate(1 / mean))
            if not self._stage.is_over:
                await befall(rng)

    async def _reorganise(self, rng: random.Random) -> None:
        # The founding is never reorganised: without the run no process could continue.
        deepest = min(
            self._stage.scenario.reorganise_depth, self._stage.chain.head.number - FOUNDED
        )
        if deepest > 0:
            depth = rng.randint(1, deepest)
            self._stage.chain.reorganise(depth)
            self._stage.note(f"reorganised {depth} blocks")
            # The new branch must be longer than the old one when nodes see it.
            for _ in range(depth + 1):
                self._stage.log(self._stage.chain.mine(asyncio.get_running_loop().time()))

    async def _cut_off(self, rng: random.Random) -> None:
        person = rng.choice((*self._stage.workers, *self._stage.validators))
        if rng.random() < 0.25:
            endpoint = self._stage.endpoints[person.endpoint]
            self._stage.note(f"endpoint {person.endpoint} down")
            endpoint.is_up = False
            await asyncio.sleep(rng.uniform(5, 30))
            endpoint.is_up = True
            return
        self._stage.note(f"cut off {person.name}")
        person.link.is_up = False
        await asyncio.sleep(rng.uniform(5, 60))
        person.link.is_up = True

    async def _fill_disk(self, rng: random.Random) -> None:
        person = rng.choice(self._stage.workers)
        if person.loop is not None:
            journal = person.loop.context.journal
            self._stage.note(f"disk full {person.name}")
            journal.is_full = True
            await asyncio.sleep(rng.uniform(5, 60))
            journal.is_full = False
