import asyncio
import errno
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from eth_account import Account
from hypothesis import given, strategies as st
from orchestrator_bench import open_bench, refused
from orchestrator_fakes import Network

from muster.lifecycle.rates import RateLimit
from muster.orchestrator.clock import Backoff, BlockClock, wait_for
from muster.orchestrator.intake.blobs import LEFTOVER_S
from muster.orchestrator.intake.files import FileStore
from muster.orchestrator.process import load_documents
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import file_hash
from muster.protocol.errors import ConfigError, StorageError


class Ticking:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@given(
    rate=st.floats(0.5, 50), burst=st.integers(1, 20), pauses=st.lists(st.floats(0, 2), max_size=60)
)
def test_rate_limit_never_passes_more_than_burst_plus_rate(
    rate: float, burst: int, pauses: list[float]
) -> None:
    clock = Ticking()
    limit = RateLimit(rate=rate, burst=burst, monotonic=clock)
    passed = 0
    for pause in pauses:
        clock.time += pause
        passed += limit.wait_s("peer") == 0
    assert passed <= burst + clock.time * rate + 1e-6


def test_rate_limit_passes_again_after_the_wait_it_names() -> None:
    clock = Ticking()
    limit = RateLimit(rate=2.0, burst=1, monotonic=clock)
    assert limit.wait_s("peer") == 0
    wait_s = limit.wait_s("peer")
    assert wait_s == pytest.approx(0.5)
    clock.time += wait_s + 1e-9
    assert limit.wait_s("peer") == 0


def test_rate_limit_keeps_keys_apart_in_bounded_memory() -> None:
    limit = RateLimit(rate=1, burst=1, max_keys=10, monotonic=Ticking())
    assert all(limit.wait_s(f"peer {n}") == 0 for n in range(100))
    assert len(limit._buckets) == 10
    assert limit.wait_s("peer 99") > 0


def test_chain_clock_runs_on_between_blocks_and_never_behind_them() -> None:
    monotonic = Ticking()
    clock = BlockClock(monotonic)
    clock.update(1000)
    monotonic.time += 5.5
    assert clock.now() == 1005
    clock.update(1000)
    assert clock.now() == 1005
    clock.update(1003)
    assert clock.now() == 1003


def test_backoff_doubles_up_to_its_limit_per_key() -> None:
    monotonic = Ticking()
    backoff = Backoff(first_s=1.0, most_s=4.0, monotonic=monotonic)
    assert [backoff.failed("a") for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    assert not backoff.is_due("a")
    assert backoff.is_due("b")
    monotonic.time += 4.0
    assert backoff.is_due("a")
    backoff.succeeded("a")
    assert backoff.failed("a") == 1.0


async def test_waiting_ends_when_woken_or_when_time_is_over() -> None:
    event = asyncio.Event()
    event.set()
    await wait_for(event, 60.0)
    assert not event.is_set()
    await wait_for(event, 0.0)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@given(parts=st.lists(st.binary(max_size=5000), max_size=5))
async def test_upload_is_written_as_it_came(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    files = FileStore(tmp_path_factory.mktemp("files"))
    files.open()
    received = await files.receive(chunks(*parts), max_bytes=1 << 20)
    assert received.path.read_bytes() == b"".join(parts)
    assert received.file_hash == file_hash(b"".join(parts))
    files.discard(received)
    assert not received.path.exists()


async def test_large_upload_is_flushed_in_between(tmp_path: Path) -> None:
    files = FileStore(tmp_path)
    files.open()
    received = await files.receive(chunks(*[bytes(700_000)] * 5), max_bytes=4_000_000)
    assert received.size_bytes == 3_500_000
    assert received.file_hash == file_hash(bytes(3_500_000))


async def test_leftovers_are_cleared_when_the_folder_is_opened(tmp_path: Path) -> None:
    for name, age_s in (("old", LEFTOVER_S + 60), ("young", 1)):
        (tmp_path / f"{name}.part").write_bytes(b"half")
        os.utime(tmp_path / f"{name}.part", (time.time() - age_s,) * 2)
    FileStore(tmp_path).open()
    # The young one may be an upload that another replica is taking in.
    assert [path.name for path in tmp_path.glob("*.part")] == ["young.part"]


async def test_full_disk_is_a_refusal_the_worker_can_act_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FileStore(tmp_path)
    files.open()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert await refused(files.receive(chunks(b"data"), max_bytes=10)) == (507, "storage_failed")
    assert list(tmp_path.glob("*.part")) == []


def test_files_folder_is_refused_when_it_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="unusable"):
        FileStore(tmp_path / "file").open()


@pytest.mark.parametrize("prefix", ["", "0x"])
def test_documents_are_found_by_hash(tmp_path: Path, prefix: str) -> None:
    network = Network()
    for pinned, data in network.documents.items():
        (tmp_path / (prefix + pinned.hex())).write_bytes(data)
    loaded = load_documents(tmp_path, network.run.config)
    assert {k: d if isinstance(d, bytes) else d.read_bytes() for k, d in loaded.items()} == (
        network.documents
    )


def test_task_set_in_another_order_is_not_what_is_pinned(tmp_path: Path) -> None:
    network = Network()
    for pinned, data in network.documents.items():
        (tmp_path / pinned.hex()).write_bytes(data)
    path = tmp_path / network.run.config.task_set_hash.hex()
    header, *rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([header, *rows[::-1]]))
    with pytest.raises(ConfigError, match="is not the task set that the chain pins"):
        load_documents(tmp_path, network.run.config)


def test_documents_are_refused_when_missing_or_not_what_is_pinned(tmp_path: Path) -> None:
    network = Network()
    with pytest.raises(ConfigError, match=r"recipe .* is not in"):
        load_documents(tmp_path, network.run.config)
    for pinned in network.documents:
        (tmp_path / pinned.hex()).write_bytes(b"forged")
    with pytest.raises(ConfigError, match="is not the recipe that the chain pins") as caught:
        load_documents(tmp_path, network.run.config)
    assert caught.value.hint


@pytest.fixture(scope="module")
def keystore(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import json

    path = tmp_path_factory.mktemp("keys") / "key.json"
    path.write_text(json.dumps(Account.encrypt(b"\x07" * 32, "secret", kdf="scrypt", iterations=2)))
    return path


async def test_start_is_refused_when_the_key_is_not_the_runs_orchestrator(tmp_path: Path) -> None:
    network = Network()
    network.chain.account = address_of(b"\x01" * 32)
    with pytest.raises(ConfigError, match="as its orchestrator"):
        async with open_bench(tmp_path, network):
            pass
