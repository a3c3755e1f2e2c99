"""A run's orchestrator gets another account while its workers and validators run on."""

from pathlib import Path

from client_network import ORCHESTRATOR, Network, eventually, open_network, running

from muster.chain import BatchView
from muster.lifecycle import free_port
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import keccak
from muster.wallet import Wallet

KEY = keccak(b"another orchestrator")
FRESH = Wallet(address_of(KEY), KEY)


async def judged(network: Network, orchestrator: str) -> list[BatchView]:
    """Return the batches of an account that were judged."""
    view = await network.view()
    return [b for b in view.batches.values() if b.records and b.orchestrator == orchestrator]


async def test_work_goes_on_when_the_orchestrator_s_key_is_replaced(tmp_path: Path) -> None:
    async with open_network(tmp_path, port=free_port()) as network:
        mains = (network.worker(0), network.validator(0), network.validator(1))
        async with running(*mains):
            await eventually(lambda: _any(network, ORCHESTRATOR.address))
            await network.stop_orchestrator()
            await network.owner.runs.rotate_orchestrator(
                network.run_id, ORCHESTRATOR.address, FRESH.address
            )
            await network.anvil.set_balance(FRESH.address, 10**20)
            await network.start_orchestrator(FRESH)
            await eventually(lambda: _any(network, FRESH.address))
        view = await network.view()
        verdicts = {r.verdict.name for b in view.batches.values() for r in b.records or ()}
        assert verdicts == {"ACCEPTED"}


async def _any(network: Network, orchestrator: str) -> bool:
    return bool(await judged(network, orchestrator))
