"""Two trainer sites on a real chain: one publishes, one is killed and comes back."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chain_scenario import TRAINER, network
from trainer_network import RECIPE, Files, TrainerNetwork

from muster.lifecycle import free_port

LAST = RECIPE.training.steps


@pytest.fixture
async def trainers(tmp_path: Path) -> AsyncIterator[TrainerNetwork]:
    """A chain with a worker, validators and documents."""
    files = Files()
    async with network(with_run=False) as scenario, files.serve() as url:
        made = TrainerNetwork(scenario, tmp_path, files, url)
        await made.prepare()
        yield made


def _flags(trainers: TrainerNetwork, site: int, port: int) -> list[str]:
    words = f"--sites 2 --site {site} --site-address 127.0.0.1:{port} --site-wait-s 60"
    return [*words.split(), "--site-alive-s", "2", "--model", str(trainers.folder / "model")]


async def _until_step(trainers: TrainerNetwork, name: str, step: int) -> None:
    async with asyncio.timeout(180):
        while not any(line.get("step", 0) >= step for line in trainers.lines(name)):
            await asyncio.sleep(0.02)


async def _until_logged(trainers: TrainerNetwork, name: str, words: str, *, times: int) -> None:
    async with asyncio.timeout(180):
        while trainers.log(name).count(words) < times:
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_sites_train_one_run_and_a_killed_one_comes_back(trainers: TrainerNetwork) -> None:
    port = free_port()
    await trainers.create("zero")
    await trainers.accept(range(4))
    zero = await trainers.start("zero", flags=_flags(trainers, 0, port))
    one = await trainers.start("one", flags=_flags(trainers, 1, port))
    await _until_step(trainers, "one", 2)
    one.kill()
    await one.wait()
    await trainers.accept(range(4, 6))
    await _until_step(trainers, "zero", 3)
    one = await trainers.start("one", flags=_flags(trainers, 1, port))
    await _until_logged(trainers, "one", "asking to take part", times=2)
    # It asks to be let in about now: with this step, or else with the next.
    await trainers.accept([6, 7])
    await _until_step(trainers, "zero", 4)
    await trainers.accept([8, 9])
    async with asyncio.timeout(180):
        assert await zero.wait() == 0, trainers.log("zero")
        assert await one.wait() == 0, trainers.log("one")
    runs = trainers.scenario.of(TRAINER).runs
    assert await runs.latest_version(trainers.scenario.run_id) == LAST
    assert trainers.weights("zero", LAST) == trainers.weights("one", LAST)
    assert "'sent': 'state'" not in trainers.log("zero")
    assert trainers.log("zero").count("site joined") == 2
