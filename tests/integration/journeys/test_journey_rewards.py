"""Work that nobody judged is void and pays nobody: real contracts, orchestrator and worker."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from client_network import PARAMETERS, PRICE, WORKERS, Network, eventually, open_network

from muster.api import OrchestratorApi
from muster.app.cli import muster
from muster.protocol.errors import ContractRevert

# An appeal may take as long as a challenge: time to look, also on a busy machine.
TERMS = PARAMETERS.model_copy(update={"challenge_window_s": 60})


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
    """Return whether all received submissions are on chain, and read back from there."""
    async with OrchestratorApi(network.orchestrator) as api:
        status = await api.status()
    batches = (await network.view()).batches
    committed = sum(batch.count for batch in batches.values())
    return status.received == committed and status.batches_committed == len(batches)


async def explain_waiting(network: Network) -> None:
    """A submission without outcomes is found by its file's hash, with the reason it waits."""
    async with OrchestratorApi(network.orchestrator) as api:
        [entry, *_] = (await api.batch(1)).submissions
    name = entry.submission.file_hash.hex()
    text = await run(network, "explain", name, "--orchestrator", network.orchestrator)
    assert "submission  batch 1, position 0 (run 1)" in text
    assert "not yet: outcomes are due by" in text


async def explain_due(network: Network) -> None:
    text = await run(network, "explain", "1:0", "--orchestrator", network.orchestrator)
    assert "may call jurors of the network until" in text
    assert "muster worker submit-direct 1:0" in text


async def test_work_that_nobody_judged_is_void_and_its_funds_are_the_runs_again(
    tmp_path: Path,
) -> None:
    async with open_network(tmp_path, TERMS) as network:
        worker = asyncio.ensure_future(network.worker(0))

        async def has_committed() -> bool:
            return bool((await network.view()).batches)

        await eventually(has_committed)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        await eventually(lambda: shows_what_it_committed(network))
        await explain_waiting(network)
        await pass_time(network, TERMS.outcome_deadline_s)
        await explain_due(network)
        batches = (await network.view()).batches
        reserved = (await network.view()).runs[network.run_id].reserved_wei
        assert reserved == sum(batch.units for batch in batches.values()) * PRICE > 0

        await pass_time(network, await network.owner.ledger.appeal_time())
        for batch in batches.values():
            await network.owner.ledger.void_batch(batch.header())
        found = await network.view()
        assert all(batch.is_void for batch in found.batches.values())
        assert found.runs[network.run_id].reserved_wei == 0
        assert found.slashes == []
        assert "void" in await run(network, "explain", "1:0")
        shown = await rewards(network)
        assert (shown["claimable_slots"], shown["paid_slots"]) == (0, 0)
        text = await run(network, "rewards", "--run", "1", "--worker", WORKERS[0].address)
        assert "claimable  nothing now" in text


async def test_nothing_is_void_while_judges_can_be_called(tmp_path: Path) -> None:
    async with open_network(tmp_path, PARAMETERS) as network:
        worker = asyncio.ensure_future(network.worker(0))

        async def has_committed() -> bool:
            return bool((await network.view()).batches)

        await eventually(has_committed)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        batch = (await network.view()).batches[1]
        with pytest.raises(ContractRevert, match="LedgerWrongTime"):
            await network.owner.ledger.void_batch(batch.header())
        assert not (await network.view()).batches[1].is_void


async def pass_time(network: Network, seconds: int) -> None:
    await network.owner.rpc.call("evm_increaseTime", seconds + 1)
    await network.owner.rpc.call("evm_mine")
