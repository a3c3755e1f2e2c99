"""Sweeps that take minutes: fifty kills at random moments, two hundred versions."""

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import psutil
import pytest
from shardcast_network import KEY, RUN, Network, is_whole, until

from muster.protocol.eip712 import address_of
from muster.protocol.ids import PolicyVersion
from muster.shardcast import ChunkStore, Fetcher, ShardServer, fetch, publish
from muster.shardcast.cache import PartFolder
from muster.shardcast.simple import check_folder

FETCH = """
import asyncio, sys
from pathlib import Path
from muster.protocol.ids import to_address
from muster.shardcast import fetch

relay, cache, signer = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
asyncio.run(fetch([relay], Path(cache), signer=to_address(signer)))
"""
"""A process that fetches the newest version, once it is told to."""
KILLS = 50
VERSIONS = 200
CHUNKS = 12


@pytest.mark.slow
async def test_client_killed_fifty_times_at_random_moments_loses_no_verified_chunk(
    tmp_path: Path,
) -> None:
    rng = Random(0)
    source = tmp_path / "model.bin"
    with source.open("wb") as file:
        for _ in range(CHUNKS):
            file.write(rng.randbytes(8 << 20))
    store, cache = ChunkStore(tmp_path / "origin"), tmp_path / "client"
    publish([source], store, key=KEY)
    finished = 0
    part, folder = cache / "1" / ".v0.part", cache / "1" / "v0"
    async with ShardServer(store) as origin:
        whole_s = await _fetch_and_kill(origin.url, cache, after_s=None)
        shutil.rmtree(cache)
        for _ in range(KILLS):
            held = _verified_chunks(part, store)
            await _fetch_and_kill(origin.url, cache, rng.uniform(0.0, whole_s / 2))
            if not folder.exists():
                assert _verified_chunks(part, store) >= held
                continue
            finished += 1
            assert all(not finding.damaged for finding in check_folder(folder))
            shutil.rmtree(cache)
        fetched = await fetch([origin.url], cache, signer=address_of(KEY))
    assert (fetched / "model.bin").read_bytes() == source.read_bytes()
    assert finished < KILLS / 2, "the kills came too late to interrupt anything"


async def _fetch_and_kill(url: str, cache: Path, after_s: float | None) -> float:
    """Fetch in a process, which is killed after a time unless that is None; returns how long it
    took.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", FETCH, url, str(cache), address_of(KEY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)
    process.stdin.write("go\n")
    process.stdin.flush()
    started = time.monotonic()
    if after_s is not None:
        # This sleep waits for nothing: the test is about the moment of the kill.
        await asyncio.sleep(after_s)
        process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.communicate)
    return time.monotonic() - started


def _verified_chunks(part: Path, store: ChunkStore) -> int:
    manifest = store.manifest(RUN, PolicyVersion(0))
    assert manifest is not None
    folder = PartFolder(part, manifest)
    if not part.exists():
        return 0
    present = [f for f in manifest.spans_by_file() if (part / f[0].name).exists()]
    return sum(len(folder.held(file, spans)) for file, spans in present)


@pytest.mark.slow
async def test_two_hundred_versions_leave_memory_and_disk_flat(tmp_path: Path) -> None:
    network = Network(tmp_path)
    memory_mb: list[float] = []
    disk: list[int] = []
    async with (
        ShardServer(network.origin) as origin,
        network.relay(origin.url) as (relay, store),
        network.fetcher(relay) as client,
    ):
        for version in range(VERSIONS):
            weights = Random(version).randbytes(2 << 20)
            network.publish(version, {"model.safetensors": weights})
            await until(is_whole(store, version))
            assert await network.fetch(client, version) == {"model.safetensors": weights}
            await _remove_sources(network)
            memory_mb.append(psutil.Process().memory_info().rss / 1e6)
            disk.append(sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()))
    steady = slice(20, None)
    assert max(memory_mb[steady]) - min(memory_mb[steady]) < 25
    assert memory_mb[-1] - memory_mb[20] < 15
    assert max(disk[steady]) < 1.1 * min(disk[steady])
    # Five versions each in origin, relay and client.
    assert disk[-1] < 3 * 5.5 * (2 << 20)


async def _remove_sources(network: Network) -> None:
    for source in network.folder.glob("source-*"):
        for path in source.iterdir():
            path.unlink()
        source.rmdir()


@pytest.mark.slow
async def test_relay_with_bounded_disk_stays_within_it_for_fifty_versions(tmp_path: Path) -> None:
    network = Network(tmp_path)
    most = 5 << 20
    async with (
        ShardServer(network.origin) as origin,
        network.relay(origin.url, max_bytes=most) as (relay, store),
        Fetcher([relay], tmp_path / "client", keep=1) as client,
    ):
        for version in range(50):
            weights = Random(version).randbytes(2 << 20)
            network.publish(version, {"model.safetensors": weights})
            assert await network.fetch(client, version) == {"model.safetensors": weights}
            assert store.chunks.used_bytes() <= most
