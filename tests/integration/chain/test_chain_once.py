"""Labelled writes of the typed clients happen once per chain, however often they are repeated."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from chain_scenario import CHALLENGER, OWNER, PARAMETERS

from muster.app.anvil import Anvil
from muster.chain import Chain, Deployment
from muster.deploy import deploy_contracts


@pytest.fixture
async def deployed() -> AsyncIterator[tuple[Anvil, Deployment]]:
    async with Anvil() as anvil:
        yield anvil, await deploy_contracts(anvil.rpc_url, OWNER.key, PARAMETERS)


async def test_write_of_a_label_happens_once_across_processes(
    deployed: tuple[Anvil, Deployment], tmp_path: Path
) -> None:
    anvil, deployment = deployed
    receipts = []
    for _ in range(3):
        async with await Chain.connect(
            anvil.rpc_url, deployment, key=OWNER.key, journal=tmp_path / "journal"
        ) as chain:
            receipts.append(await chain.once("gift").token.faucet(CHALLENGER.address, 5))
            assert await chain.token.balance_of(CHALLENGER.address) == 5
            assert await chain.receipt_of("gift") == receipts[0]
            assert await chain.receipt_of("another gift") is None
    assert receipts[0] == receipts[1] == receipts[2]


async def test_label_counts_on_the_chain_where_it_happened_only(tmp_path: Path) -> None:
    for _ in range(2):
        async with Anvil() as anvil:
            deployment = await deploy_contracts(anvil.rpc_url, OWNER.key, PARAMETERS)
            async with await Chain.connect(
                anvil.rpc_url, deployment, key=OWNER.key, journal=tmp_path / "journal"
            ) as chain:
                assert await chain.receipt_of("gift") is None
                await chain.once("gift").token.faucet(CHALLENGER.address, 5)
                assert await chain.token.balance_of(CHALLENGER.address) == 5


async def test_label_is_known_when_the_chain_was_stopped_and_started(tmp_path: Path) -> None:
    state, journal = tmp_path / "state.json", tmp_path / "journal"
    async with Anvil(state=state) as anvil:
        deployment = await deploy_contracts(anvil.rpc_url, OWNER.key, PARAMETERS)
        async with await Chain.connect(
            anvil.rpc_url, deployment, key=OWNER.key, journal=journal
        ) as chain:
            before = await chain.once("gift").token.faucet(CHALLENGER.address, 5)
    async with (
        Anvil(state=state) as anvil,
        await Chain.connect(anvil.rpc_url, deployment, key=OWNER.key, journal=journal) as chain,
    ):
        after = await chain.once("gift").token.faucet(CHALLENGER.address, 5)
        assert after.tx_hash == before.tx_hash


async def test_reading_connection_opens_no_journal(
    deployed: tuple[Anvil, Deployment], tmp_path: Path
) -> None:
    anvil, deployment = deployed
    journal = tmp_path / "journal"
    async with await Chain.connect(anvil.rpc_url, deployment, journal=journal) as chain:
        assert await chain.receipt_of("gift") is None
        past = chain.at(await chain.block_number())
        assert await past.token.balance_of(CHALLENGER.address) == 0
    assert not journal.exists()
