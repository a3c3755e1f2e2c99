"""A slash is verified by bare calls: the guide's program, on honest endpoints and on lying ones."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from chain_scenario import CHEATER, TOKEN, Scenario, network, node_of, play
from eth_utils.abi import abi_to_signature
from lying_rpc import endpoint

from muster.chain import save_deployment
from muster.chain.abi import ARTIFACTS, CONTRACTS
from muster.protocol.encoding import keccak

pytestmark = pytest.mark.asyncio(loop_scope="module")

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "slash.md").read_text()
PROGRAM, CAST = (
    re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.M | re.S)[0]
    for language in ("python", "bash")
)
(COMMAND,) = re.findall(r"^```sh\npython3 slash.py (.*)\n```", GUIDE, re.M)


SIGNATURES = {
    abi_to_signature(entry)
    for contract in CONTRACTS
    for entry in json.loads((ARTIFACTS / f"{contract}.json").read_text())["abi"]
    if entry["type"] in ("function", "event")
}
"""All functions and events of the contracts."""


def hash_of(name: str) -> str:
    """Return the selector or topic of the function or event with this unique name."""
    (signature,) = (each for each in SIGNATURES if each.startswith(f"{name}("))
    return keccak(signature.encode()).hex()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def played() -> AsyncIterator[Scenario]:
    async with network() as scenario:
        await play(scenario)
        yield scenario


async def verify(scenario: Scenario, folder: Path, rpc: str) -> subprocess.CompletedProcess[str]:
    """Run the guide's command in an empty folder, with a Python that has nothing installed."""
    (folder / "slash.py").write_text(PROGRAM)
    save_deployment(folder / "contracts" / "deployments", scenario.deployment)
    words = COMMAND.replace("http://127.0.0.1:8545", rpc).split()
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-I", "-S", "slash.py", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


async def test_a_slash_is_verified_by_the_standard_library_alone(
    played: Scenario, tmp_path: Path
) -> None:
    done = await verify(played, tmp_path, played.anvil.rpc_url)
    assert (done.returncode, done.stderr) == (0, "")
    first, *facts, last = done.stdout.splitlines()
    assert first == f"batch 1 position 1: 25 tokens of {CHEATER.address.lower()}"
    assert last == "1 slashes, no contradiction"
    said = dict(fact.split(maxsplit=1) for fact in facts)
    assert said["verdict"] == "recorded 4, reason 31; 4 stands (4 is fraud)"
    assert said["signed"] == "by 2 validators of the run, 2 must"
    assert said["submitted"].endswith(node_of(CHEATER).address.lower())
    assert said["terms"] == "250000 ppm of 100 allow 25"
    assert said["proceeds"] == "20 burned, 5 insured, 0 to a reporter"
    assert list(said) == re.findall(r"^\| (\w+) \| (?!where)", GUIDE, re.M)[-7:]


def word(number: int) -> str:
    return f"{number:064x}"


LIES = {
    "commitment": ("BatchCommitted", word(1800), word(1801)),
    "proof": ("OutcomesPosted", "041f", "041e"),
    "verdict": ("standingOf", word(4), word(1)),
    "signed": ("termsAt", word(2), word(3)),
    "submitted": ("answersFor", word(1), word(0)),
    "terms": ("accountOf", word(100 * TOKEN), word(99 * TOKEN)),
    "proceeds": ("SlashReleased", word(20 * TOKEN), word(19 * TOKEN)),
}
"""By the check that finds it: the subject of the lie, and the bytes that are replaced."""


@pytest.mark.parametrize("question", LIES)
async def test_a_changed_answer_is_named(played: Scenario, tmp_path: Path, question: str) -> None:
    name, old, new = LIES[question]
    mark = hash_of(name)[:8]
    told = []

    def lie(_method: str, params: list[Any], result: Any) -> Any:
        text = json.dumps(result)
        if f"0x{mark}" not in json.dumps(params) or old not in text:
            return result
        told.append(name)
        return json.loads(text.replace(old, new))

    async with endpoint(played.anvil.rpc_url, lie) as lying:
        done = await verify(played, tmp_path, lying)
    assert told
    assert done.returncode == 1
    assert done.stderr.startswith(f"contradiction: {question}: ")


async def test_a_term_that_is_added_later_is_not_taken_for_the_quorum(
    played: Scenario, tmp_path: Path
) -> None:
    mark = f"0x{hash_of('termsAt')[:8]}"

    def longer(_method: str, params: list[Any], result: Any) -> Any:
        return result + word(9) if mark in json.dumps(params) else result

    async with endpoint(played.anvil.rpc_url, longer) as later:
        done = await verify(played, tmp_path, later)
    assert (done.returncode, done.stderr) == (0, "")
    assert "by 2 validators of the run, 2 must" in done.stdout


# cast


def without_outputs(text: str) -> str:
    """Return `name(inputs)` of a signature given to cast, without its outputs."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == ")" and depth == 0:
            return text[: i + 1]
    raise AssertionError(text)


async def test_cast_is_told_signatures_that_the_contracts_have() -> None:
    types = dict(re.findall(r"([A-Z]+)=['\"](\(\S*\))['\"]", CAST))
    told = set()
    for quoted in re.findall(r"['\"](\w+\([^'\"]*\))['\"]", CAST):
        text = quoted
        for _ in types:
            text = re.sub(r"\$([A-Z]+)", lambda found: types[found[1]], text)
        if not text.startswith(("f(", "header(")):
            told.add(without_outputs(text.replace(" indexed", "")))
    assert told <= SIGNATURES
    assert len(told) >= 10


async def test_cast_finds_the_same_where_it_is_installed(played: Scenario, tmp_path: Path) -> None:
    """Without Foundry's cast only the block's bash syntax can be checked."""
    script = CAST.replace("http://127.0.0.1:8545", played.anvil.rpc_url)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    if shutil.which("cast") is None:
        return
    save_deployment(tmp_path / "deployments", played.deployment)
    logs = await played.rpc.call(
        "eth_getLogs", {"fromBlock": "earliest", "topics": ["0x" + hash_of("FraudExecuted")]}
    )
    done = await asyncio.to_thread(
        subprocess.run,
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "TX": logs[0]["transactionHash"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    standing, held, header, node = lines[:4]
    assert re.search(r"\), 0x\w{64}, 4, 31, .*true\)$", standing)
    assert held[:-1] == header[:-1]
    assert node == node_of(CHEATER).address
    assert lines[4] == "true"
    assert [line.split()[1] for line in lines[5:7]] == ["true", "true"]
    assert [line.split()[0] for line in lines[-3:]] == [str(20 * TOKEN), str(5 * TOKEN), "0"]
