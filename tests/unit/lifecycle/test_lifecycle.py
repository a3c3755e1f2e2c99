"""The life of a process: a port, one thread that computes, one error that says why it ended."""

import asyncio
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from muster import lifecycle
from muster.lifecycle import ComputeThread, Proxies, first_error, free_port, usable_cores
from muster.protocol.errors import ConfigError, StorageError


def test_first_error_is_the_one_that_was_raised_on_purpose() -> None:
    meant = StorageError("disk full")
    inner = ExceptionGroup("tasks", [RuntimeError("x"), meant])
    assert first_error(ExceptionGroup("outer", [ValueError("y"), inner])) is meant
    other = ValueError("y")
    assert first_error(ExceptionGroup("outer", [other])) is other


async def test_compute_thread_runs_one_function_at_a_time() -> None:
    compute, running, most = ComputeThread(), 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        running -= 1

    await asyncio.gather(*(compute.run(work) for _ in range(20)))
    compute.close()
    assert most == 1


async def test_compute_thread_passes_errors_on() -> None:
    compute = ComputeThread()

    def work() -> None:
        raise StorageError("disk full")

    with pytest.raises(StorageError, match="disk full"):
        await compute.run(work)
    compute.close()


def test_port_can_be_listened_on_and_is_no_connection_s() -> None:
    port = free_port()
    with socket.socket() as listener, socket.socket() as connection:
        listener.bind(("127.0.0.1", port))
        connection.bind(("127.0.0.1", 0))
        assert 20_000 <= port < connection.getsockname()[1]


def test_taken_port_is_not_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "range").write_text(f"{port + 1}\t60999\n")
    monkeypatch.setattr(lifecycle, "_EPHEMERAL", tmp_path / "range")
    monkeypatch.setattr(lifecycle, "_FIRST_PORT", port)
    assert free_port() == port
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        with pytest.raises(ConfigError, match=f"no port from {port} to {port} was found free"):
            free_port()


def test_same_seed_finds_other_ports() -> None:
    found = set()
    for _ in range(4):
        random.seed(7)
        found.add(free_port())
    assert len(found) > 1


def test_system_that_gives_all_ports_to_connections_has_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "range").write_text("1024\t65535\n")
    monkeypatch.setattr(lifecycle, "_EPHEMERAL", tmp_path / "range")
    assert 20_000 <= free_port() < 65_536


@pytest.mark.parametrize("said", ["", "none", None])
def test_system_that_says_nothing_has_the_usual_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str | None
) -> None:
    if said is not None:
        (tmp_path / "range").write_text(said)
    monkeypatch.setattr(lifecycle, "_EPHEMERAL", tmp_path / "range")
    assert 20_000 <= free_port() < 32_768


@pytest.mark.parametrize(("before_mb", "then_mb"), [(None, 256), (512, 256), (256, 512)])
def test_memory_is_bounded_by_the_lower_of_two_limits(before_mb: int | None, then_mb: int) -> None:
    """In a process of its own: a limit once set cannot be undone."""
    program = f"""
import resource
from muster.lifecycle import limit_memory
before = {before_mb}
if before:
    resource.setrlimit(resource.RLIMIT_AS, (before << 20, before << 20))
limit_memory({then_mb} << 20)
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
assert len(bytearray(32 << 20))
try:
    bytearray(400 << 20)
except MemoryError:
    print("bounded")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("bounded\n", "")


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "connections", "then_soft"),
    [
        (256, 4096, 1000, 1000, 2200),
        (3000, 4096, 1000, 1000, 3000),
        (256, 1200, 1000, 500, 1200),
        (100, 100, 1000, 1, 100),
    ],
)
def test_connections_are_those_that_the_system_has_files_for(
    soft: int, hard: int, wanted: int, connections: int, then_soft: int
) -> None:
    """In a process of its own: it lowers the hard limit."""
    program = f"""
import resource
from muster.lifecycle import most_connections
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(most_connections({wanted}, files_each=2), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"{connections} {then_soft} {hard}\n"


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "9900000 100000"}, 8),
        ("0::/", {"cpu.max": "nonsense"}, 8),
        ("0::/a.slice/b", {"a.slice/cpu.max": "300000 100000", "a.slice/b/cpu.max": "max 1"}, 3),
        ("0::/of/the/host", {"cpu.max": "300000 100000"}, 3),
        ("0::/a", {"b/cpu.max": "100000 100000"}, 8),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("4:cpuacct,cpu:/a", {"cpu/a/cpu.cfs_quota_us": "5", "cpu/a/cpu.cfs_period_us": "2"}, 2),
        ("4:cpuset:/a", {"cpu/a/cpu.cfs_quota_us": "5", "cpu/a/cpu.cfs_period_us": "2"}, 8),
    ],
)
def test_usable_cores_are_within_affinity_and_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(lifecycle.os, "sched_getaffinity", lambda _: range(8))
    own = tmp_path / "own"
    assert usable_cores(tmp_path, own) == 8
    own.write_text(f"9:name=systemd:/\n{group}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_cores(tmp_path, own) == cores


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.7", "1.2.3.4", "1.2.3.4"),
        ("10.0.0.7", "6.6.6.6, 1.2.3.4", "1.2.3.4"),
        ("10.1.2.3", "6.6.6.6,1.2.3.4 , 10.0.0.7", "1.2.3.4"),
        ("10.0.0.7", "", "10.0.0.7"),
        ("10.0.0.7", "10.1.0.1", "10.1.0.1"),
        ("10.0.0.8", "1.2.3.4", "10.0.0.8"),
        ("", "1.2.3.4", ""),
    ],
)
def test_client_behind_proxies_is_the_last_address_that_is_none(
    peer: str, forwarded: str, client: str
) -> None:
    assert Proxies("10.0.0.7, 10.1.0.0/16").client_of(peer, forwarded) == client


def test_proxies_are_addresses_and_networks() -> None:
    with pytest.raises(ConfigError, match="trusted_proxies"):
        Proxies("nginx.example.org")
    assert "10.0.0.7" not in Proxies()
