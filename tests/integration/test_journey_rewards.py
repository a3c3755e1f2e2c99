"""Work that nobody judged in time is paid as claimed: real contracts, orchestrator and worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from client_network import PARAMETERS, PRICE, WORKERS, Network, eventually, open_network

from muster.api import OrchestratorApi
from muster.client.quantities import format_tokens
from muster.devnet.anvil import Anvil
from muster.devnet.cli import muster
from muster.wallet import save_wallet


async def run(network: Network, *words: str) -> str:
    chain = ["--rpc", network.anvil.rpc_url, "--deployments", str(network.folder / "deployments")]
    result = await asyncio.to_thread(
        CliRunner().invoke, muster, [*words, *chain], env={"MUSTER_PASSWORD": "s"}
    )
    assert result.exception is None, result.output
    return result.stdout


async def rewards(network: Network, *words: str) -> Any:
    whose = ("--run", "1", "--worker", WORKERS[0].address)
    return json.loads(await run(network, "rewards", *words, *whose, "--json"))


async def shows_what_it_committed(network: Network) -> bool:
    """Return whether all that the orchestrator received is on chain, and read back from there."""
    async with OrchestratorApi(network.orchestrator) as api:
        status = await api.status()
    batches = (await network.view()).batches
    committed = sum(batch.count for batch in batches.values())
    return status.received == committed and status.batches_committed == len(batches)


async def explain_waiting(network: Network) -> None:
    """A submission without outcomes is found by its file's hash, and says what it waits for."""
    async with OrchestratorApi(network.orchestrator) as api:
        [entry, *_] = (await api.batch(1)).submissions
    name = entry.submission.file_hash.hex()
    text = await run(network, "explain", name, "--orchestrator", network.orchestrator)
    assert "submission  batch 1, position 0 (run 1)" in text
    assert "not yet: outcomes are due by" in text


async def explain_overdue(network: Network) -> None:
    text = await run(network, "explain", "1:0", "--orchestrator", network.orchestrator)
    assert "by nobody in time: it stands as claimed" in text
    assert "muster rewards claim --run 1" in text
    assert "the window is closed" in text


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
        await eventually(lambda: shows_what_it_committed(network), 60)
        await explain_waiting(network)
        due = PARAMETERS.outcome_deadline_s + PARAMETERS.challenge_window_s
        await network.owner.rpc.call("evm_increaseTime", due)
        await network.owner.rpc.call("evm_mine")
        batches = (await network.view()).batches
        mine = sum(batch.units for batch in batches.values())

        await explain_overdue(network)
        blind = await rewards(network)
        assert blind["overdue_batches_unseen"] == list(batches)
        assert blind["claimable_slots"] == 0
        seen = await rewards(network, "--orchestrator", network.orchestrator)
        assert seen["claimable_slots"] == sum(batch.count for batch in batches.values())
        before = await network.owner.token.balance_of(WORKERS[0].address)
        claim = ("claim", "--keystore", str(tmp_path / "payer.json"))
        claimed = await rewards(network, *claim, "--orchestrator", network.orchestrator)
        assert claimed["claimed_tokens"] == seen["claimable_tokens"] == format_tokens(mine * PRICE)
        assert (claimed["claimable_slots"], claimed["worker"]) == (0, WORKERS[0].address)
        paid = await network.owner.token.balance_of(WORKERS[0].address) - before
        assert paid == mine * PRICE
        after = await rewards(network, "--orchestrator", network.orchestrator)
        assert (after["claimable_slots"], after["paid_slots"]) == (0, seen["claimable_slots"])
        text = await run(network, "rewards", "--run", "1", "--worker", WORKERS[0].address)
        assert "claimable  nothing now" in text
