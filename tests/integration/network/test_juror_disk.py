"""A juror's disk: strangers' runs fill it, and the juror still votes and sees honest cases."""

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from worlds.cases import make_case
from worlds.client_world import DOMAIN, VALIDATOR_KEY
from worlds.validator_bench import PlainDecoder

from muster.chain import CaseStatus
from muster.client.juror import judging
from muster.client.juror.judging import CaseJudge
from muster.client.sources import Sources
from muster.protocol.encoding import keccak
from muster.protocol.errors import PolicyUnavailable, StorageError
from muster.protocol.ids import Hash32, PolicyVersion, RunId
from muster.shardcast import ChunkStore, ShardServer
from muster.shardcast.trust import sign_root

KEY = keccak(b"trainer")
BASE = PolicyVersion(0)
DISK_BYTES = 16 << 20
CHUNK_BYTES = 1 << 16


class DiskUsage(NamedTuple):
    total: int
    free: int


def bytes_in(folder: Path) -> int:
    files = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    return sum(file.lstat().st_blocks * 512 for file in files)


class World:
    """A juror with a small disk, and runs of strangers whose policies repeat one chunk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "juror"
        self.folder.mkdir()
        self.store = ChunkStore(folder / "origin")
        self.view: Any = SimpleNamespace(runs={}, cases={})
        self.judge = CaseJudge(
            view=self.view,
            key=VALIDATOR_KEY,
            domain=DOMAIN,
            engine=SimpleNamespace(policy_version=BASE, load_policy=lambda *_: None),  # type: ignore[arg-type]
            decoder=PlainDecoder(),  # type: ignore[arg-type]
            folder=self.folder,
        )

    @property
    def free_bytes(self) -> int:
        return DISK_BYTES - bytes_in(self.folder)

    def publish(self, number: int, size: int) -> None:
        """Open a case of a run whose policy has this size."""
        run_id, file = RunId(number), self.folder.parent / "weights"
        file.write_bytes(b"x" * size)
        manifest = self.store.publish(
            {"model.safetensors": file},
            run_id=run_id,
            version=BASE,
            stream_from=0,
            stream_to=0,
            sign=lambda root: sign_root(KEY, run_id, BASE, root),
            chunk_bytes=CHUNK_BYTES,
        )
        checkpoint = SimpleNamespace(manifest_root=manifest.root())
        self.view.runs[run_id] = SimpleNamespace(run_id=run_id, checkpoints={BASE: checkpoint})
        name = Hash32(keccak(b"%d" % number))
        self.view.cases[name] = make_case(case_id=name, run_id=run_id, number=number)

    def close(self, number: int) -> None:
        del self.view.cases[Hash32(keccak(b"%d" % number))]

    async def load(self, number: int, server: ShardServer) -> None:
        """Have the engine load a run's policy, as in an attempt to judge a case of it."""
        await self.judge._tidy(RunId(number))
        async with (
            Sources([server.url], allows_private=True) as sources,
            self.judge._policy(self.view.runs[RunId(number)], BASE, sources),
        ):
            return


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World(tmp_path)
    usage = lambda _path: DiskUsage(DISK_BYTES, found.free_bytes)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    return found


async def test_files_of_runs_without_an_open_case_are_deleted(world: World) -> None:
    async with ShardServer(world.store) as server:
        for number in range(1, 5):
            await asyncio.to_thread(world.publish, number, DISK_BYTES // 2)
            await world.load(number, server)
            world.close(number)
    kept = [path.name for path in (world.folder / "policies").iterdir()]
    assert kept == ["4"]


async def test_versions_that_open_cases_are_about_stay(world: World) -> None:
    for number, version in ((1, 3), (1, 4), (2, 5)):
        submission = SimpleNamespace(policy_version=PolicyVersion(version))
        case = make_case(
            case_id=Hash32(keccak(b"case %d" % version)),
            run_id=RunId(number),
            number=version,
            claims=[SimpleNamespace(submission=submission)],
        )
        world.view.cases[case.case_id] = case
    assert world.judge._named(RunId(1)) == {3, 4}
    next(iter(world.view.cases.values())).status = CaseStatus.UPHELD
    assert world.judge._named(RunId(1)) == {4}


async def test_policy_that_drips_makes_way_for_other_cases(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "FETCH_TURN_S", 0.3)
    await asyncio.to_thread(world.publish, 1, DISK_BYTES // 4)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
            await writer.drain()
            await reader.read()
        writer.close()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as slow:
        url = f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}"
        world.judge.relays = [url]
        async with asyncio.timeout(20):
            with pytest.raises(PolicyUnavailable, match=r"did not come in 0\.3 s"):
                async with (
                    Sources() as sources,
                    world.judge._policy(world.view.runs[RunId(1)], BASE, sources),
                ):
                    pytest.fail("the policy arrived")


async def test_runs_whose_cases_are_open_leave_the_reserve_to_the_journal(world: World) -> None:
    async with ShardServer(world.store) as server:
        for number in range(1, 15):
            await asyncio.to_thread(world.publish, number, DISK_BYTES >> (number + 1) // 2)
            with suppress(StorageError):
                await world.load(number, server)
    assert world.free_bytes >= DISK_BYTES // 16


async def test_run_that_takes_most_of_the_disk_makes_room_for_another(world: World) -> None:
    async with ShardServer(world.store) as server:
        await asyncio.to_thread(world.publish, 1, DISK_BYTES * 3 // 4)
        await asyncio.to_thread(world.publish, 2, DISK_BYTES // 4)
        await world.load(1, server)
        with pytest.raises(StorageError, match="are free in"):
            await world.load(2, server)
        await world.load(2, server)
        with pytest.raises(StorageError, match="are free in"):
            await world.load(1, server)
        await world.load(2, server)
    assert not (world.folder / "policies" / "1" / "v0").exists()
