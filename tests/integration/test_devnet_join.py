"""`muster devnet join` up to the worker's start: keys, test tokens and stake, once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from muster.chain import Chain, WorkerStatus, save_deployment
from muster.client import stake
from muster.deploy import DeployParameters, deploy_contracts
from muster.devnet.anvil import Anvil
from muster.devnet.joining import open_keys, prepare
from muster.protocol.errors import ConfigError


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """A chain's endpoint and the folder of its addresses."""
    async with Anvil(log=tmp_path / "anvil.log") as anvil:
        deployment = await deploy_contracts(anvil.rpc_url, Anvil.key(0), DeployParameters())
        save_deployment(tmp_path / "deployments", deployment)
        yield anvil.rpc_url, tmp_path / "deployments"


async def stake_of(place: tuple[str, Path], worker: Any) -> tuple[WorkerStatus, int]:
    async with await Chain.connect(*place) as chain:
        account = await chain.workers.worker_of(worker.address)
        return account.status, await chain.vault.active_stake(worker.address)


async def test_a_stranger_becomes_a_worker_once(place: tuple[str, Path], tmp_path: Path) -> None:
    worker, node = open_keys(tmp_path / "keys")
    ledger = await prepare(*place, worker, node)
    status, staked = await stake_of(place, worker)
    assert (status, staked > 0) == (WorkerStatus.ACTIVE, True)
    assert open_keys(tmp_path / "keys") == (worker, node)
    assert await prepare(*place, worker, node) == ledger
    assert await stake_of(place, worker) == (status, staked)


async def test_a_chain_with_value_is_refused(
    place: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stake, "FAUCET_CHAIN_ID", 1)
    worker, node = open_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="chain 31337 is no development chain") as raised:
        await prepare(*place, worker, node)
    assert "docs/guides/worker.md" in raised.value.hint
    assert (await stake_of(place, worker))[0] is WorkerStatus.NONE
