"""The whole network, every part real, every process separate: short stories with known endings."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from muster.devnet.demo import settle, start, train
from muster.devnet.display import Progress
from muster.devnet.facts import gather_facts
from muster.devnet.keys import cast
from muster.devnet.network import Network, NetworkOptions
from muster.devnet.report import build_report

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "demo.toml"
LEARNED = {"the policy learned"}
"""Three steps are too few for this promise; all others must hold."""
STORY_TIMEOUT_S = 300


@pytest.fixture
def _at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def options(folder: Path, *cheats: str) -> NetworkOptions:
    return NetworkOptions(
        folder=folder / "net",
        deployments=folder / "deployments",
        cast=cast(3, honest=1, cheats=cheats),
        recipe=RECIPE,
        steps=3,
        seed=3,
        rpc_port=0,
    )


@pytest.mark.usefixtures("_at_root")
async def test_network_keeps_its_promises_when_the_orchestrator_loses_its_database(
    tmp_path: Path,
) -> None:
    began = time.monotonic()
    async with (
        asyncio.timeout(STORY_TIMEOUT_S),
        Network(options(tmp_path, "forged-reward", "constant-proof")) as network,
    ):
        with Progress(Console(file=io.StringIO()), {}) as progress:
            run_id = await start(network, progress)
            await _first_outcome(network)
            await _lose_database(network)
            await network.start_orchestrator(run_id)
            returned_at = await train(network, run_id, progress)
            await settle(network, run_id, progress)
            facts = await gather_facts(network, run_id, 3, began, returned_at)
    report = build_report(facts)
    assert {c["name"] for c in report["checks"] if not c["passed"]} <= LEARNED
    assert {slash["reason"] for slash in report["slashes"]} == {"wrong_reward", "toploc_mismatch"}


async def _first_outcome(network: Network) -> None:
    from muster.chain import ChainView
    from muster.client.rewards import read_view

    async with await network.connect() as chain:
        while not any(b.records for b in (await read_view(chain, ChainView())).batches.values()):
            await asyncio.sleep(0.2)


async def _lose_database(network: Network) -> None:
    orchestrator = network.processes.children["orchestrator"]
    orchestrator.kill()
    await orchestrator.wait()
    for path in network.database.parent.glob(f"{network.database.name}*"):
        path.unlink()


def test_demo_stays_up_is_audited_and_leaves_no_process_behind(tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    command = [
        sys.executable,
        "-m",
        "muster.devnet",
        "demo",
        "--keep",
        "--steps",
        "2",
        "--port",
        "0",
    ]
    command += ["--honest", "1", "--out", str(tmp_path / "net")]
    command += ["--deployments", str(tmp_path / "deployments")]
    with output.open("w") as stream:
        demo = subprocess.Popen(
            command, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        report = _wait_for_report(demo, tmp_path / "net" / "report.json", output)
        audit = _audit(report)
        assert all(check["passed"] for check in audit["checks"])
        assert len(audit["workers"]) == len(report["workers"]) == 3
    finally:
        family = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        code = demo.wait(timeout=30)
    assert code == 130
    assert len(family) >= 5
    assert psutil.wait_procs(family, timeout=20)[1] == []


def _wait_for_report(demo: subprocess.Popen[bytes], path: Path, output: Path) -> dict[str, Any]:
    deadline = time.monotonic() + STORY_TIMEOUT_S
    while "stays up" not in output.read_text():
        assert demo.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def _audit(report: dict[str, Any]) -> dict[str, Any]:
    chain = report["chain"]
    command = [sys.executable, "-m", "muster.devnet", "audit", "--json", "--rpc", chain["rpc"]]
    command += ["--deployments", str(Path(chain["deployments"]).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    audit: dict[str, Any] = json.loads(done.stdout)
    return audit
