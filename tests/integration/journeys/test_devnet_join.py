"""`muster devnet join` up to the worker's start: keys, test tokens and stake, once."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from muster.app.anvil import Anvil
from muster.app.devnet import open_keys, prepare
from muster.chain import Chain, RunConfig, RunTerms, WorkerStatus, save_deployment
from muster.client import stake
from muster.deploy import DeployParameters, deploy_contracts
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Hash32, RunId

RUNS = (RunId(1), RunId(2))


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """A chain's endpoint and the folder of its addresses."""
    async with Anvil(log=tmp_path / "anvil.log") as anvil:
        deployment = await deploy_contracts(anvil.rpc_url, Anvil.key(0), DeployParameters())
        save_deployment(tmp_path / "deployments", deployment)
        owner, some = address_of(Anvil.key(0)), Hash32(bytes([1]) * 32)
        terms = RunTerms(price_per_unit=1, fraud_ppm=0, exact_fraud_ppm=0, quorum=1)
        async with await Chain.connect(anvil.rpc_url, deployment, key=Anvil.key(0)) as chain:
            for _ in RUNS:
                config = RunConfig(owner, owner, some, some, some, some, terms, (owner,))
                await chain.runs.create_run(config)
        yield anvil.rpc_url, tmp_path / "deployments"


async def stake_of(
    place: tuple[str, Path], worker: Any, run_id: RunId = RUNS[0]
) -> tuple[WorkerStatus, int]:
    async with await Chain.connect(*place) as chain:
        member = await chain.workers.member_of(run_id, worker.address)
        return member.status, await chain.vault.active_stake(run_id, worker.address)


async def test_a_stranger_becomes_a_worker_once(place: tuple[str, Path], tmp_path: Path) -> None:
    worker, node = open_keys(tmp_path / "keys")
    ledger = await prepare(*place, worker, node, RUNS[0])
    status, staked = await stake_of(place, worker)
    assert (status, staked > 0) == (WorkerStatus.ACTIVE, True)
    assert open_keys(tmp_path / "keys") == (worker, node)
    assert await prepare(*place, worker, node, RUNS[0]) == ledger
    assert await stake_of(place, worker) == (status, staked)


async def test_a_second_run_takes_a_stake_of_its_own(
    place: tuple[str, Path], tmp_path: Path
) -> None:
    worker, node = open_keys(tmp_path / "keys")
    await prepare(*place, worker, node, RUNS[0])
    first = await stake_of(place, worker)
    assert (await stake_of(place, worker, RUNS[1]))[0] is WorkerStatus.NONE
    await prepare(*place, worker, node, RUNS[1])
    assert await stake_of(place, worker, RUNS[1]) == first == await stake_of(place, worker)


async def test_a_chain_with_value_is_refused(
    place: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stake, "FAUCET_CHAIN_ID", 1)
    worker, node = open_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="chain 31337 is not a development chain") as raised:
        await prepare(*place, worker, node, RUNS[0])
    assert "docs/guides/worker.md" in raised.value.hint
    assert (await stake_of(place, worker))[0] is WorkerStatus.NONE
