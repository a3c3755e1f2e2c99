"""The hostile network: strangers attack from everywhere at once while five honest workers work.

Every process is real: chain, orchestrator, trainer, relay, three validators, a juror, five workers.
First the network runs undisturbed for a while, then for the same time under all attacks, which come
from a separate process and separate addresses. In both phases probes measure how honest requests
are served, and the chain shows how much honest work was judged.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from muster.app.demo.keys import Cast, cast
from muster.app.demo.local_network import POLL_S, Network, NetworkOptions
from muster.chain import ChainView, follow
from muster.lab.redteam.hostile.service import Door, Kind, Service, probe
from muster.protocol.ids import RunId
from muster.settings.flags import find_preset

WORKERS, VALIDATORS = 5, 3
"""Numbers of honest workers and validators."""
SECONDS = 20.0
"""Default duration of each phase."""
SERVED = 0.99
"""The share of honest requests that must be served under attack."""
WARM_UP_JUDGED = 10
"""Submissions that are judged before anything is measured."""
START_S = 300.0
"""Deadline in seconds for the warm-up."""

Attacks = Callable[[Door, bytes, float], Mapping[str, int]]
"""Attacks a door for some seconds with the key of a hostile worker's node, in a separate process.
Returns the number of the door's answers by attack and status.
"""


@dataclass(frozen=True, slots=True)
class Phase:
    """One measured phase."""

    service: dict[Kind, Service]
    """Service to honest requests."""
    judged: int
    """Submissions judged on chain during the phase."""
    answers: Mapping[str, int]
    """Answers to the attackers; empty without attackers."""

    @property
    def served_min(self) -> float:
        """The share of the honest requests that were served, of the kind served worst."""
        return min(service.served for service in self.service.values())

    @property
    def p99_ms_max(self) -> float:
        """The 99th percentile of the time to an answer, of the kind served slowest."""
        return max(service.percentile_ms(0.99) for service in self.service.values())


@dataclass(frozen=True, slots=True)
class Story:
    """The measurements of both phases."""

    calm: Phase
    """Without attackers."""
    attacked: Phase
    """With attackers."""


async def play(
    folder: Path, attacks: Attacks, *, seconds: float, database_url: str = "", seed: int = 0
) -> Story:
    """Play both phases in an empty folder, each for some seconds; all processes end with it."""
    # The extra member is registered and staked, and the attackers have its node's key.
    people = cast(seed, honest=WORKERS, cheats=(), validators=VALIDATORS)
    recipe = find_preset("demo")
    assert recipe is not None
    options = NetworkOptions(
        folder=folder,
        deployments=folder / "deployments",
        cast=people,
        recipe=recipe,
        steps=0,
        seed=seed,
        rpc_port=0,
        database_url=database_url,
    )
    async with Network(options) as network:
        door = await _start(network, people)
        view = ChainView()
        async with await network.connect() as chain, asyncio.TaskGroup() as group:
            reader = group.create_task(follow(chain, view, poll_s=POLL_S))
            async with asyncio.timeout(START_S):
                while _judged(view, door.run_id) < WARM_UP_JUDGED:
                    children = network.processes.children.values()
                    network.processes.require_running(*(c for c in children if c.exit_code))
                    await asyncio.sleep(POLL_S)
            calm = await _phase(people, door, view, seconds, None)
            attacked = await _phase(people, door, view, seconds, attacks)
            reader.cancel()
    return Story(calm, attacked)


async def _start(network: Network, people: Cast) -> Door:
    """Start everything but the hostile member's worker."""
    run_id = await network.begin()
    for member in people.members[:WORKERS]:
        await network.start_worker(run_id, member)
    async with await network.connect() as chain:
        domain = chain.domain("ContributionLedger")
    return Door(network.orchestrator_url, domain, people.orchestrator.address, run_id)


async def _phase(
    people: Cast, door: Door, view: ChainView, seconds: float, attacks: Attacks | None
) -> Phase:
    nodes = [member.node.key for member in people.members[:WORKERS]]
    validators = [validator.key for validator in people.validators]
    before, answers = _judged(view, door.run_id), dict[str, int]()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        running = None
        if attacks is not None:
            insider = people.members[WORKERS].node.key
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(pool, attacks, door, insider, seconds)
        service = await probe(door, nodes, validators, seconds=seconds)
        judged = _judged(view, door.run_id) - before
        if running is not None:
            answers = dict(await running)
    return Phase(service, judged, answers)


def _judged(view: ChainView, run_id: RunId) -> int:
    return sum(
        batch.count
        for batch in view.batches.values()
        if batch.run_id == run_id and batch.posted_at is not None
    )
