"""The cost of an interruption, a damaged cache or a full disk: never a wrong file."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from shardcast_network import (
    CHUNK_BYTES,
    RUN,
    Network,
    TwistedRelay,
    honest,
    is_whole,
    policy,
    until,
)

from muster.protocol.errors import StorageError
from muster.protocol.ids import PolicyVersion
from muster.shardcast import ShardServer

FETCH = """
import asyncio, resource, sys
from pathlib import Path
from muster.protocol.errors import StorageError
from muster.shardcast import Fetcher

relay, cache, root, kind, limit = sys.argv[1:]
resource.setrlimit(int(kind), (int(limit), int(limit)))

async def main():
    async with Fetcher([relay], Path(cache), parallel=1) as fetcher:
        await fetcher.fetch(1, 0, bytes.fromhex(root))

try:
    asyncio.run(main())
except StorageError as error:
    print(f"storage error: {error}")
    sys.exit(7)
"""
"""A process that fetches version 0; `limit` is that of a resource of the process, `kind`."""


def start_fetching(
    network: Network, relay: str, *, file_bytes: int = 1 << 40, descriptors: int = 0
) -> subprocess.Popen[str]:
    """Fetch with a quota for files, or with few descriptors."""
    kind, limit = resource.RLIMIT_FSIZE, file_bytes
    if descriptors:
        kind, limit = resource.RLIMIT_NOFILE, descriptors
    words = [relay, str(network.folder / "client"), network.roots[0].hex(), str(kind), str(limit)]
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, *words], stdout=subprocess.PIPE, text=True
    )


async def test_killed_fetch_keeps_its_verified_chunks(network: Network) -> None:
    network.publish(0, policy(0, chunks=10))
    stalled = asyncio.Event()

    async def stall_after_six(path: str, answer: bytes | None) -> bytes | None:
        if path.startswith("/v1/chunks/") and slow.chunks_asked > 6:
            stalled.set()
            await asyncio.sleep(3600)
        return answer

    slow = TwistedRelay(network.origin, stall_after_six)
    async with slow.listening() as relay:
        process = start_fetching(network, relay)
        async with asyncio.timeout(180):
            await stalled.wait()
        process.send_signal(signal.SIGKILL)
        process.communicate()
    counting = TwistedRelay(network.origin, honest)
    async with counting.listening() as relay, network.fetcher(relay) as client:
        assert await network.fetch(client, 0) == policy(0, chunks=10)
    # Twelve chunks in all: ten whole, one short, one config.
    assert counting.chunks_asked == 12 - 6


async def test_half_written_chunk_does_not_count(network: Network) -> None:
    network.publish(0, policy(0))
    cutting = TwistedRelay(network.origin, honest)
    cutting.cut_after = CHUNK_BYTES // 2
    async with cutting.listening() as relay, network.fetcher(relay, attempts=1) as client:
        with pytest.raises(Exception, match="no relay"):
            await network.fetch(client, 0)
    async with ShardServer(network.origin) as server, network.fetcher(server.url) as client:
        assert await network.fetch(client, 0) == policy(0)


async def damage_flip(folder: Path) -> int:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(CHUNK_BYTES + 5)
        byte = file.read(1)[0]
        file.seek(CHUNK_BYTES + 5)
        file.write(bytes([byte ^ 1]))
    return 1


async def damage_truncate(folder: Path) -> int:
    os.truncate(folder / "model.safetensors", 8 * CHUNK_BYTES)
    return 1


async def damage_remove(folder: Path) -> int:
    (folder / "config.json").unlink()
    return 1


async def damage_add(folder: Path) -> int:
    (folder / "pytorch_model.bin").write_bytes(b"evil")
    return 0


async def damage_manifest(folder: Path) -> int:
    folder.with_name(f"{folder.name}.manifest").write_bytes(b"{}")
    return 10


@pytest.mark.parametrize(
    "damage", [damage_flip, damage_truncate, damage_remove, damage_add, damage_manifest]
)
async def test_damaged_cache_is_repaired_by_a_new_process(
    network: Network, damage: Callable[[Path], Awaitable[int]]
) -> None:
    network.publish(0, policy(0))
    counting = TwistedRelay(network.origin, honest)
    async with counting.listening() as relay:
        async with network.fetcher(relay) as client:
            await network.fetch(client, 0)
        counting.asked.clear()
        expected = await damage(network.folder / "client" / str(RUN) / "v0")
        async with network.fetcher(relay) as restarted:
            assert await network.fetch(restarted, 0) == policy(0)
    assert counting.chunks_asked == expected


async def test_fetch_fails_with_storage_error_when_the_quota_is_used_up(
    network: Network, origin: str
) -> None:
    network.publish(0, policy(0))
    process = start_fetching(network, origin, file_bytes=3 * CHUNK_BYTES)
    output, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 7, output
    assert "storage error: cannot" in output


@pytest.mark.parametrize(
    "files",
    [
        {"model.safetensors": bytes(2000 * CHUNK_BYTES)},
        {f"part-{number}.safetensors": b"same" for number in range(300)},
    ],
    ids=["in one file", "in many files"],
)
async def test_chunk_takes_one_descriptor_however_often_it_occurs(
    network: Network, origin: str, files: dict[str, bytes]
) -> None:
    network.publish(0, files)
    process = start_fetching(network, origin, descriptors=64)
    output, _ = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, output
    folder = network.folder / "client" / str(RUN) / "v0"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


class DiskUsage(NamedTuple):
    free: int
    total: int = 1 << 40


async def test_fetch_fails_with_storage_error_when_the_disk_is_too_small(
    network: Network, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.publish(0, policy(0))
    monkeypatch.setattr("shutil.disk_usage", lambda _path: DiskUsage(free=CHUNK_BYTES))
    async with network.fetcher(origin) as client:
        with pytest.raises(StorageError, match="are free in") as failure:
            await network.fetch(client, 0)
    assert failure.value.hint
    monkeypatch.undo()
    async with network.fetcher(origin) as client:
        assert await network.fetch(client, 0) == policy(0)


async def test_relay_goes_on_after_its_disk_was_full(network: Network, origin: str) -> None:
    network.publish(0, policy(0))
    chunks = network.folder / "relay" / "chunks"
    async with network.relay(origin) as (relay, store):
        await until(is_whole(store, 0))
        os.rename(chunks, chunks.with_name("away"))
        chunks.write_bytes(b"not a folder")
        await asyncio.to_thread(network.publish, 1, policy(1))
        await asyncio.sleep(0.3)
        assert not store.is_complete(RUN, PolicyVersion(1))
        async with network.fetcher(origin, relay, attempts=2) as client:
            assert await network.fetch(client, 1) == policy(1)
