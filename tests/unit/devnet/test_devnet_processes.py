"""Child processes: they are ready or reported, and none is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from muster.devnet.processes import Processes
from muster.protocol.errors import ConfigError

SERVER = """
import pathlib, sys, time
pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1]).write_text("http://here\\n")
time.sleep(60)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    for name, text in {
        "server": SERVER,
        "stubborn": STUBBORN,
        "broken": "raise SystemExit('why')",
    }.items():
        (tmp_path / f"{name}_script.py").write_text(text)
    return tmp_path


def processes(folder: Path) -> Processes:
    return Processes(folder / "logs", {"PYTHONPATH": str(folder)})


async def test_a_server_is_ready_with_its_url_and_gone_afterwards(scripts: Path) -> None:
    async with processes(scripts) as running:
        url = await running.start_server("s", ["server_script"], scripts / "ready")
        pid = running.children["s"].pid
        assert url == "http://here"
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)


async def test_a_server_that_fails_is_reported_with_its_log(scripts: Path) -> None:
    async with processes(scripts) as running:
        with pytest.raises(ConfigError, match="exit code 1:\nwhy"):
            await running.start_server("b", ["broken_script"], scripts / "ready")


async def test_children_end_even_when_the_body_fails(scripts: Path) -> None:
    running = processes(scripts)
    with pytest.raises(RuntimeError, match="body"):
        await _start_and_fail(running, scripts)
    assert running.children["s"].exit_code is not None


async def test_a_stubborn_child_is_killed(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.devnet.processes.STOP_TIMEOUT_S", 0.2)
    async with processes(scripts) as running:
        child = await running.start("x", ["stubborn_script"])
        async with asyncio.timeout(20):
            while b"stubborn" not in Path(f"/proc/{child.pid}/cmdline").read_bytes():
                await asyncio.sleep(0.01)
    assert child.exit_code is not None


async def test_killed_children_report_the_signal(scripts: Path) -> None:
    async with processes(scripts) as running:
        child = await running.start("x", ["stubborn_script"])
        child.kill()
        assert await child.wait() == -9
        with pytest.raises(ConfigError, match="exit code -9"):
            running.require_running(child)


async def _start_and_fail(running: Processes, folder: Path) -> None:
    async with running:
        await running.start("s", ["server_script", "--ready-file", str(folder / "r")])
        raise RuntimeError("body")
