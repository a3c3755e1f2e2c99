"""`muster relay run` against a real chain: mirrors what the trainer anchored, nothing else."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from muster.app.anvil import Anvil
from muster.chain import Chain, Deployment, RunConfig, RunTerms
from muster.client import relay
from muster.client.relay import RelaySettings, serve_relay
from muster.deploy import DeployParameters, deploy_contracts
from muster.protocol.eip712 import address_of, digest, sign
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.protocol.messages import Checkpoint
from muster.shardcast import ChunkStore, Fetcher, Manifest, ShardServer

TRAINER = 1
"""Index of the trainer among Anvil's accounts."""
MAX_RSS_MB = 120
"""Limit of a relay's resident memory."""


@pytest.fixture
async def anvil(tmp_path: Path) -> AsyncIterator[Anvil]:
    async with Anvil(log=tmp_path / "anvil.log") as node:
        yield node


@pytest.fixture
async def deployment(anvil: Anvil, tmp_path: Path) -> Deployment:
    parameters = DeployParameters(required_validator_stake=0)
    folder = tmp_path / "deployments"
    return await deploy_contracts(anvil.rpc_url, Anvil.key(0), parameters, deployments=folder)


@pytest.fixture
async def chain(anvil: Anvil, deployment: Deployment) -> AsyncIterator[Chain]:
    async with await Chain.connect(anvil.rpc_url, deployment, key=Anvil.key(TRAINER)) as connected:
        yield connected


async def create_run(chain: Chain) -> RunId:
    trainer, some = address_of(Anvil.key(TRAINER)), Hash32(bytes([1]) * 32)
    config = RunConfig(
        trainer=trainer,
        orchestrator=trainer,
        base_model_hash=some,
        task_set_hash=some,
        recipe_hash=some,
        calibration_hash=some,
        terms=RunTerms(1, 0, 0, 1),
        validators=(trainer,),
    )
    run_id, _ = await chain.runs.create_run(config)
    return run_id


def publish(
    chain: Chain, store: ChunkStore, run_id: RunId, version: int, trainer: int = TRAINER
) -> Manifest:
    def sign_root(root: Hash32) -> bytes:
        checkpoint = Checkpoint(run_id, PolicyVersion(version), root)
        message = digest(chain.domain("RunRegistry"), checkpoint.struct_hash())
        return sign(message, Anvil.key(trainer))

    weights = store.folder / f"weights-{version}"
    weights.write_bytes(bytes([version]) * 100_000)
    return store.publish(
        {"model.safetensors": weights},
        run_id=run_id,
        version=PolicyVersion(version),
        stream_from=0,
        stream_to=0,
        sign=sign_root,
    )


@contextmanager
def relay_process(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", "from muster.app.cli import main; main()", "relay", "run"]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def url_from(ready_file: Path, process: subprocess.Popen[str]) -> str:
    async with asyncio.timeout(180):
        while not ready_file.exists():
            assert process.poll() is None, process.communicate()
            await asyncio.sleep(0.02)
    return ready_file.read_text()


async def test_relay_process_mirrors_what_is_anchored_and_stops_on_sigterm(
    chain: Chain, anvil: Anvil, tmp_path: Path
) -> None:
    origin, ready_file = ChunkStore(tmp_path / "origin"), tmp_path / "ready"
    run_id = await create_run(chain)
    async with ShardServer(origin) as server:
        flags = ["--run", str(run_id), "--upstream", server.url, "--rpc", anvil.rpc_url]
        flags += ["--deployments", str(tmp_path / "deployments"), "--port", "0"]
        flags += ["--store", str(tmp_path / "relay"), "--ready-file", str(ready_file)]
        with relay_process(*flags) as process:
            relay = await url_from(ready_file, process)
            async with Fetcher([relay], tmp_path / "cache") as client:
                manifest = publish(chain, origin, run_id, 0)
                await chain.runs.publish_checkpoint(run_id, manifest.version, manifest.root())
                folder = await client.fetch(run_id, manifest.version, manifest.root())
                assert (folder / "model.safetensors").read_bytes() == bytes(100_000)
            publish(chain, origin, run_id, 1)
            await asyncio.sleep(0.5)
            async with httpx.AsyncClient() as http:
                listed = await http.get(f"{relay}/v1/{run_id}/versions")
            assert listed.json() == {"versions": [0]}
            assert psutil.Process(process.pid).memory_info().rss < MAX_RSS_MB << 20
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 20) == 0


@pytest.mark.parametrize(("hold_s", "kept"), [(None, [1, 0]), (0.0, [1])])
async def test_relay_keeps_old_versions_while_their_work_can_be_disputed(
    chain: Chain,
    anvil: Anvil,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hold_s: float | None,
    kept: list[int],
) -> None:
    monkeypatch.setattr("muster.shardcast.store.HELD_LEAVES", 1 << 60)
    first = await relaying(chain, anvil, tmp_path)
    origin, run_id = ChunkStore(tmp_path / "origin"), RunId(first.run)
    async with ShardServer(origin) as server:
        update = {"upstream": (server.url,), "keep": 1, "hold_s": hold_s}
        settings = first.model_copy(update=update)
        running = asyncio.ensure_future(serve_relay(settings))
        async with asyncio.timeout(180):
            for version in range(2):
                manifest = publish(chain, origin, run_id, version)
                await chain.runs.publish_checkpoint(run_id, manifest.version, manifest.root())
                while version not in ChunkStore(settings.store).versions(run_id):
                    assert not running.done(), running.result()
                    await asyncio.sleep(0.02)
        assert ChunkStore(settings.store).versions(run_id) == kept
        running.cancel()


async def test_relay_without_upstream_serves_what_its_store_holds_and_the_chain_has(
    chain: Chain, anvil: Anvil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.shardcast.relay.WITHDRAWN_S", 0.0)
    settings = (await relaying(chain, anvil, tmp_path)).model_copy(
        update={"upstream": (), "ready_file": tmp_path / "ready"}
    )
    store = ChunkStore(settings.store)
    manifest = publish(chain, store, RunId(settings.run), 0)
    await chain.runs.publish_checkpoint(RunId(settings.run), manifest.version, manifest.root())
    publish(chain, store, RunId(settings.run), 1)  # never anchored
    running = asyncio.ensure_future(serve_relay(settings))
    async with asyncio.timeout(180):
        while not (tmp_path / "ready").exists():
            assert not running.done(), running.result()
            await asyncio.sleep(0.02)
        relay = (tmp_path / "ready").read_text()
        async with Fetcher([relay], tmp_path / "cache") as client:
            folder = await client.fetch(RunId(settings.run), manifest.version, manifest.root())
            assert (folder / "model.safetensors").read_bytes() == bytes(100_000)
        async with httpx.AsyncClient() as http:
            listed = await http.get(f"{relay}/v1/{settings.run}/versions")
        assert listed.json() == {"versions": [0]}
    running.cancel()


async def test_relays_mirror_the_versions_of_every_trainer_that_a_run_had(
    chain: Chain, anvil: Anvil, tmp_path: Path
) -> None:
    origin, second = ChunkStore(tmp_path / "origin"), TRAINER + 1
    async with ShardServer(origin) as server:
        settings = (await relaying(chain, anvil, tmp_path, keep_going=True)).model_copy(
            update={"upstream": (server.url,)}
        )
        run_id, store = RunId(settings.run), ChunkStore(settings.store)
        running = asyncio.ensure_future(serve_relay(settings))
        first = publish(chain, origin, run_id, 0)
        await chain.runs.publish_checkpoint(run_id, first.version, first.root())
        await mirrored(store, run_id, 0)
        old, new = address_of(Anvil.key(TRAINER)), address_of(Anvil.key(second))
        await chain.runs.rotate_trainer(run_id, old, new)
        async with await Chain.connect(
            anvil.rpc_url, chain.deployment, key=Anvil.key(second)
        ) as successor:
            manifest = publish(chain, origin, run_id, 1, second)
            await successor.runs.publish_checkpoint(run_id, manifest.version, manifest.root())
        await mirrored(store, run_id, 1)
        fresh = settings.model_copy(update={"store": tmp_path / "fresh"})
        fresh_store = ChunkStore(fresh.store)
        another = asyncio.ensure_future(serve_relay(fresh))
        await mirrored(fresh_store, run_id, 0, 1)
        for task in (running, another):
            task.cancel()
        await asyncio.gather(running, another, return_exceptions=True)


async def mirrored(store: ChunkStore, run_id: RunId, *versions: int) -> None:
    """Wait until a relay's store has these versions whole."""
    async with asyncio.timeout(180):
        while not all(store.is_complete(run_id, PolicyVersion(v)) for v in versions):
            await asyncio.sleep(0.05)


async def relaying(chain: Chain, anvil: Anvil, tmp_path: Path, **changes: Any) -> RelaySettings:
    return RelaySettings(
        run=await create_run(chain),
        upstream=("http://127.0.0.1:9",),
        rpc=anvil.rpc_url,
        deployments=tmp_path / "deployments",
        store=tmp_path / "relay",
        port=0,
        **changes,
    )


async def test_relay_ends_when_the_run_is_closed_and_nobody_fetches(
    chain: Chain, anvil: Anvil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "LOOK_S", 0.02)
    settings = await relaying(chain, anvil, tmp_path, linger_s=0)
    running = asyncio.ensure_future(serve_relay(settings))
    await asyncio.wait([running], timeout=0.5)
    assert not running.done()
    await chain.write("RunRegistry", "closeRun", [settings.run])
    async with asyncio.timeout(180):
        await running


@pytest.mark.parametrize("changes", [{"linger_s": 3600}, {"linger_s": 0, "keep_going": True}])
async def test_relay_of_a_closed_run_stays_for_who_fetches(
    chain: Chain, anvil: Anvil, tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = await relaying(chain, anvil, tmp_path, **changes)
    await chain.write("RunRegistry", "closeRun", [settings.run])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await serve_relay(settings)


async def test_relay_refuses_to_start_for_a_run_that_does_not_exist(
    deployment: Deployment, anvil: Anvil, tmp_path: Path
) -> None:
    settings = RelaySettings(
        run=99,
        upstream=("http://127.0.0.1:9",),
        rpc=anvil.rpc_url,
        deployments=tmp_path / "deployments",
        store=tmp_path / "relay",
        port=0,
    )
    with pytest.raises(ConfigError, match="run 99 does not exist"):
        await serve_relay(settings)


@pytest.mark.parametrize("content", [None, " \n"])
async def test_relay_refuses_a_token_file_without_token(
    chain: Chain, anvil: Anvil, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "token").write_text(content)
    settings = RelaySettings(
        run=await create_run(chain),
        upstream=("http://127.0.0.1:9",),
        rpc=anvil.rpc_url,
        deployments=tmp_path / "deployments",
        store=tmp_path / "relay",
        port=0,
        token_file=tmp_path / "token",
    )
    with pytest.raises(ConfigError, match="token"):
        await serve_relay(settings)
