"""Work that nobody judged in time is paid as claimed: real contracts, orchestrator and worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from client_network import PARAMETERS, PRICE, WORKERS, Network, eventually, open_network

from muster.chain import Anvil
from muster.devnet.cli import muster
from muster.wallet import save_wallet


async def rewards(network: Network, *words: str) -> Any:
    chain = ["--rpc", network.anvil.rpc_url, "--deployments", str(network.folder / "deployments")]
    result = await asyncio.to_thread(
        CliRunner().invoke,
        muster,
        ["rewards", *words, "--run", "1", "--worker", WORKERS[0].address, *chain, "--json"],
        env={"MUSTER_PASSWORD": "s"},
    )
    assert result.exception is None, result.output
    return json.loads(result.stdout.splitlines()[0])


async def test_overdue_work_is_claimed_once_with_what_the_orchestrator_shows(
    tmp_path: Path,
) -> None:
    save_wallet(tmp_path / "payer.json", Anvil.key(9), "s", light=True)
    async with open_network(tmp_path, PARAMETERS) as network:
        worker = asyncio.ensure_future(network.worker(0))

        async def has_committed() -> bool:
            return bool((await network.view()).batches)

        await eventually(has_committed, 60)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        due = PARAMETERS.outcome_deadline_s + PARAMETERS.challenge_window_s
        await network.owner.rpc.call("evm_increaseTime", due)
        await network.owner.rpc.call("evm_mine")
        batches = (await network.view()).batches
        mine = sum(batch.units for batch in batches.values())

        blind = await rewards(network)
        assert blind["overdue_batches_unseen"] == list(batches)
        assert blind["claimable_slots"] == 0
        seen = await rewards(network, "--orchestrator", network.orchestrator)
        assert seen["claimable_slots"] == sum(batch.count for batch in batches.values())
        before = await network.owner.token.balance_of(WORKERS[0].address)
        claim = ("claim", "--keystore", str(tmp_path / "payer.json"))
        await rewards(network, *claim, "--orchestrator", network.orchestrator)
        paid = await network.owner.token.balance_of(WORKERS[0].address) - before
        assert paid == mine * PRICE
        after = await rewards(network, "--orchestrator", network.orchestrator)
        assert (after["claimable_slots"], after["paid_slots"]) == (0, seen["claimable_slots"])
