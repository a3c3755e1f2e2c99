"""A run that trains an adapter, on a real chain: broadcast, resumption and loading."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chain_scenario import TRAINER, network
from trainer_network import RECIPE, Files, TrainerNetwork

from muster.inference import Request
from muster.inference.transformers_engine import TransformersEngine
from muster.protocol.ids import Hash32, PolicyVersion
from muster.protocol.recipe import AdapterRecipe
from muster.shardcast import ChunkStore, Fetcher, Manifest, ShardServer
from muster.shardcast.adapter import WEIGHTS_NAME

LAST = PolicyVersion(RECIPE.training.steps)
ADAPTED = RECIPE.model_copy(update={"adapter": AdapterRecipe(rank=2, alpha=4.0)})


@pytest.fixture
async def trainers(tmp_path: Path) -> AsyncIterator[TrainerNetwork]:
    """A chain with a worker, validators and documents, and a recipe with an adapter."""
    files = Files()
    async with network(with_run=False) as scenario, files.serve() as url:
        made = TrainerNetwork(scenario, tmp_path, files, url, recipe=ADAPTED)
        await made.prepare()
        yield made


async def _finish(trainers: TrainerNetwork, name: str) -> None:
    process = await trainers.start(name)
    async with asyncio.timeout(180):
        assert await process.wait() == 0, trainers.log(name)


async def _kill_after(trainers: TrainerNetwork, name: str, step: int) -> None:
    process = await trainers.start(name)
    async with asyncio.timeout(180):
        while not any(line.get("step") == step for line in trainers.lines(name)):
            await asyncio.sleep(0.01)
    process.kill()
    assert await process.wait() == -signal.SIGKILL


def _manifest(trainers: TrainerNetwork, name: str, version: int) -> Manifest:
    store = ChunkStore(trainers.folder / name / "store")
    found = store.manifest(trainers.scenario.run_id, PolicyVersion(version))
    assert found is not None
    return found


async def _root(trainers: TrainerNetwork, version: int) -> Hash32:
    runs = trainers.scenario.of(TRAINER).runs
    checkpoint = await runs.checkpoint_of(trainers.scenario.run_id, PolicyVersion(version))
    return checkpoint.manifest_root


async def test_adapter_is_trained_resumed_broadcast_and_loaded(trainers: TrainerNetwork) -> None:
    await trainers.create("undisturbed")
    await trainers.accept(range(10))
    await _finish(trainers, "undisturbed")
    await trainers.create("killed")
    await trainers.accept(range(10))
    await _kill_after(trainers, "killed", 2)
    await _finish(trainers, "killed")
    assert trainers.weights("killed", LAST) == trainers.weights("undisturbed", LAST)
    assert trainers.weights("killed", LAST) != trainers.weights("killed", 0)

    # Version 0 is whole, and stays; each later one is a delta from it, as large as its adapter.
    manifests = {v: _manifest(trainers, "killed", v) for v in (0, 1, 2, 3, 4, 5)}
    assert [m.kind for m in manifests.values()] == ["full", *["delta"] * 5]
    assert [m.parent for m in manifests.values()] == [None, 0, 0, 0, 0, 0]
    state = trainers.folder / "killed" / "state" / "policies"
    adapter_bytes = (state / str(LAST) / WEIGHTS_NAME).stat().st_size
    assert manifests[LAST].broadcast_bytes < adapter_bytes + 3000
    assert manifests[LAST].broadcast_bytes < manifests[0].broadcast_bytes / 10

    # A client with version 0 pulls only the adapter, and samples from exactly these weights.
    store = ChunkStore(trainers.folder / "killed" / "store")
    async with ShardServer(store) as server, Fetcher([server.url], trainers.folder / "c") as client:
        pulled: list[int] = []
        for version in (0, 1, 2, 3, 4, LAST):
            folder = await client.fetch(
                trainers.scenario.run_id,
                PolicyVersion(version),
                await _root(trainers, version),
                progress=lambda _, total: pulled.append(total),
            )
        assert max(pulled[-3:]) == manifests[LAST].broadcast_bytes
        own = (folder / "model.safetensors").read_bytes()
        assert own == trainers.weights("killed", LAST)
        engine = TransformersEngine("float32")
        engine.load_policy(folder, LAST)
        request = Request((3, 4, 5, 6, 13), 7, 1.0, 6)
        assert engine.generate([request], proof=ADAPTED.proof)[0].tokens


async def _kill_once_published(trainers: TrainerNetwork, name: str, version: int) -> None:
    process = await trainers.start(name)
    runs, run_id = trainers.scenario.of(TRAINER).runs, trainers.scenario.run_id
    async with asyncio.timeout(180):
        while await runs.latest_version(run_id) != version:
            await asyncio.sleep(0.05)
    process.kill()
    await process.wait()


@pytest.mark.slow
async def test_lost_state_goes_on_from_the_published_adapter(trainers: TrainerNetwork) -> None:
    await trainers.create("lost")
    await trainers.accept(range(6))
    await _kill_once_published(trainers, "lost", 3)
    published = _manifest(trainers, "lost", 3)
    shutil.rmtree(trainers.folder / "lost" / "state")
    await trainers.accept(range(6, 10))
    await _finish(trainers, "lost")
    steps = [line["step"] for line in trainers.lines("lost") if "step" in line]
    assert steps == [4, 5]
    assert _manifest(trainers, "lost", LAST).state_hash != published.state_hash


@pytest.mark.slow
async def test_lost_store_is_made_again_from_the_state(trainers: TrainerNetwork) -> None:
    await trainers.create("lost")
    await trainers.accept(range(6))
    await _kill_once_published(trainers, "lost", 3)
    published = [_manifest(trainers, "lost", version) for version in (0, 2, 3)]
    shutil.rmtree(trainers.folder / "lost" / "store")
    await trainers.accept(range(6, 10))
    await _finish(trainers, "lost")
    store = ChunkStore(trainers.folder / "lost" / "store")
    assert store.versions(trainers.scenario.run_id) == [5, 4, 3, 2, 0]
    assert [_manifest(trainers, "lost", version) for version in (0, 2, 3)] == published
    assert _manifest(trainers, "lost", LAST).parent == 0
