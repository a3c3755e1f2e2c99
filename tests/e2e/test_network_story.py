"""The whole network, every part real, every process separate: short stories with known endings."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path

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
    from muster.chain import ChainView, read_view

    async with await network.connect() as chain:
        while not any(b.records for b in (await read_view(chain, ChainView())).batches.values()):
            await asyncio.sleep(0.2)


async def _lose_database(network: Network) -> None:
    orchestrator = network.processes.children["orchestrator"]
    orchestrator.kill()
    await orchestrator.wait()
    for path in network.database.parent.glob(f"{network.database.name}*"):
        path.unlink()
