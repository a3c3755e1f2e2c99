"""One simulated network, from an empty chain to a report: wiring, misfortunes, and what came of it.

The orchestrator, every worker and every validator are the production programs. `Scenario` says how
many there are and what befalls them; `simulate` plays it and returns a `World` to look at.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select

from muster.chain import ChainView, RunConfig, RunTerms, apply_poll
from muster.client.facts import HistoryView
from muster.client.validator.calls import Windows
from muster.client.validator.evidence import EvidenceStore
from muster.client.validator.journal import OutcomeJournal
from muster.client.validator.judging import Rules
from muster.client.validator.loop import ValidatorPlace
from muster.client.worker.place import WorkerPlace
from muster.devnet.simulator.actors import (
    Disk,
    Machine,
    SimulatedValidator,
    SimulatedWorker,
    engine_for,
)
from muster.devnet.simulator.chain import EPOCH, Endpoint, SimulatedChain
from muster.devnet.simulator.clock import KIND, Meter, run_virtual
from muster.devnet.simulator.contracts import parties
from muster.devnet.simulator.database import open_inline
from muster.devnet.simulator.fate import Fate
from muster.devnet.simulator.money import claim_all, require_sound
from muster.devnet.simulator.ports import (
    ORCHESTRATOR,
    ChainConnection,
    Desk,
    InlineDecoder,
    Link,
    SimulatedApi,
    SimulatedEngine,
    SimulatedFetcher,
    domain_of,
)
from muster.devnet.simulator.scenario import (
    CALIBRATION,
    FUNDS,
    RUN,
    TOKEN,
    Scenario,
    fixed_of,
    recipe_of,
)
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.models import SubmissionRow
from muster.orchestrator.loop import run as run_orchestrator
from muster.orchestrator.services.clock import ChainClock
from muster.orchestrator.services.context import Services, build_services
from muster.orchestrator.settings import OrchestratorSettings
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ChainError, MusterError
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import Submission, Verdict
from muster.tasks.sort_digits import make_task_set

logger = logging.getLogger(__name__)


@dataclass
class Person:
    """A worker or a validator: its keys, its conduct, and what it is run from."""

    name: str
    """What the history calls it."""
    key: bytes
    """Node key of a worker, signing key of a validator."""
    address: Address
    """The account that stakes."""
    conduct: str
    """How it behaves."""
    link: Link
    """Its network."""
    endpoint: int
    """Its RPC endpoint."""
    loop: Any = None
    """The program, while it runs."""
    task: asyncio.Task[None] | None = None
    """What runs it."""
    starts: int = 0
    """How often it was started."""
    end: str = ""
    """What ended it for good."""


@dataclass
class World:
    """A network that was played."""

    scenario: Scenario
    """What was asked for."""
    chain: SimulatedChain
    """The chain."""
    services: Services
    """The orchestrator's services."""
    desk: Desk
    """What reached it."""
    workers: list[Person]
    """Everyone who worked."""
    validators: list[Person]
    """Everyone who judged."""
    views: list[HistoryView]
    """What each endpoint's followers know."""
    rules: Rules
    """The run's documents."""
    history: list[str] = field(default_factory=list)
    """One line for every block, event and mishap, in order."""
    judged: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Submissions checked and seconds spent, by validator."""
    received_at: dict[Hash32, float] = field(default_factory=dict)
    """Virtual time of each upload, by file."""
    meter: Meter | None = None
    """Processor seconds by kind of process."""

    def digest(self) -> str:
        """Return the SHA-256 of the history."""
        return hashlib.sha256("\n".join(self.history).encode()).hexdigest()


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
    """Return a folder in memory where there is one: what is durable here dies with us anyway."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


class Stage:
    """Builds a network and plays it."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario, self.folder = scenario, folder
        self.recipe = recipe_of(scenario)
        self.tasks = make_task_set(64, seed=1)
        self.keys = {name: self._key(name) for name in ("owner", "orchestrator", "trainer")}
        self.config = self._config()
        self.chain = SimulatedChain(fixed_of(scenario), {int(RUN): self.config}, self.rng("chain"))
        self.endpoints = [Endpoint(self.chain) for _ in range(scenario.endpoints + 1)]
        self.views = [HistoryView() for _ in self.endpoints]
        self.domain = domain_of("ContributionLedger")
        self.rules = Rules(self.recipe, self.tasks, CALIBRATION)
        self.workers = self._people("worker", scenario.workers, dict(scenario.conduct))
        self.validators = self._people("validator", scenario.validators, dict(scenario.judging))
        self.history: list[str] = []
        self.judged: dict[str, tuple[int, float]] = {}
        self._logged_blocks = 0
        self._database: Database | None = None
        self._runners: list[asyncio.Task[Any]] = []
        self.is_over = False

    # ------------------------------------------------------------------- wiring

    def rng(self, *name: object) -> random.Random:
        """Return the dice of one purpose: the same for the same seed."""
        return random.Random(repr((self.scenario.seed, *name)))

    def _key(self, name: str) -> bytes:
        return bytes(keccak(repr((self.scenario.seed, name)).encode()))

    def _config(self) -> RunConfig:
        calibration = CALIBRATION.to_bytes()
        return RunConfig(
            trainer=address_of(self.keys["trainer"]),
            orchestrator=address_of(self.keys["orchestrator"]),
            base_model_hash=keccak(b"base model"),
            task_set_hash=self.tasks.hash(),
            recipe_hash=self.recipe.hash(),
            calibration_hash=keccak(calibration),
            terms=RunTerms(TOKEN // 1000, 100_000, 500_000, self.scenario.quorum),
            validators=tuple(
                address_of(self._key(f"validator-{n}")) for n in range(self.scenario.validators)
            ),
        )

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
        services = await self._open_orchestrator()
        desk = Desk(services)
        world = World(
            self.scenario, self.chain, services, desk, self.workers, self.validators,
            self.views[1:], self.rules, self.history, self.judged,
        )  # fmt: skip
        self._start("trainer", self._train())
        for person in self.validators:
            self._run(person, self._validator(desk, person))
        for person in self.workers:
            self._run(person, self._worker(desk, person))
        self._start("fate", Fate(self).run())
        await asyncio.sleep(self.scenario.duration_s)
        await self._end(world)
        return world

    async def close(self) -> None:
        """Stop everything and close the database."""
        people = [p.task for p in (*self.workers, *self.validators) if p.task]
        for task in (*self._runners, *people):
            task.cancel()
        await asyncio.gather(*self._runners, *people, return_exceptions=True)
        if self._database:
            await self._database.close()

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

    def log(self, block: Any) -> None:
        """Add a block to the history."""
        self.note(f"block {block.number} {block.hash.hex()}")
        for event in block.events:
            self.note(f"event {event.contract} {event.name} {_shown(event.args)}")

    async def _found(self) -> None:
        """Give everyone money, register them, and create, fund and open the run."""
        chain, config = self.chain, self.config
        owner, trainer = str(address_of(self.keys["owner"])), str(config.trainer)
        run = parties().Run(
            owner, trainer, str(config.orchestrator), parties().Terms(*_numbers(config.terms)),
            validators=[str(v) for v in config.validators],
        )  # fmt: skip
        stake, validator_stake = (
            2 * chain.fixed.required_stake,
            chain.fixed.required_validator_stake,
        )
        people, judges = list(self.workers), list(self.validators)
        nodes = {p.name: str(address_of(p.key)) for p in people}

        def found(state: Any) -> None:
            for person in judges:
                state.balances[str(person.address)] = validator_stake
                state.allowances[str(person.address), "StakeVault"] = validator_stake
                state.deposit(str(person.address), str(person.address), validator_stake)
            for person in people:
                state.balances[str(person.address)] = stake
                state.register(
                    str(person.address), stake, nodes[person.name], 2**63,
                    consents=True, permit=True,
                )  # fmt: skip
            state.balances[owner] = FUNDS
            state.create_run(owner, run)
            state.allowances[owner, "RewardEscrow"] = FUNDS
            state.fund(owner, int(RUN), FUNDS)

        await chain.send("found", found)
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
        """Keep a view current, and tell the nodes that share it."""
        number = self.endpoints.index(endpoint)
        while True:
            await asyncio.sleep(self.scenario.poll_s)
            try:
                poll = await endpoint.poll()
            except ChainError:
                continue
            if apply_poll(view, poll):
                for person in (*self.workers, *self.validators):
                    if person.endpoint == number and person.loop is not None:
                        await person.loop.on_change(poll.events)

    # -------------------------------------------------------------- orchestrator

    async def _open_orchestrator(self) -> Services:
        folder = self.folder / "orchestrator"
        folder.mkdir()
        tasks = folder / "tasks.jsonl"
        self.tasks.write(tasks)
        self._database = await open_inline(folder / "orchestrator.sqlite3")
        connection = ChainConnection(self.chain, self.endpoints[0], self.config.orchestrator)
        loop = asyncio.get_running_loop()
        clock = ChainClock(loop.time)
        clock.update(await connection.now())
        services = await build_services(
            OrchestratorSettings(
                run=int(RUN), keystore=folder / "unused", files=folder / "files",
                lease_s=self.scenario.lease_s, retry_after_s=self.scenario.retry_after_s,
                commit_interval_s=self.scenario.commit_interval_s,
                batch_limit=self.scenario.batch_limit, poll_s=self.scenario.poll_s,
            ),
            chain=connection,
            view=self.views[0],
            key=self.keys["orchestrator"],
            documents={
                self.config.recipe_hash: self.recipe.to_bytes(),
                self.config.calibration_hash: CALIBRATION.to_bytes(),
                self.config.task_set_hash: tasks,
            },
            database=self._database,
            clock=lambda: EPOCH + loop.time(),
            chain_clock=clock,
        )  # fmt: skip
        connection.composed = self._composed
        self._start(ORCHESTRATOR, run_orchestrator(services, self.endpoints[0]))
        return services

    async def _composed(self, root: Hash32) -> list[Submission]:
        assert self._database is not None
        async with self._database.read() as session:
            rows = await session.scalars(
                select(SubmissionRow)
                .where(SubmissionRow.batch_root == root)
                .order_by(SubmissionRow.position)
            )
            return [Submission.from_json(row.submission) for row in rows]

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
                await self._publish(version)

    # ----------------------------------------------------------------- the nodes

    def _run(self, person: Person, build: Callable[[], Any]) -> None:
        async def live() -> None:
            rng = self.rng(person.name, "life")
            while not self.is_over:
                person.loop, person.starts = build(), person.starts + 1
                try:
                    async with asyncio.timeout(self._life(rng)):
                        await person.loop.run()
                except TimeoutError:
                    self.note(f"killed {person.name}")
                except MusterError as error:
                    person.end = str(error)
                    self.note(f"ended {person.name}: {type(error).__name__}")
                    return
                finally:
                    self._retire(person)
                await asyncio.sleep(rng.uniform(1, 10))

        KIND.set(person.name.split("-")[0])
        person.task = asyncio.create_task(live())
        KIND.set("harness")

    def _life(self, rng: random.Random) -> float | None:
        mean = self.scenario.churn_s
        return max(rng.expovariate(1 / mean), 1.0) if mean else None

    def _retire(self, person: Person) -> None:
        """Let go of what a process held."""
        loop, person.loop = person.loop, None
        if loop is None:
            return
        loop.place.journal.close()
        if isinstance(loop, SimulatedValidator):
            count, busy = self.judged.get(person.name, (0, 0.0))
            self.judged[person.name] = (count + loop.judged, busy + loop.busy_s)

    def _worker(self, desk: Desk, person: Person) -> Callable[[], SimulatedWorker]:
        scenario, endpoint = self.scenario, self.endpoints[person.endpoint]
        rng = self.rng(person.name, "machine")
        skew = rng.randint(-scenario.skew_s, scenario.skew_s)

        async def now() -> int:
            return await endpoint.now() + skew

        def build() -> SimulatedWorker:
            folder = self.folder / person.name
            folder.mkdir(exist_ok=True)
            place = WorkerPlace(
                run_id=RUN,
                worker=person.address,
                key=person.key,
                domain=self.domain,
                view=self.views[person.endpoint],
                now=now,
                api=SimulatedApi(desk, address_of(person.key), person.link),  # type: ignore[arg-type]
                fetcher=SimulatedFetcher(rng, scenario.fetch_s, scenario.relay_failures),  # type: ignore[arg-type]
                engine=engine_for(person.conduct),  # type: ignore[arg-type]
                recipe=self.recipe,
                task_set=self.tasks,
                journal=Disk(folder),
                poll_s=scenario.poll_s,
                heartbeat_s=scenario.heartbeat_s,
            )
            machine = Machine(rng, scenario.generate_s)
            return SimulatedWorker(place, machine, person.conduct)  # type: ignore[arg-type]

        return build

    def _validator(self, desk: Desk, person: Person) -> Callable[[], SimulatedValidator]:
        scenario, endpoint = self.scenario, self.endpoints[person.endpoint]
        rng = self.rng(person.name, "machine")
        friends = frozenset(p.address for p in self.workers if p.conduct != "honest")
        fixed = self.chain.fixed
        loop = asyncio.get_running_loop()

        def build() -> SimulatedValidator:
            folder = self.folder / person.name
            folder.mkdir(exist_ok=True)
            place = ValidatorPlace(
                run_id=RUN,
                key=person.key,
                domain=self.domain,
                view=self.views[person.endpoint],
                api=SimulatedApi(desk, person.address, person.link),  # type: ignore[arg-type]
                fetcher=SimulatedFetcher(rng, scenario.fetch_s, scenario.relay_failures),  # type: ignore[arg-type]
                engine=SimulatedEngine(),
                rules=self.rules,
                decoder=InlineDecoder(),  # type: ignore[arg-type]
                journal=OutcomeJournal(folder),
                evidence=EvidenceStore(folder / "evidence", CALIBRATION),
                poll_s=scenario.poll_s,
                file_patience_s=60.0,
                windows=Windows(fixed.outcome_deadline, fixed.challenge_window),
                now=endpoint.now,
                clock=loop.time,
            )
            machine = Machine(rng, scenario.check_s)
            return SimulatedValidator(place, machine, person.conduct, friends)  # type: ignore[arg-type]

        return build

    # -------------------------------------------------------------------- the end

    async def _end(self, world: World) -> None:
        """Stop the work, let what is under way be judged and become final, and pay it."""
        self.is_over = True
        self.note("no more work")
        for person in self.workers:
            person.link.is_up = False
            if person.task:
                person.task.cancel()
        for person in self.validators:
            person.link.is_up = True
        for endpoint in self.endpoints:
            endpoint.is_up = True
        fixed = self.chain.fixed
        waited = 0.0
        while waited < fixed.outcome_deadline and self._unjudged():
            await asyncio.sleep(10.0)
            waited += 10.0
        await asyncio.sleep(fixed.challenge_window + 20 * self.scenario.block_s)
        await claim_all(self.chain)
        await asyncio.sleep(4 * self.scenario.poll_s)
        for person in self.validators:
            self._note_load(person)
        await self._read_uploads(world)
        self.note("end")

    def _unjudged(self) -> bool:
        batches = self.chain.state.batches.values()
        return bool(self.chain.pool) or any(not batch.header.posted_at for batch in batches)

    def _note_load(self, person: Person) -> None:
        if person.loop is not None:
            count, busy = self.judged.get(person.name, (0, 0.0))
            loop = person.loop
            self.judged[person.name] = (count + loop.judged, busy + loop.busy_s)
            loop.judged, loop.busy_s = 0, 0.0

    async def _read_uploads(self, world: World) -> None:
        assert self._database is not None
        async with self._database.read() as session:
            rows = (await session.scalars(select(SubmissionRow))).all()
        world.received_at = {Hash32(row.file_hash): row.received_at - EPOCH for row in rows}


def _numbers(terms: RunTerms) -> tuple[int, int, int, int]:
    return (terms.price_per_unit, terms.fraud_ppm, terms.exact_fraud_ppm, terms.quorum)


def _shown(args: dict[str, Any]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in sorted(args.items()))


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
