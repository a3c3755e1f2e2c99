"""The auditor's guide is true: every command of it is run, in order, on a judged network."""

import asyncio
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from client_network import WORKERS, Network, eventually, open_network, running

from muster.app.cli import muster
from muster.protocol.ids import PolicyVersion
from muster.wallet import save_wallet

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "audit.md"
SAYS = {
    "muster audit run 1": "no contradiction in",
    "muster audit worker": "submitted",
    "muster audit submission": "outcomes_root",
    "--prove chain": "shows the same history",
    "--since": "history is as run-1.dump.gz has it",
    "--sample": "outcomes agree, 0 contradict",
    "--all": "outcomes agree, 0 contradict",
    "--call-timeout-s": "outcomes have the word of the validators that the schedule called",
    "--all --orchestrator": "signers of accepted outcomes had recomputed them",
    "muster audit verify": "agree",
    "muster audit lineage": "base model",
}
"""Output that some of the commands must print."""


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line]


async def judge_two(network: Network) -> None:
    """Let a worker work until two batches are judged."""

    async def are_judged() -> bool:
        batches = (await network.view()).batches.values()
        return sum(bool(batch.records) for batch in batches) >= 2

    async with running(network.worker(0), network.validator(0), network.validator(1)):
        await eventually(are_judged)


@pytest.mark.usefixtures("hash_engine")
async def test_every_command_of_the_guide_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_network(tmp_path) as network:
        await judge_two(network)
        await network.publish_step(PolicyVersion(1), 0, 1)
        port = network.anvil.rpc_url.rpartition(":")[2]
        auditor = tmp_path / "auditor"
        for name in ("deployments", "files", "documents"):
            shutil.copytree(tmp_path / name, auditor / name)
        first = next(iter((await network.view()).batches[1].records or ()))
        (file,) = auditor.glob(f"files/**/{first.file_hash.hex()}*.parquet")
        keystore = auditor / "me.json"
        save_wallet(keystore, WORKERS[1].key, "secret", light=True)
        named = {
            "$FILE": str(file),
            **{"$WORKER": WORKERS[0].address, "$ORIGIN": network.origin},
            **{"$ORCHESTRATOR": network.orchestrator, ":8545": f":{port}"},
            "$KEYSTORE": str(keystore),
        }
        monkeypatch.chdir(auditor)
        environment = {
            "MUSTER_RPC": network.anvil.rpc_url,
            "MUSTER_DEPLOYMENTS": "deployments",
            "HOME": str(auditor / "home"),
            "MUSTER_PASSWORD": "secret",
        }
        lines = commands()
        assert len(lines) >= 20
        for line in lines:
            words = line
            for name, value in named.items():
                words = words.replace(name, value)
            result: Result = await asyncio.to_thread(
                CliRunner().invoke, muster, shlex.split(words)[1:], env=environment
            )
            assert result.exit_code == 0, (line, result.output, result.exception)
            for start, text in SAYS.items():
                assert text in result.stdout or start not in line, (line, result.stdout)
    assert {p.suffix for p in (auditor / "tables").iterdir()} == {".csv", ".parquet"}
