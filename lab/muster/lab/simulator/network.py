"""One simulated network, from an empty chain to a report.

The orchestrator, every worker and every validator are the production programs. `Scenario` gives
their number and the failures; `simulate` plays it and returns a `World` to examine:

    founding   money, stakes, seats and the run, in one transaction
    service    the orchestrator's services and background tasks
    nodes      workers and validators, killed and started again
    fate       reorganisations, outages, full disks
    here       blocks, followers of the chain, the trainer, and the end
"""

import asyncio
import random
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from muster.chain import ChainView, apply_poll
from muster.client.chain_facts import HistoryView
from muster.client.validator.judging import Rules
from muster.lab.simulator.chain import Block, Endpoint, SimulatedChain
from muster.lab.simulator.clock import KIND, run_virtual
from muster.lab.simulator.connection import domain_of
from muster.lab.simulator.desk import ORCHESTRATOR, Desk, Link
from muster.lab.simulator.fate import Fate
from muster.lab.simulator.founding import config_of, founding
from muster.lab.simulator.model.work import OPEN
from muster.lab.simulator.money import claim_all, require_sound
from muster.lab.simulator.nodes import Nodes
from muster.lab.simulator.owners import Owners
from muster.lab.simulator.scenario import CALIBRATION, RUN, Scenario, fixed, recipe_of
from muster.lab.simulator.service import Service
from muster.lab.simulator.world import Person, World
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ChainError
from muster.protocol.messages import Verdict
from muster.tasks.toys import make_sort

FAULTS_S = 120.0
"""Seconds to wait until all faults found in cases are slashed, one by one."""


def simulate(scenario: Scenario, look: Callable[[World], Coroutine[Any, Any, None]]) -> World:
    """Play a scenario and return the world; `look` sees it while its database is still open."""

    async def main() -> World:
        with tempfile.TemporaryDirectory(prefix="muster-simulator-", dir=_memory()) as folder:
            stage = Stage(scenario, Path(folder))
            try:
                world = await stage.play()
                await look(world)
            finally:
                await stage.close()
            return world

    world, meter = run_virtual(main)
    world.meter = meter
    return world


def _memory() -> str | None:
    """Return a folder in memory if there is one, since the simulation's files need not survive
    it."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class Stage:
    """Builds a network and plays it."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.recipe = recipe_of(scenario)
        self.tasks = make_sort(64, seed=1)
        self.keys = {name: self._key(name) for name in ("owner", "orchestrator", "trainer")}
        self.workers = self._people("worker", scenario.workers, dict(scenario.conduct))
        self.validators = self._people("validator", scenario.validators, dict(scenario.judging))
        self.jurors = self._people("juror", scenario.jurors, {"purchased": scenario.purchased})
        self.config = config_of(
            self.keys, self.recipe, self.tasks, self.validators, scenario.quorum
        )
        self.chain = SimulatedChain(fixed(scenario), {int(RUN): self.config}, self.rng("chain"))
        self.endpoints = [Endpoint(self.chain) for _ in range(scenario.endpoints + 1)]
        self.views = [HistoryView() for _ in self.endpoints]
        self.domain = domain_of("ContributionLedger")
        self.rules = Rules(self.recipe, self.tasks, CALIBRATION)
        self.history: list[str] = []
        self._service = Service(self)
        self._runners: list[asyncio.Task[Any]] = []
        self.is_over = False

    # ------------------------------------------------------------------- wiring

    def rng(self, *name: object) -> random.Random:
        """Return the random generator of one purpose, derived from the seed."""
        return random.Random(repr((self.scenario.seed, *name)))

    def _key(self, name: str) -> bytes:
        return bytes(keccak(repr((self.scenario.seed, name)).encode()))

    def _people(self, role: str, count: int, others: dict[Any, int]) -> list[Person]:
        conducts = [conduct for conduct, many in others.items() for _ in range(many)]
        found = []
        for number in range(count):
            name = f"{role}-{number}"
            key = self._key(name)
            owner = address_of(self._key(f"{name} wallet")) if role == "worker" else address_of(key)
            link = Link(self.rng(name, "link"), self.scenario.latency_s, self.scenario.loss)
            conduct = conducts[number] if number < len(conducts) else "honest"
            endpoint = 1 + number % self.scenario.endpoints
            found.append(Person(name, key, owner, conduct, link, endpoint))
        return found

    async def play(self) -> World:
        """Play the scenario to its end."""
        self._start("chain", self._mine())
        await self._found()
        for endpoint, view in zip(self.endpoints[1:], self.views[1:], strict=True):
            self._start("follower", self._follow(endpoint, view))
        services = await self._service.open()
        self._start(ORCHESTRATOR, self._service.tasks(services))
        desk = Desk(services)
        nodes = Nodes(self, desk)
        world = World(
            self.scenario, self.chain, services, desk, self.workers, self.validators, self.jurors,
            self.views[1:], self.rules, self.history, nodes.judged, nodes.doing,
        )  # fmt: skip
        self._start("trainer", self._train())
        nodes.start()
        self._start("harness", nodes.watch())
        if self.scenario.has_disputes:
            self._start("owner", Owners(self, desk).run())
        self._start("fate", Fate(self).run())
        await asyncio.sleep(self.scenario.duration_s)
        await self._end()
        self._require_alive()
        nodes.note_load()
        world.received_at = await self._service.uploads()
        self.note("end")
        return world

    async def close(self) -> None:
        """Stop everything and close the database."""
        people = [p.task for p in (*self.workers, *self.validators, *self.jurors) if p.task]
        for task in (*self._runners, *people):
            task.cancel()
        await asyncio.gather(*self._runners, *people, return_exceptions=True)
        await self._service.close()

    def _require_alive(self) -> None:
        """Raise the error of a program that should not have ended."""
        people = [p.task for p in (*self.workers, *self.validators, *self.jurors) if p.task]
        for task in (*self._runners, *people):
            if task.done() and not task.cancelled():
                task.result()

    def _start(self, kind: str, main: Coroutine[Any, Any, Any]) -> None:
        KIND.set(kind)
        self._runners.append(asyncio.create_task(main))
        KIND.set("harness")

    def note(self, line: str) -> None:
        """Add a line to the history."""
        self.history.append(f"{asyncio.get_running_loop().time():.6f} {line}")

    # -------------------------------------------------------------------- chain

    async def _mine(self) -> None:
        if self.scenario.checks_blocks:
            self.chain.check = require_sound
        while True:
            await asyncio.sleep(self.scenario.block_s)
            self.log(self.chain.mine(asyncio.get_running_loop().time()))

    def log(self, block: Block) -> None:
        """Add a block to the history."""
        self.note(f"block {block.number} {block.hash.hex()}")
        for event in block.events:
            self.note(f"event {event.contract} {event.name} {_shown(event.args)}")

    async def _found(self) -> None:
        """Found the run, publish its first policy, and update every view."""
        owner = address_of(self.keys["owner"])
        found = founding(
            owner, self.config, self.workers, self.validators, self.jurors, self.chain.fixed
        )
        await self.chain.send("found", found)
        await asyncio.sleep(2 * self.scenario.block_s)
        await self._publish(0)
        for endpoint, view in zip(self.endpoints, self.views, strict=True):
            apply_poll(view, await endpoint.poll())

    async def _publish(self, version: int) -> None:
        trainer, root = str(self.config.trainer), keccak(b"policy %d" % version).hex()
        await self.chain.send(
            "publish",
            lambda state: state.publish_checkpoint(trainer, int(RUN), version, root),
            label=f"publish {version}",
        )

    async def _follow(self, endpoint: Endpoint, view: HistoryView) -> None:
        """Keep a view current, and notify the nodes that share it."""
        number = self.endpoints.index(endpoint)
        people = [p for p in (*self.workers, *self.validators) if p.endpoint == number]
        while True:
            await asyncio.sleep(self.scenario.poll_s)
            try:
                poll = await endpoint.poll()
            except ChainError:
                continue
            if apply_poll(view, poll):
                for person in people:
                    if person.loop is not None:
                        await person.loop.on_change(poll.events)

    # ------------------------------------------------------------------- trainer

    async def _train(self) -> None:
        """Publish a version for every step's worth of accepted submissions."""
        view = ChainView()
        endpoint, version = Endpoint(self.chain), 0
        while True:
            await asyncio.sleep(self.scenario.poll_s)
            apply_poll(view, await endpoint.poll())
            accepted = sum(
                record.verdict is Verdict.ACCEPTED
                for batch in view.batches.values()
                for record in batch.records or ()
            )
            if accepted >= (version + 1) * self.scenario.submissions_per_step:
                version += 1
                await asyncio.sleep(self.scenario.train_s)
                await self._publish(version)

    # -------------------------------------------------------------------- the end

    async def _end(self) -> None:
        """Stop the work, let pending work be judged and become final, and pay it."""
        self.is_over = True
        self.note("no more work")
        for person in self.workers:
            person.link.is_up = False
            if person.task:
                person.task.cancel()
        for person in (*self.validators, *self.jurors):
            person.link.is_up = True
        for endpoint in self.endpoints:
            endpoint.is_up = True
        fixed = self.chain.fixed
        await _wait_while(self._is_unjudged, fixed.outcome_deadline)
        await asyncio.sleep(fixed.challenge_window + 20 * self.scenario.block_s)
        if self.chain.state.cases:
            await _wait_while(self._is_disputed, 2 * fixed.jury_time)
            await asyncio.sleep(FAULTS_S)
        await claim_all(self.chain)
        await asyncio.sleep(4 * self.scenario.poll_s)

    def _is_unjudged(self) -> bool:
        batches = self.chain.state.batches.values()
        return bool(self.chain.pool) or any(not batch.header.posted_at for batch in batches)

    def _is_disputed(self) -> bool:
        return any(case.status == OPEN for case in self.chain.state.cases.values())


async def _wait_while(holds: Callable[[], bool], most_s: float) -> None:
    waited = 0.0
    while waited < most_s and holds():
        await asyncio.sleep(10.0)
        waited += 10.0


def _shown(args: dict[str, Any]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in sorted(args.items()))


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
