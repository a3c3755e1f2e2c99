"""kill -9 of a real trainer at random moments, and whether it changed anything."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chain_scenario import TRAINER, network
from trainer_network import RECIPE, Files, TrainerNetwork

from muster.protocol.ids import PolicyVersion
from muster.shardcast import ChunkStore
from muster.trainer.measure.figures import UNREPEATABLE


@dataclass(frozen=True, slots=True)
class KillReport:
    """Results of a run whose trainer was killed, compared with an undisturbed run."""

    kills: int
    """How often it was killed."""
    identical: bool
    """All versions' weights and all metrics are the same, bit by bit."""
    consumed_once: bool
    """The published versions consumed every record of the training stream exactly once."""
    killed_at: list[tuple[int, float]]
    """Steps finished so far and seconds since its start, for every killed process."""


@asynccontextmanager
async def killable(folder: Path, *, steps: int) -> AsyncIterator[TrainerNetwork]:
    """Yield a network with a run of so many steps to train."""
    training = {**RECIPE.training.model_dump(), "steps": steps, "max_async_level": 64}
    recipe = type(RECIPE).model_validate({**RECIPE.model_dump(), "training": training})
    files = Files()
    async with network(with_run=False) as scenario, files.serve() as url:
        made = TrainerNetwork(scenario, folder, files, url, recipe)
        await made.prepare()
        yield made


async def kill_and_compare(trainers: TrainerNetwork, *, kills: int, seed: int) -> KillReport:
    """Train a run undisturbed, train it again under kills, and compare."""
    steps, rng = trainers.recipe.training.steps, random.Random(seed)
    await trainers.create("undisturbed")
    await _accept_all(trainers, steps)
    began = time.monotonic()
    assert await _live(trainers, "undisturbed") == 0, trainers.log("undisturbed")
    pace_s = (time.monotonic() - began) / steps
    await trainers.create("killed")
    await _accept_all(trainers, steps)
    moments: list[tuple[int, float]] = []
    while len(moments) < kills:
        left = kills - len(moments)
        # Few enough steps a life that the last kill still finds a trainer at work.
        share = (steps - _steps_done(trainers)) / (left + 1)
        moments.append(await _life_and_death(trainers, rng, share, pace_s))
    assert await _live(trainers, "killed") == 0, trainers.log("killed")
    same = [
        trainers.weights("killed", v) == trainers.weights("undisturbed", v)
        for v in _versions(trainers)
    ]
    lines = timeless(trainers, "killed") == timeless(trainers, "undisturbed")
    once = await _consumed(trainers) == list(range(2 * steps))
    return KillReport(len(moments), all(same) and len(same) > 1 and lines, once, moments)


async def _accept_all(trainers: TrainerNetwork, steps: int) -> None:
    for first in range(0, 2 * steps, 16):
        await trainers.accept(range(first, min(first + 16, 2 * steps)))


async def _live(trainers: TrainerNetwork, name: str) -> int:
    return await (await trainers.start(name)).wait()


async def _life_and_death(
    trainers: TrainerNetwork, rng: random.Random, share: float, pace_s: float
) -> tuple[int, float]:
    """Start a trainer, let it finish a few steps and a random piece of one, kill it."""
    goal = _steps_done(trainers) + rng.randrange(0, max(1, int(2 * share)))
    began = time.monotonic()
    trainer = await trainers.start("killed")
    async with asyncio.timeout(180):
        while _steps_done(trainers) < goal:
            await asyncio.sleep(0.005)
    # The pace is a guess: a trainer that is faster must not come to its end.
    ends_s, last = time.monotonic() + rng.random() * 2 * pace_s, trainers.recipe.training.steps - 1
    while time.monotonic() < ends_s and _steps_done(trainers) < min(goal + 2, last):
        await asyncio.sleep(0.002)
    trainer.kill()
    assert await trainer.wait() == -signal.SIGKILL, trainers.log("killed")
    return _steps_done(trainers), round(time.monotonic() - began, 3)


def _steps_done(trainers: TrainerNetwork) -> int:
    return max((line["step"] for line in trainers.lines("killed") if "step" in line), default=0)


def _versions(trainers: TrainerNetwork) -> list[int]:
    """Return the versions that both runs' folders still hold."""
    folders = [trainers.folder / n / "state" / "policies" for n in ("killed", "undisturbed")]
    first, second = ({p.name for p in f.iterdir() if p.name.isdecimal()} for f in folders)
    assert first == second
    return sorted(map(int, first))


def timeless(trainers: TrainerNetwork, name: str) -> list[dict[str, Any]]:
    lines = trainers.lines(name)
    steps = [line for line in lines if "step" in line]
    repeatable = [{k: v for k, v in each.items() if k not in UNREPEATABLE} for each in steps]
    return repeatable + [line for line in lines if "eval" in line]


async def _consumed(trainers: TrainerNetwork) -> list[int]:
    """Return the places in the training stream that the versions on chain say they consumed."""
    store, run = ChunkStore(trainers.folder / "killed" / "store"), trainers.scenario.run_id
    runs = trainers.scenario.of(TRAINER).runs
    found: list[int] = []
    for line in trainers.lines("killed"):
        if "step" in line:
            found += range(line["stream_from"], line["stream_to"])
            version = PolicyVersion(line["policy_version"])
            manifest = store.manifest(run, version)
            if manifest is not None:
                assert (await runs.checkpoint_of(run, version)).manifest_root == manifest.root()
                assert manifest.stream_to == line["stream_to"]
    return found
