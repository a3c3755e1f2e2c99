"""The guide to RPC endpoints is true: its commands are run, and its words are those of the code."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from chain_scenario import network
from click.testing import CliRunner, Result

from muster.app.cli import muster
from muster.chain import save_deployment
from muster.lab.endpoints.faults import PROFILES
from muster.settings.profiles import NetworkProfile, announced, read_profiles

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "guides" / "endpoints.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE, re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line]


async def test_commands_of_the_guide_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    async with network() as net:
        folder = tmp_path / "contracts" / "deployments"
        save_deployment(folder, net.deployment)
        here = NetworkProfile(chain_id=31337, rpc=(net.anvil.rpc_url,), deployments=folder)
        port = net.anvil.rpc_url.rpartition(":")[2]
        lines = [line for line in commands() if line.startswith("muster ")]
        assert len(lines) == 9
        with announced(environment) as devnet:
            devnet.tell(here)
            for line in lines:
                words = shlex.split(line.replace(":8545", f":{port}"), comments=True)
                result: Result = await asyncio.to_thread(
                    CliRunner().invoke, muster, words[1:], env=environment
                )
                assert result.exit_code == 0, (line, result.output, result.exception)
                lists = words[1:3] == ["run", "list"]
                assert not lists or re.search(rf"^ *{net.run_id} ", result.stdout, re.M)


def test_the_guides_profile_is_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", GUIDE, re.M | re.S)
    file = tmp_path / "muster" / "config.toml"
    file.parent.mkdir()
    file.write_text(text)
    known = read_profiles({"XDG_CONFIG_HOME": str(tmp_path)})
    assert known.networks[known.current or ""].served(1).orchestrator


@pytest.mark.slow
def test_the_demo_keeps_its_promises_through_a_public_endpoint(tmp_path: Path) -> None:
    """Some minutes: ten confirmations of everything."""
    (demo,) = (line for line in commands() if line.startswith("python "))
    words = [sys.executable, *shlex.split(demo)[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout
    # Whether the killed worker came back is asked only if steps were left.
    assert len(re.findall(r"^kept ", done.stdout, re.M)) in (10, 11)
    assert re.search(r"^ *reorganisations +[1-9]", done.stdout, re.M)


def test_what_the_guide_says_of_the_endpoint_is_what_it_does() -> None:
    faults = PROFILES["public"]
    assert faults.most_blocks == 500
    assert faults.most_calls == 10
    assert faults.most_lag == 3
    assert f"1 to {faults.deepest} blocks taken back every {faults.reorg_every_s:g}" in GUIDE


def test_figures_of_the_guide_are_the_measured_ones() -> None:
    path = ROOT / "benchmarks" / "results" / "rpc_faults.json"
    measured = json.loads(path.read_text())["detail"]
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", GUIDE, re.M)
    assert len(rows) == len(measured)
    for (name, deposits, sender, follower), seen in zip(rows, measured.values(), strict=True):
        said = (int(deposits), float(sender), float(follower))
        still = (seen["sender_still_s"], seen["follower_still_s"])
        assert said == (seen["followed"], *(round(s, 1) for s in still)), name
