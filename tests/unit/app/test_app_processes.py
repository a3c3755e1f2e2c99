"""Child processes: each becomes ready or is reported, and none is left behind."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from muster.app.demo import processes as children
from muster.app.demo.processes import DemoProcess, Processes
from muster.protocol.errors import ConfigError

SERVER = """
import pathlib, sys, time
ready = pathlib.Path(sys.argv[sys.argv.index("--ready-file") + 1])
fresh = ready.with_suffix(".tmp")
fresh.write_text("http://here\\n")
fresh.rename(ready)
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
    monkeypatch.setattr("muster.app.demo.processes.STOP_TIMEOUT_S", 0.2)
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


# Warm


TOLD = "import os, sys; print(sys.argv[1:], os.environ['TOLD'], 'antigravity' in sys.modules)"


@pytest.fixture
def warm_scripts(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts for forked processes; the process they fork from imports no model library."""
    (scripts / "told_script.py").write_text(TOLD)
    (scripts / "asleep_script.py").write_text(
        "import time; print('up', flush=True); time.sleep(60)"
    )
    monkeypatch.syspath_prepend(str(scripts))
    monkeypatch.setattr(children, "PRELOADED", ("colorsys",))
    return scripts


async def up(child: DemoProcess) -> DemoProcess:
    async with asyncio.timeout(20):
        while "up" not in child.log_tail():
            await asyncio.sleep(0.01)
    return child


async def test_a_warm_child_is_its_command_line_with_its_environment_and_log(
    warm_scripts: Path,
) -> None:
    async with Processes(warm_scripts / "logs", {"TOLD": "secret"}) as running:
        for number in range(2):
            child = await running.start_warm("t", ["told_script", str(number)])
            assert await child.wait() == 0
    lines = child.log.read_text().splitlines()
    assert lines == ["['0'] secret False", "['1'] secret False"]


async def test_a_warm_child_reports_how_it_ended(warm_scripts: Path) -> None:
    async with processes(warm_scripts) as running:
        broken = await running.start_warm("b", ["broken_script"])
        killed = await up(await running.start_warm("k", ["asleep_script"]))
        stopped = await up(await running.start_warm("s", ["asleep_script"]))
        killed.kill()
        await stopped.stop()
        assert [await child.wait() for child in (broken, killed, stopped)] == [1, -9, -15]
        assert broken.log_tail() == "why"
        with pytest.raises(ConfigError, match="exit code -9"):
            running.require_running(killed)


async def test_no_warm_child_stays_behind(warm_scripts: Path) -> None:
    async with processes(warm_scripts) as running:
        child = await up(await running.start_warm("s", ["asleep_script"]))
        assert child.exit_code is None
        assert psutil.Process(child.pid).status() == psutil.STATUS_SLEEPING
    assert child.exit_code == -15
    assert not psutil.pid_exists(child.pid)


def test_warm_children_end_with_the_process_that_started_them(warm_scripts: Path) -> None:
    program = f"""
import asyncio
import os
import subprocess
import sys
from pathlib import Path
from muster.app.demo import processes
from muster.app.demo.processes import Processes
processes.PRELOADED = ()
async def start():
    running = Processes(Path({str(warm_scripts)!r}) / "logs", {{}})
    async with running:
        child = await running.start_warm("s", ["asleep_script"])
        print(child.pid, flush=True)
        await asyncio.sleep(60)
asyncio.run(start())
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(warm_scripts)},
    )
    with parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        psutil.wait_procs([child], timeout=20)
    assert not child.is_running()


def test_a_process_ends_though_it_left_warm_children_behind(warm_scripts: Path) -> None:
    program = f"""
import asyncio
from pathlib import Path
from muster.app.demo import processes
processes.PRELOADED = ()
async def start():
    log = Path({str(warm_scripts)!r}) / "log"
    child = await processes.WarmProcess.start(["asleep_script"], log, {{}})
    print(child.pid, flush=True)
    input()
asyncio.run(start())
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(warm_scripts)},
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        print(file=parent.stdin, flush=True)
        try:
            assert parent.wait(20) == 0
        finally:
            parent.kill()
        psutil.wait_procs([child], timeout=20)
    assert not child.is_running()


async def _start_and_fail(running: Processes, folder: Path) -> None:
    async with running:
        await running.start("s", ["server_script", "--ready-file", str(folder / "r")])
        raise RuntimeError("body")
