"""A whole small network whose engines and trainer compute on a device, and `muster doctor` for it.

Every process is real: these are the demo's processes, and environment variables tell them where to
compute, as `--device` would. The calibration is the CPU's, so a GPU's different results must stay
within limits that were not measured on a GPU.

* doctor, `gpu_doctor_failed`: number of checks of `muster doctor --device` that fail.
* network, `gpu_network_rejected`: number of submissions of an honest worker that are not accepted
  before the trainer has taken all its steps.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.gpu.setup import Figures, Missing, Setup

from muster.app.demo.keys import DemoWorker, Role, cast
from muster.app.demo.local_network import MUSTER, Network, NetworkOptions
from muster.chain import ChainView, read_view
from muster.protocol.ids import RunId
from muster.protocol.messages import Verdict

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "demo.toml"
LOOK_S = 0.2
PROCESSES = ("WORKER", "VALIDATOR", "TRAINER", "JUROR")


@asynccontextmanager
async def open_network(setup: Setup, steps: int) -> AsyncIterator[tuple[Network, RunId]]:
    """Yield a network and its run, without workers."""
    if not list((ROOT / "node_modules" / "@foundry-rs").glob("*anvil*")):
        raise Missing("Anvil is not installed: make setup")
    people = cast(0, honest=0, cheats=(), validators=1, jurors=0)
    environment = {f"MUSTER_{name}_DEVICE": setup.device for name in PROCESSES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = NetworkOptions(
            folder, folder / "deployments", people, RECIPE, steps, 0, rpc_port=0, problems=256
        )
        async with Network(options, environment=environment) as network:
            run_id = await network.begin()
            yield network, run_id


def measure_doctor(setup: Setup) -> Figures:
    """Ask `muster doctor` about the device."""
    lines = asyncio.run(_doctor(setup))
    failed = [line for line in lines if line["state"] == "fail"]
    return {"gpu_doctor_failed": float(len(failed))}, {"lines": lines}


async def _doctor(setup: Setup) -> list[dict[str, Any]]:
    async with open_network(setup, steps=1) as (network, run_id):
        for url in (network.orchestrator_url, network.relay_url, network._url("origin")):
            await _until_up(url)
        child = await network.processes.start(
            "doctor",
            [
                *(MUSTER, "doctor", "--run", str(run_id), "--json", "--device", setup.device),
                *("--orchestrator", network.orchestrator_url, "--rpc", network.rpc),
                *("--deployments", str(network.options.deployments)),
                *("--state-dir", str(network.folder / "state" / "doctor")),
            ],
        )
        await child.wait()
        said = child.log.read_text()
    found: list[dict[str, Any]] = json.loads(said.splitlines()[-1])["lines"]
    return found


async def _until_up(url: str) -> None:
    """Return once a server listens at the URL."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        except OSError:
            await asyncio.sleep(LOOK_S)
        else:
            writer.close()
            return await writer.wait_closed()


def measure_network(setup: Setup) -> Figures:
    """Let one worker generate everything that some training steps need."""
    return asyncio.run(_network(setup, steps=setup.pick(1, 3)))


async def _network(setup: Setup, steps: int) -> Figures:
    async with open_network(setup, steps) as (network, run_id):
        verdicts = await run_to_the_end(network, run_id)
    others = [verdict.name for verdict in verdicts if verdict is not Verdict.ACCEPTED]
    metrics = {
        "gpu_network_accepted": float(len(verdicts) - len(others)),
        "gpu_network_rejected": float(len(others)),
    }
    return metrics, {"steps": steps, "others": others}


async def run_to_the_end(network: Network, run_id: RunId) -> list[Verdict]:
    """Let the one worker of a network generate everything that training needs; return the
    verdicts."""
    (member,) = network.cast.members
    assert member.role is Role.RESTARTED
    await network.start_worker(run_id, member)
    trainer = network.processes.children["trainer"]
    while trainer.exit_code is None:
        for child in network.processes.children.values():
            # Finished processes exit with 0; the worker ends before the trainer.
            if child.exit_code:
                network.processes.require_running(child)
        await asyncio.sleep(LOOK_S)
    if trainer.exit_code:
        network.processes.require_running(trainer)
    async with await network.connect() as chain:
        return _verdicts(await read_view(chain, ChainView()), member)


def _verdicts(view: ChainView, member: DemoWorker) -> list[Verdict]:
    worker_id = view.workers[member.wallet.address].worker_id
    return [
        record.verdict
        for batch in view.batches.values()
        for record in batch.records or ()
        if record.worker_id == worker_id
    ]
