"""The nodes of a simulated network: their programs, which are killed and started again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from muster.chain import CaseView
from muster.client.chain_facts import HistoryView
from muster.client.disputes.rerun import claim_of, recompute
from muster.client.juror.duty import JurorContext, JurorDuty, VoteJournal
from muster.client.validator.calls import Windows
from muster.client.validator.context import ValidatorContext
from muster.client.validator.judging import Rules
from muster.client.validator.records import OutcomeJournal
from muster.client.worker.context import WorkerContext
from muster.lab.simulator.actors import (
    Disk,
    Machine,
    Shelf,
    SimulatedValidator,
    SimulatedWorker,
    engine_for,
)
from muster.lab.simulator.clock import KIND
from muster.lab.simulator.connection import domain_of
from muster.lab.simulator.court import CourtConnection, court_terms
from muster.lab.simulator.desk import Desk, SimulatedApi
from muster.lab.simulator.machines import InlineDecoder, SimulatedEngine, SimulatedFetcher
from muster.lab.simulator.scenario import CALIBRATION, RUN
from muster.lab.simulator.world import Person
from muster.protocol.eip712 import address_of
from muster.protocol.errors import MusterError
from muster.protocol.ids import Address
from muster.protocol.jury import Ruling
from muster.protocol.messages import Reason, Verdict

if TYPE_CHECKING:
    from muster.lab.simulator.network import Stage


class Nodes:
    """Runs the programs of a stage's workers and validators."""

    def __init__(self, stage: Stage, desk: Desk) -> None:
        self._stage, self._desk = stage, desk
        self.judged: dict[str, tuple[int, float]] = {}
        """Submissions checked and seconds spent, by validator."""
        self.doing: Counter[str] = Counter()
        """Samples of workers' activities, one a second; "dead" without a process."""

    def start(self) -> None:
        """Start everyone."""
        for person in self._stage.jurors:
            self._start(person, self._juror(person))
        for person in self._stage.validators:
            self._start(person, self._validator(person))
        for person in self._stage.workers:
            self._start(person, self._worker(person))

    async def watch(self) -> None:
        """Record every second what each worker does, while there is work."""
        while not self._stage.is_over:
            await asyncio.sleep(1.0)
            self.doing.update(p.loop.doing if p.loop else "dead" for p in self._stage.workers)

    def _start(self, person: Person, build: Callable[[], Any]) -> None:
        """Run a program with restarts until it ends for good; each restart makes a new object."""

        async def live() -> None:
            rng = self._stage.rng(person.name, "life")
            while True:
                person.loop, person.starts = build(), person.starts + 1
                try:
                    async with asyncio.timeout(self._life(rng)):
                        await person.loop.run()
                except TimeoutError:
                    self._stage.note(f"killed {person.name}")
                except MusterError as error:
                    person.end = str(error)
                    self._stage.note(f"ended {person.name}: {type(error).__name__}")
                    return
                finally:
                    self._retire(person)
                await asyncio.sleep(rng.uniform(1, 10))

        KIND.set(person.name.split("-")[0])
        person.task = asyncio.create_task(live())
        KIND.set("harness")

    def _life(self, rng: random.Random) -> float | None:
        # When the work is over, validators must stay for the remaining batches.
        mean = 0.0 if self._stage.is_over else self._stage.scenario.churn_s
        return max(rng.expovariate(1 / mean), 1.0) if mean else None

    def _retire(self, person: Person) -> None:
        """Close a process's resources."""
        loop, person.loop = person.loop, None
        if loop is None:
            return
        loop.close()
        if isinstance(loop, SimulatedValidator):
            self._add_up(person.name, loop)

    def note_load(self) -> None:
        """Add the work that running validators have checked so far."""
        for person in self._stage.validators:
            if person.loop is not None:
                self._add_up(person.name, person.loop)

    def _add_up(self, name: str, loop: SimulatedValidator) -> None:
        count, busy = self.judged.get(name, (0, 0.0))
        self.judged[name] = (count + loop.judged, busy + loop.busy_s)
        loop.judged, loop.busy_s = 0, 0.0

    def _worker(self, person: Person) -> Callable[[], SimulatedWorker]:
        scenario, endpoint = self._stage.scenario, self._stage.endpoints[person.endpoint]
        rng = self._stage.rng(person.name, "machine")
        skew = rng.randint(-scenario.skew_s, scenario.skew_s)

        fetcher = SimulatedFetcher(rng, scenario.fetch_s, scenario.relay_failures)

        async def now() -> int:
            return await endpoint.now() + skew

        def build() -> SimulatedWorker:
            folder = self._stage.folder / person.name
            folder.mkdir(exist_ok=True)
            context = WorkerContext(
                run_id=RUN,
                worker=person.address,
                key=person.key,
                domain=self._stage.domain,
                view=self._stage.views[person.endpoint],
                now=now,
                api=SimulatedApi(self._desk, address_of(person.key), person.link),  # type: ignore[arg-type]
                fetcher=fetcher,  # type: ignore[arg-type]
                engine=engine_for(person.conduct),  # type: ignore[arg-type]
                rules=self._stage.rules,
                journal=Disk(folder),
                poll_s=scenario.poll_s,
                heartbeat_s=scenario.heartbeat_s,
                keep_going=True,
            )
            machine = Machine(rng, scenario.generate_s * self._slowness(person))
            first, *others = [
                SimulatedWorker(context, machine, person.conduct)  # type: ignore[arg-type]
                for _ in range(scenario.loops)
            ]
            first.take_helpers(others)
            return first

        return build

    def _slowness(self, person: Person) -> float:
        workers, scenario = self._stage.workers, self._stage.scenario
        is_slow = workers.index(person) >= len(workers) * (1 - scenario.slow_share)
        return scenario.slow_factor if is_slow else 1.0

    def _validator(self, person: Person) -> Callable[[], SimulatedValidator]:
        scenario, endpoint = self._stage.scenario, self._stage.endpoints[person.endpoint]
        rng = self._stage.rng(person.name, "machine")
        fetcher = SimulatedFetcher(rng, scenario.fetch_s, scenario.relay_failures)
        friends = self._friends(person)
        fixed = self._stage.chain.fixed
        loop = asyncio.get_running_loop()

        def build() -> SimulatedValidator:
            folder = self._stage.folder / person.name
            folder.mkdir(exist_ok=True)
            context = ValidatorContext(
                run_id=RUN,
                key=person.key,
                domain=self._stage.domain,
                view=self._stage.views[person.endpoint],
                api=SimulatedApi(self._desk, person.address, person.link),  # type: ignore[arg-type]
                fetcher=fetcher,  # type: ignore[arg-type]
                engine=SimulatedEngine(),
                rules=self._stage.rules,
                decoder=InlineDecoder(),  # type: ignore[arg-type]
                journal=OutcomeJournal(folder),
                evidence=Shelf(folder / "evidence", CALIBRATION),
                poll_s=scenario.poll_s,
                file_patience_s=60.0,
                windows=Windows(fixed.outcome_deadline, fixed.challenge_window),
                now=endpoint.now,
                keep_going=True,
                clock=loop.time,
            )
            machine = Machine(rng, scenario.check_s)
            return SimulatedValidator(context, machine, person.conduct, friends)  # type: ignore[arg-type]

        return build

    def _friends(self, validator: Person) -> frozenset[Address]:
        """Return the workers whose work a dishonest validator always accepts."""
        workers = self._stage.workers
        if validator.conduct == "accusing":
            return frozenset(p.address for p in workers[:-1])
        return frozenset(p.address for p in workers if p.conduct != "honest")

    def _juror(self, person: Person) -> Callable[[], SimulatedJuror]:
        stage, loop = self._stage, asyncio.get_running_loop()
        endpoint, view = stage.endpoints[person.endpoint], stage.views[person.endpoint]
        rng = stage.rng(person.name, "machine")

        def build() -> SimulatedJuror:
            folder = stage.folder / person.name
            folder.mkdir(exist_ok=True)
            api = SimulatedApi(self._desk, person.address, person.link)
            seconds = stage.scenario.check_s
            context = JurorContext(
                juror=person.address,
                chain=CourtConnection(stage.chain, endpoint, person.address),  # type: ignore[arg-type]
                view=view,
                judge=SimulatedJudge(
                    api, view, stage.rules, seconds=seconds, conduct=person.conduct
                ),
                journal=VoteJournal(folder),
                results=folder / "cases",
                terms=court_terms(stage.chain.fixed),
                poll_s=stage.scenario.poll_s,
                clock=loop.time,
                salt=rng.randbytes,
            )
            context.results.mkdir(exist_ok=True)
            return SimulatedJuror(context)

        return build


# ---------------------------------------------------------------------- the bench

PURCHASED = Ruling(Verdict.FRAUD, Reason.TOPLOC_MISMATCH)
"""The vote of every dishonest juror."""


class SimulatedJudge:
    """Judges a case with the evidence that the run's orchestrator serves."""

    def __init__(
        self, api: SimulatedApi, view: HistoryView, rules: Rules, *, seconds: float, conduct: str
    ) -> None:
        self._api, self._view, self._rules = api, view, rules
        self._seconds, self._conduct = seconds, conduct

    async def judge(self, case: CaseView) -> tuple[Ruling, dict[str, Any]]:
        """Return the ruling and details; raises ApiError while the orchestrator does not answer."""
        if self._conduct == "purchased":
            return PURCHASED, {}
        contents = await self._api.batch(case.batch_id)
        entry = contents.submissions[case.position]
        data = await self._api.file(entry.submission.file_hash)
        await asyncio.sleep(self._seconds)
        engine = SimulatedEngine()
        engine.policy_version = entry.submission.policy_version
        batch = self._view.batches[case.batch_id]
        claim = claim_of(self._view, batch, entry, case.position, domain_of("ContributionLedger"))
        found = await recompute(claim, data, self._rules, engine, InlineDecoder())  # type: ignore[arg-type]
        return Ruling(found.record.verdict, found.record.reason), {"detail": found.detail}


class SimulatedJuror(JurorDuty):
    """A juror's program, which can be killed."""

    async def on_change(self, _events: object) -> None:
        """Do nothing: the juror's loop polls by itself."""

    def close(self) -> None:
        """Close the journal."""
        self.context.journal.close()
