"""`muster contracts` on Anvil: one deployment whatever happens, and only its own code passes."""

import asyncio
import contextlib
import json
import os
import random
import re
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from muster.app.anvil import Anvil
from muster.app.cli import muster
from muster.chain import Chain, load_deployment
from muster.chain.rpc import Rpc
from muster.client.deployed import (
    code_of,
    first_difference,
    parameters_in,
    plan_of,
    require_minted,
    require_planned_addresses,
)
from muster.client.network_file import estimate, read_network
from muster.deploy import DeployParameters, DeployPlan, deploy_contracts
from muster.deploy.plan import STEPS
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ChainError, ConfigError, MusterError
from muster.protocol.ids import to_address
from muster.wallet import save_wallet

ROOT = Path(__file__).parents[3]
ACCOUNT = address_of(Anvil.key(0))
SAFE = to_address(b"\x5a" * 20)
PASSWORD = "right"
NETWORK = """
name = "test"
profile = "testnet"
chain_id = 31338

[parameters]
challenge_window_s = "3 h"
"""


class Deployer:
    """Runs `muster contracts` in a folder with a keystore."""

    def __init__(self, folder: Path, rpc_url: str) -> None:
        self.folder, self.deployments = folder, folder / "deployments"
        self._rpc_url = rpc_url
        save_wallet(folder / "owner.json", Anvil.key(0), PASSWORD, light=True)
        (folder / "network.toml").write_text(NETWORK)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "MUSTER_PASSWORD": PASSWORD,
            "MUSTER_RPC": self._rpc_url,
            "MUSTER_DEPLOYMENTS": str(self.deployments),
        }

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        """Start the command as a process of its own."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "muster.app", "contracts", *words),
            cwd=self.folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **self.environment},
        )

    async def run(self, *words: str) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr, including the error."""
        with contextlib.chdir(self.folder):
            done = await asyncio.to_thread(
                CliRunner().invoke, muster, ["contracts", *words], env=self.environment
            )
        error = "" if isinstance(done.exception, SystemExit | None) else str(done.exception)
        assert not error or isinstance(done.exception, MusterError), done.output
        return done.exit_code, done.stdout, done.stderr + error

    async def json(self, *words: str) -> Any:
        code, out, err = await self.run(*words, "--json")
        assert code == 0, err
        return json.loads(out)


async def costs_are_said(process: asyncio.subprocess.Process) -> None:
    """Wait until a deployment is about to send."""
    assert process.stderr is not None
    while line := await process.stderr.readline():
        if line.startswith(b"base fee"):
            return


DEPLOY = ("deploy", "network.toml", "--keystore", "owner.json", "--yes")


@pytest.fixture
async def anvil() -> AsyncIterator[Anvil]:
    async with Anvil(arguments=("--chain-id", "31338")) as running:
        yield running


@pytest.fixture
async def deployed(anvil: Anvil, tmp_path: Path) -> AsyncIterator[Chain]:
    parameters = DeployParameters(insurance=SAFE, jail_time_s=61)
    await deploy_contracts(anvil.rpc_url, Anvil.key(0), parameters, deployments=tmp_path)
    async with await Chain.connect(anvil.rpc_url, tmp_path) as chain:
        yield chain


async def sent_by(rpc: Rpc) -> list[Mapping[str, Any]]:
    """Return every transaction of the account on chain, in order."""
    head = int(await rpc.call("eth_blockNumber"), 16)
    blocks = [await rpc.call("eth_getBlockByNumber", hex(n), True) for n in range(head + 1)]
    return [tx for block in blocks for tx in block["transactions"] if tx["from"] == ACCOUNT.lower()]


# ------------------------------------------------------------------------- killed


@pytest.mark.parametrize(
    ("kills", "block_s"), [(4, 1), pytest.param(20, 2, marks=pytest.mark.slow)]
)
async def test_deployment_that_is_killed_again_and_again_is_made_once(
    tmp_path: Path, kills: int, block_s: int
) -> None:
    moments = random.Random(kills)
    # Blocks at intervals only, with EIP-1559 fees: transactions wait to be mined.
    blocks = ("--chain-id", "31338", "--base-fee", "1000000000")
    async with (
        Anvil(block_time_s=block_s, arguments=blocks, instant=False) as anvil,
        Rpc(anvil.rpc_url) as rpc,
    ):
        deployer = Deployer(tmp_path, anvil.rpc_url)
        in_the_middle = 0
        for life in range(kills):
            process = await deployer.start(*DEPLOY)
            if life % 2 == 0:
                await costs_are_said(process)
            if life == 0:
                # The factory is there, nine contracts are not.
                assert process.stderr is not None
                await process.stderr.readline()
            await asyncio.sleep(moments.uniform(0, 0.6 * block_s))
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
            in_the_middle += 0 < len(await sent_by(rpc)) < len(STEPS)
        assert in_the_middle > 0
        made = await deployer.json(*DEPLOY)
        sent = await sent_by(rpc)
        assert [int(tx["nonce"], 16) for tx in sent] == list(range(len(STEPS)))
        assert len({tx["input"] for tx in sent}) == len(STEPS)
        plan = read_network(tmp_path / "network.toml").plan(ACCOUNT)
        assert made["contracts"] == {n: plan.addresses[n] for n in made["contracts"]}
        pending = await rpc.call("eth_getTransactionCount", ACCOUNT, "pending")
        assert int(pending, 16) == len(STEPS)
        await deployer.json("verify", "network.toml")
    print(f"{kills} kills, {in_the_middle} in the middle: {len(sent)} transactions")  # noqa: T201


async def test_deployment_goes_on_without_its_journal(tmp_path: Path, anvil: Anvil) -> None:
    deployer = Deployer(tmp_path, anvil.rpc_url)
    first = await deployer.json(*DEPLOY)
    for path in deployer.deployments.iterdir():
        path.unlink()
    assert await deployer.json(*DEPLOY) == first
    async with Rpc(anvil.rpc_url) as rpc:
        assert len(await sent_by(rpc)) == len(STEPS)


# ----------------------------------------------------------------------- deploying


async def test_dry_run_says_what_it_will_cost_and_sends_nothing(
    tmp_path: Path, anvil: Anvil
) -> None:
    deployer = Deployer(tmp_path, anvil.rpc_url)
    dry = await deployer.json(*DEPLOY[:-1], "--dry-run")
    async with Rpc(anvil.rpc_url) as rpc:
        assert await sent_by(rpc) == []
        assert not deployer.deployments.exists()
        made = await deployer.json(*DEPLOY)
        used = {
            tx["hash"]: int(
                (await rpc.call("eth_getTransactionReceipt", tx["hash"]))["gasUsed"], 16
            )
            for tx in await sent_by(rpc)
        }
    assert {n: dry["contracts"][n]["address"] for n in made["contracts"]} == made["contracts"]
    # Estimates are a little above the gas used, so that the transaction succeeds.
    assert sum(used.values()) <= dry["gas"] <= 1.03 * sum(used.values())
    assert int(dry["fee_wei"]) >= dry["gas"] * int(dry["base_fee_wei"])


async def test_endpoint_that_cannot_estimate_ahead_is_answered_by_size(anvil: Anvil) -> None:
    plan = DeployPlan("sizes", ACCOUNT, DeployParameters())
    async with Rpc(anvil.rpc_url) as rpc:
        asked = await estimate(rpc, plan, 31338)
        call = rpc.call

        async def refusing(method: str, *params: Any) -> Any:
            known = method != "eth_estimateGas" or len(params) == 1
            return await call(method if known else "eth_noSuchMethod", *params)

        rpc.call = refusing  # type: ignore[method-assign]
        sized = await estimate(rpc, plan, 31338)
    assert not any(cost.is_estimated for cost in sized.costs)
    assert sized.gas == pytest.approx(asked.gas, rel=0.1)


async def test_account_that_cannot_pay_is_told_before_anything_is_sent(
    tmp_path: Path, anvil: Anvil
) -> None:
    deployer = Deployer(tmp_path, anvil.rpc_url)
    await anvil.set_balance(ACCOUNT, 10**15)
    code, _, err = await deployer.run(*DEPLOY)
    assert code == 1
    assert "holds 0.001 of the chain's coin, the deployment takes" in err
    async with Rpc(anvil.rpc_url) as rpc:
        assert await sent_by(rpc) == []


async def test_nothing_is_sent_before_somebody_agrees(tmp_path: Path, anvil: Anvil) -> None:
    process = await Deployer(tmp_path, anvil.rpc_url).start(*DEPLOY[:-1])
    _, err = await process.communicate()
    assert (process.returncode, b"Deploy? Nobody can change it later" in err) == (130, True)
    async with Rpc(anvil.rpc_url) as rpc:
        assert await sent_by(rpc) == []


async def test_other_chain_than_the_files_is_refused(tmp_path: Path) -> None:
    async with Anvil() as anvil:
        code, _, err = await Deployer(tmp_path, anvil.rpc_url).run(*DEPLOY)
    assert code == 1
    assert "serves chain 31337, the network is for 31338" in err


async def test_the_same_deployment_is_made_once(tmp_path: Path, anvil: Anvil) -> None:
    async with Rpc(anvil.rpc_url) as rpc:
        first = await deploy_contracts(anvil.rpc_url, Anvil.key(0), DeployParameters())
        again = await deploy_contracts(
            anvil.rpc_url, Anvil.key(0), DeployParameters(), deployments=tmp_path
        )
        assert again == first == load_deployment(tmp_path, 31338)
        assert len(await sent_by(rpc)) == len(STEPS)


async def test_deployment_at_addresses_with_other_code_is_refused(anvil: Anvil) -> None:
    async with Rpc(anvil.rpc_url) as rpc:
        made = await deploy_contracts(anvil.rpc_url, Anvil.key(0), DeployParameters())
        vault = made.contracts["StakeVault"]
        await rpc.call("anvil_setCode", vault, "0x00")
        with pytest.raises(ChainError, match=f"the code at {vault} is not what was planned"):
            await deploy_contracts(anvil.rpc_url, Anvil.key(0), DeployParameters())


async def test_chain_without_the_deployment_proxy_is_named_and_can_be_mended() -> None:
    """Deploy the proxy with the transaction of the guide."""
    guide = (ROOT / "docs" / "guides" / "deploy.md").read_text()
    [signed] = re.findall(r"0xf8a5[0-9a-f]+", guide)
    [signer] = set(re.findall(r"0x3fAB[0-9a-fA-F]+", guide))
    bare = Anvil(arguments=("--disable-default-create2-deployer",))
    async with bare as anvil, Rpc(anvil.rpc_url) as rpc:
        with pytest.raises(ConfigError, match="lacks the deterministic deployment proxy"):
            await deploy_contracts(anvil.rpc_url, Anvil.key(0), DeployParameters())
        await rpc.call("anvil_setBalance", signer, hex(10**16))
        sent = await rpc.call("eth_sendRawTransaction", signed)
        while await rpc.call("eth_getTransactionReceipt", sent) is None:
            await rpc.call("evm_mine")
        await deploy_contracts(anvil.rpc_url, Anvil.key(0), DeployParameters())


async def test_several_endpoints_take_each_transaction_once(anvil: Anvil, tmp_path: Path) -> None:
    urls = anvil.rpc_url, anvil.rpc_url.replace("127.0.0.1", "localhost")
    deployer = Deployer(tmp_path, ",".join(urls))
    code, _, err = await deployer.run(*DEPLOY, "--dry-run")
    assert (code, err.splitlines()[-1]) == (0, "nothing was sent")
    await deployer.json(*DEPLOY)
    async with Rpc(anvil.rpc_url) as rpc:
        assert len(await sent_by(rpc)) == len(STEPS)


async def test_chains_have_the_same_addresses(tmp_path: Path) -> None:
    at = []
    for chain_id in ("31338", "31339"):
        async with Anvil(arguments=("--chain-id", chain_id)) as anvil:
            made = await deploy_contracts(anvil.rpc_url, Anvil.key(0), DeployParameters())
            at.append(made.contracts)
    assert at[0] == at[1]


# ------------------------------------------------------------------------ verifying


async def test_own_deployment_passes_and_shows_its_parameters(deployed: Chain) -> None:
    plan = plan_of(deployed.deployment)
    require_planned_addresses(deployed.deployment, plan)
    await require_minted(deployed, plan)
    assert await first_difference(deployed, plan) is None
    shown = parameters_in(await code_of(deployed, plan))
    given = plan.parameters.model_dump(exclude={"owner", "initial_supply", "slash_cooldown_s"})
    assert {**shown, "slash_cooldown_s": None} == {**given, "slash_cooldown_s": None}
    assert shown["slash_cooldown_s"] == plan.parameters.pause_distance_s


async def test_another_immutable_is_named(deployed: Chain) -> None:
    plan = plan_of(deployed.deployment)
    at = plan.addresses["WorkerRegistry"]
    code = plan.codes_on(31338)[at]
    altered = code.replace((61).to_bytes(32, "big"), (62).to_bytes(32, "big"))
    await deployed.rpc.call("anvil_setCode", at, hex0x(altered))
    found = await first_difference(deployed, plan)
    assert found is not None
    assert (found.contract, found.immutable) == ("WorkerRegistry", "jailTime")
    assert int.from_bytes(found.found) == 62
    assert "differs at byte" in found.describe()


async def test_verify_names_what_differs(tmp_path: Path, anvil: Anvil) -> None:
    deployer = Deployer(tmp_path, anvil.rpc_url)
    made = await deployer.json(*DEPLOY)
    async with Rpc(anvil.rpc_url) as rpc:
        await rpc.call("anvil_setCode", made["contracts"]["FaultCourt"], "0x60")
    code, _, err = await deployer.run("verify")
    assert code == 1
    assert f"FaultCourt at {made['contracts']['FaultCourt']} differs at byte 1" in err


@pytest.mark.parametrize("contract", ["StakeVault", "NetworkFactory"])
async def test_another_byte_is_named_by_its_offset(deployed: Chain, contract: str) -> None:
    plan = plan_of(deployed.deployment)
    at = plan.addresses.get(contract, plan.factory)
    code = (await code_of(deployed, plan))[contract]
    await deployed.rpc.call("anvil_setCode", at, hex0x(code[:-1] + bytes([code[-1] ^ 1])))
    found = await first_difference(deployed, plan)
    assert found is not None
    assert (found.contract, found.offset, found.immutable) == (contract, len(code) - 1, None)


@pytest.mark.parametrize("contract", ["RewardEscrow", "NetworkFactory"])
async def test_code_that_is_cut_short_or_missing_is_named(deployed: Chain, contract: str) -> None:
    plan = plan_of(deployed.deployment)
    at = plan.addresses.get(contract, plan.factory)
    await deployed.rpc.call("anvil_setCode", at, "0x")
    found = await first_difference(deployed, plan)
    assert found is not None
    assert (found.contract, found.offset, found.found) == (contract, 0, b"")


async def test_altered_code_shows_no_parameters(deployed: Chain) -> None:
    plan = plan_of(deployed.deployment)
    codes = {**await code_of(deployed, plan)}
    codes["FaultCourt"] = b"\0" + codes["FaultCourt"][1:]
    with pytest.raises(ChainError, match="code of FaultCourt is not this version's"):
        parameters_in(codes)


async def test_parameters_that_lead_elsewhere_are_refused(deployed: Chain) -> None:
    elsewhere = DeployPlan("muster", ACCOUNT, DeployParameters(insurance=SAFE, jail_time_s=62))
    with pytest.raises(ChainError, match="its parameters lead to"):
        require_planned_addresses(deployed.deployment, elsewhere)


async def test_another_supply_than_the_files_is_refused(deployed: Chain) -> None:
    """The code on chain does not show the supply; the mint event does."""
    values = plan_of(deployed.deployment).parameters.model_dump()
    more = DeployParameters(**{**values, "initial_supply": 7})
    plan = DeployPlan("muster", ACCOUNT, more)
    vars(plan)["addresses"] = deployed.deployment.contracts
    with pytest.raises(ChainError, match="the token was minted as"):
        await require_minted(deployed, plan)


# ----------------------------------------------------------------- show


async def test_show_reads_the_chain_and_not_the_file(tmp_path: Path, anvil: Anvil) -> None:
    deployer = Deployer(tmp_path, anvil.rpc_url)
    await deployer.json(*DEPLOY)
    shown = await deployer.json("show")
    assert shown["parameters"]["challenge_window_s"] == "10800"
    assert shown["parameters"]["insurance"] == ACCOUNT
    holders = {h["power"]: h["holder"] for h in shown["holders"]}
    assert (holders["faucet"], holders["change, upgrade, pause all"]) == ("nobody", "nobody")
