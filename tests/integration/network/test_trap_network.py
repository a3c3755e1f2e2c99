"""Hidden traps on a real chain: checking validators catch them, lazy ones pay."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import client_network
import pytest
from click.testing import CliRunner
from client_network import TOKEN
from worlds.false_validators import Lazy

from muster.app.cli import muster
from muster.chain import Offence
from muster.client.validator.loop import ValidatorLoop
from muster.protocol.jury import Ruling
from muster.protocol.messages import Verdict
from muster.wallet import save_wallet

LONGER = client_network.PARAMETERS.model_copy(
    update={"challenge_window_s": 60, "vote_commit_s": 300, "vote_reveal_s": 60}
)
STAKE, WORKER_STAKE = 500 * TOKEN, 100 * TOKEN
TRAPPER = client_network.WORKERS[0]
COMMAND = Path(__file__).with_name("trap_command.py")
WORLDS = os.pathsep.join(map(str, COMMAND.parents[1:3]))
"""Path on which the command finds the networks and the tests' worlds."""


def environment_of(network: client_network.Network) -> dict[str, str]:
    return {
        "MUSTER_PASSWORD": "secret",
        "MUSTER_RPC": network.anvil.rpc_url,
        "MUSTER_DEPLOYMENTS": str(network.folder / "deployments"),
    }


async def run(network: client_network.Network, *words: str) -> Any:
    environment = environment_of(network)
    found = await asyncio.to_thread(CliRunner().invoke, muster, words, env=environment)
    assert found.exception is None, found.output
    return found


@asynccontextmanager
async def trapped(
    network: client_network.Network, signers: tuple[type[ValidatorLoop], ...]
) -> AsyncIterator[dict[str, Any]]:
    """Plan traps for every file of a worker; yield the report once one has its outcome."""
    for name, wallet in (("owner", client_network.OWNER), ("trapper", TRAPPER)):
        save_wallet(network.folder / f"{name}.json", wallet.key, "secret", light=True)
    plan = network.folder / "plan.json"
    await run(
        network, "validator", "trap", "plan", "--run", "1", "--worker", TRAPPER.address,
        "--rate", "1", "--last-step", "1000", "--out", str(plan),
        "--keystore", str(network.folder / "owner.json"),
    )  # fmt: skip
    reports: list[dict[str, Any]] = []

    async def is_judged() -> bool:
        view = await network.view()
        if not any(batch.records for batch in view.batches.values()):
            return False
        reports[:] = [json.loads((await report(network, "--json")).stdout)]
        return any(each["fate"] != "honest" for each in reports[0]["traps"])

    mains = (network.validator(number, kind) for number, kind in enumerate(signers))
    async with client_network.running(*mains), trap_worker(network):
        await client_network.eventually(is_judged)
        yield reports[0]


async def start(network: client_network.Network, *, log: Any) -> asyncio.subprocess.Process:
    """Start `muster validator trap run` for a network's first worker, its log in a file."""
    save_wallet(network.folder / "node.json", client_network.NODES[0].key, "secret", light=True)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(COMMAND), "validator", "trap", "run", "--plan", "plan.json"),
        *("--run", "1", "--worker", TRAPPER.address, "--keystore", "node.json"),
        *("--state-dir", "trap", "--orchestrator", network.orchestrator),
        *("--poll-s", "0.05", "--heartbeat-s", "0.5"),
        cwd=network.folder,
        env={**os.environ, **environment_of(network), "PYTHONPATH": WORLDS},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=log,
    )


@asynccontextmanager
async def trap_worker(network: client_network.Network) -> AsyncIterator[None]:
    """Run the trap worker's command until the block ends; it must stop cleanly on SIGTERM."""
    path = network.folder / "trap.log"
    with path.open("w") as log:
        process = await start(network, log=log)
        try:
            yield
        finally:
            process.terminate()
            code = await asyncio.wait_for(process.wait(), 180)
    assert code == 0, path.read_text()
    assert "trap laid" in path.read_text()


async def report(network: client_network.Network, *words: str) -> Any:
    plan, journal = network.folder / "plan.json", network.folder / "trap" / "traps.jsonl"
    return await run(
        network, "validator", "trap", "report", "--plan", str(plan), "--journal", str(journal),
        *words,
    )  # fmt: skip


async def test_validators_that_check_catch_every_trap_and_its_maker_keeps_its_stake(
    tmp_path: Path,
) -> None:
    async with (
        client_network.open_network(tmp_path) as network,
        trapped(network, (ValidatorLoop, ValidatorLoop)) as found,
    ):
        laid = [each for each in found["traps"] if each["fate"] != "honest"]
        assert {each["fate"] for each in laid} == {"caught"}
        assert {each["verdict"] for each in laid} == {"rejected"}
        scores = {who: counts["missed"] for who, counts in found["validators"].items()}
        assert scores == {each.address: 0 for each in client_network.VALIDATORS}
        assert (
            await network.owner.vault.active_stake(network.run_id, TRAPPER.address) == WORKER_STAKE
        )
        text = (await report(network)).stdout
        assert "before every file below" in text
        assert "challenge it" not in text


async def test_who_accepts_a_trap_unread_is_slashed_by_its_maker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with client_network.open_network(tmp_path, LONGER) as network:
        await network.seat_third()
        await network.seat_jurors()
        jurors = client_network.running(
            *(network.juror(number) for number in range(len(client_network.JURORS)))
        )
        async with trapped(network, (Lazy, Lazy, ValidatorLoop)) as found, jurors:
            missed = next(each for each in found["traps"] if each["fate"] == "missed")
            place = missed["submission"]
            assert (
                f"muster dispute open {place} --ruling rejected" in (await report(network)).stdout
            )
            await network.owner.token.faucet(TRAPPER.address, LONGER.bond)
            await run(
                network, "dispute", "open", place, "--ruling", "rejected", "--wait", "--yes",
                "--keystore", "trapper.json", "--orchestrator", network.orchestrator,
            )  # fmt: skip
            after = json.loads((await report(network, "--json")).stdout)
            shown = (await report(network)).stdout
        [trap] = [each for each in after["traps"] if each["submission"] == place]
        lost = STAKE * LONGER.wrong_verdict_ppm // 10**6
        assert trap["fate"] == "overturned"
        assert trap["slashed_wei"] == {
            each.address: str(lost) for each in client_network.VALIDATORS
        }
        for lazy in client_network.VALIDATORS:
            assert f"{lazy.address}  slashed {lost // TOKEN} tokens for accepting {place}" in shown
        await lazy_ones_paid(network)


async def stake_of_trapper(network: client_network.Network) -> int:
    return await network.owner.vault.active_stake(network.run_id, TRAPPER.address)


async def lazy_ones_paid(network: client_network.Network) -> None:
    """Both signers lost stake, and the maker of the trap has its bond and the reporter's share."""
    view = await network.view()
    wrong = [slash for slash in view.slashes if slash.offence is Offence.WRONG_VERDICT]
    assert {slash.owner for slash in wrong} == {each.address for each in client_network.VALIDATORS}
    assert {slash.reporter for slash in wrong} == {TRAPPER.address}
    share = STAKE * LONGER.wrong_verdict_ppm // 10**6 * LONGER.reporter_ppm // 10**6
    held = await network.owner.token.balance_of(TRAPPER.address)
    assert held == LONGER.bond + len(wrong) * share
    assert await stake_of_trapper(network) == WORKER_STAKE
    [case] = view.cases.values()
    ruling = Ruling.of(case.ruling)
    assert ruling is not None
    assert ruling.verdict is Verdict.REJECTED
