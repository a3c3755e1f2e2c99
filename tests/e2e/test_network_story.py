"""The whole network, every part real, every process separate: short stories with known endings."""

import asyncio
import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from muster.app.cli import muster
from muster.app.demo.display import DemoDisplay
from muster.app.demo.keys import cast
from muster.app.demo.local_network import Network, NetworkOptions
from muster.app.demo.observations import observe
from muster.app.demo.report import build_report
from muster.app.demo.story import keep_open, settle, start, take_model, train

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "configs" / "demo.toml"
LEARNED = {"the policy learned"}
"""Three steps are too few for this promise; all others must hold."""
FIRST_PAY = ROOT / "docs" / "guides" / "first-pay.md"
FIVE = ["init", "doctor", "stake", "worker", "rewards"]
"""The contributor's commands, in order, until it is paid."""
GUIDES = {ROOT / "docs" / "guides" / "model.md": 5, ROOT / "docs" / "guides" / "data.md": 3}
"""Guides to a run's model and data, in the order in which they are walked, with their commands."""
SAYS = {
    "model fetch": "next     muster model chat model",
    "model chat": "\n",
    "model verify": "is run 1 version 3, as published on chain 31337",
    "audit lineage": "no contradictions",
    "data export": "next         muster data verify traces",
    "data verify": "ok   outcomes: ",
}
"""Output that the guides' commands must print."""
STORY_TIMEOUT_S = 1200


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
        with DemoDisplay(Console(file=io.StringIO()), {}) as progress:
            run_id = await start(network, progress)
            await _first_outcome(network)
            await _lose_database(network)
            await network.start_orchestrator(run_id)
            returned_at = await train(network, run_id, progress)
            await settle(network, run_id, progress)
            await take_model(network, run_id, progress)
            await _walk_guides(network, tmp_path)
            await _validators_end(network)
            observed = await observe(network, run_id, 3, began, returned_at)
        await _stranger_earns(network, tmp_path)
    report = build_report(observed)
    assert (tmp_path / "net" / "trained-model" / "README.md").read_text().startswith("---")
    assert {c["name"] for c in report["checks"] if not c["passed"]} <= LEARNED
    assert {slash["reason"] for slash in report["slashes"]} == {"wrong_reward", "toploc_mismatch"}


async def _walk_guides(network: Network, folder: Path) -> None:
    """Run every command of the guides in a folder of their own."""
    (folder / "walk").mkdir()
    environment = {
        "MUSTER_RPC": network.rpc,
        "MUSTER_DEPLOYMENTS": str(folder / "deployments"),
        "HOME": str(folder / "home"),
    }
    lines = []
    for guide, commands in GUIDES.items():
        blocks = re.findall(r"^```sh\n(.*?)^```", guide.read_text(), re.M | re.S)
        found = "".join(blocks).splitlines()
        assert len(found) == commands
        lines += found
    with contextlib.chdir(folder / "walk"):
        for line in lines:
            words = shlex.split(line.replace("http://127.0.0.1:8600", network.orchestrator_url))
            given = await asyncio.to_thread(CliRunner().invoke, muster, words[1:], env=environment)
            assert given.exit_code == 0, (line, given.output, given.exception)
            assert SAYS[words[1] + " " + words[2]] in given.stdout, (line, given.output)


async def _stranger_earns(network: Network, folder: Path) -> None:
    """Keep the network open, and join it from elsewhere: by one line, and by five commands."""
    said = io.StringIO()
    keeping = asyncio.create_task(keep_open(network, Console(file=said, width=80)))
    try:
        while " devnet join " not in said.getvalue():
            await asyncio.wait([keeping], timeout=0.2)
            assert not keeping.done(), keeping.result()
        [line] = [line for line in said.getvalue().splitlines() if " devnet join " in line]
        async with asyncio.TaskGroup() as strangers:
            strangers.create_task(_join(line, folder))
            strangers.create_task(_walk_first_pay(network, folder / "contributor"))
        assert not keeping.done()
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


async def _join(line: str, folder: Path) -> None:
    """Work with the one line until something is accepted."""
    main = [sys.executable, "-c", "from muster.app.cli import main; main()"]
    joining = await asyncio.create_subprocess_exec(
        *main,
        *shlex.split(line)[1:],
        env={**os.environ, "HOME": str(folder / "stranger")},
        cwd=folder / "walk",
        stderr=asyncio.subprocess.PIPE,
    )
    assert joining.stderr is not None
    output = b""
    while b"submission accepted" not in output:
        output += (read := await joining.stderr.readline())
        assert read, output.decode()
    joining.terminate()
    await joining.communicate()
    assert b"joined run 2, with 1000 test tokens" in output
    assert joining.returncode == 0


async def _walk_first_pay(network: Network, folder: Path) -> None:
    """Run the five commands of a contributor, in a folder with only the addresses."""
    shutil.copytree(network.options.deployments, folder / "deployments")
    blocks = re.findall(r"^( *)```sh\n(.*?)^\1```", FIRST_PAY.read_text(), re.M | re.S)
    script = "".join(textwrap.dedent(block) for _, block in blocks)
    assert re.findall(r"^(?:until )?muster (\w+)", script, re.M) == FIVE
    for old, new in (
        ("http://127.0.0.1:8545", network.rpc),
        ("http://127.0.0.1:8600", network.orchestrator_url),
    ):
        assert old in script
        script = script.replace(old, new)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = await asyncio.create_subprocess_exec(
        *("bash", "-euo", "pipefail", "-c", script + "kill %1; wait %1"),
        cwd=folder,
        env={**os.environ, "PATH": programs, "HOME": str(folder / "home")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, errors = await given.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(given.pid, signal.SIGTERM)
    assert given.returncode == 0, (output.decode(), errors.decode())
    assert "\nfit\n" in output.decode()
    paid = re.search(r"^claimed +([0-9.]+) tokens", output.decode(), re.M)
    assert paid, output.decode()
    assert float(paid[1]) > 0


async def _validators_end(network: Network) -> None:
    for name in ("validator-1", "validator-2"):
        child = network.processes.children[name]
        assert await child.wait() == 0
        assert "run complete" in child.log_tail(1)


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
