"""A batch that nobody could judge is void on a real chain, and its money the run's again."""

from pathlib import Path

from orchestrator_network import VALIDATORS, Network, eventually, open_network, running

from muster.chain import ChainView, EventReader, apply_poll
from muster.chain.structs import BatchStatus
from muster.protocol.encoding import keccak
from muster.protocol.messages import Outcomes


async def read(network: Network) -> ChainView:
    view = ChainView()
    apply_poll(view, await EventReader(network.chain).poll())
    return view


async def reserved_wei(network: Network) -> int:
    (funds,) = await network.chain.read("RewardEscrow", "fundsOf", [network.run_id])
    return int(funds[1])


async def test_batch_that_a_quorum_calls_withheld_is_void_and_costs_nobody_anything(
    tmp_path: Path,
) -> None:
    async with open_network(tmp_path) as network, running(network) as url:
        submission = await network.upload(url, 0, b"rows")
        state = await network.until(url, submission, "committed")
        assert state.batch_id is not None
        batch = (await read(network)).batches[state.batch_id]
        assert await reserved_wei(network) > 0
        nothing = Outcomes(batch.batch_id, batch.root, keccak(b""))
        for key in VALIDATORS[:2]:
            async with network.api(url, key) as api:
                signature = network.sign(nothing.struct_hash(), key)
                await api.post_outcomes(batch.batch_id, b"", signature)

        async def is_void() -> bool:
            return (await read(network)).batches[batch.batch_id].is_void

        await eventually(is_void)
        view = await read(network)
        assert view.batches[batch.batch_id].status is BatchStatus.WITHHELD
        assert await reserved_wei(network) == 0
        assert (view.slashes, view.contradictions) == ([], [])
