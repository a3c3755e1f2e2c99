"""What is refused before it is signed: no money for gas, or a keystore of the wrong role."""

from __future__ import annotations

from muster.chain import ZERO_ADDRESS, Chain, ChainView, RunView, WorkerAccount, WorkerStatus
from muster.chain.quantities import from_hex
from muster.client.quantities import format_coins
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address, RunId

GAS = {
    "stake": 300_000,
    "unstake": 200_000,
    "rejoin": 150_000,
    "rotate": 200_000,
    "vote": 400_000,
    "dispute": 500_000,
}
"""What each command may use: measured with room to spare (`make bench-gas`)."""


async def gas_price(chain: Chain) -> int:
    """Return what a unit of gas costs now, in wei of the chain's coin."""
    return from_hex(await chain.rpc.call("eth_gasPrice"))


async def coins_of(chain: Chain, account: Address) -> int:
    """Return an account's balance of the chain's own coin, in wei."""
    return from_hex(await chain.rpc.call("eth_getBalance", account, "latest"))


async def require_gas(chain: Chain, account: Address, command: str) -> None:
    """Raise ConfigError when an account cannot pay for the gas of a command."""
    needed = GAS[command] * await gas_price(chain)
    held = await coins_of(chain, account)
    if held < needed:
        raise ConfigError(
            f"{account} holds {format_coins(held)} of the chain's coin, muster {command} may take "
            f"{format_coins(needed)} for gas",
            hint="send it some; on a development chain: muster devnet fund KEYSTORE",
        )


async def require_cold(chain: Chain, account: Address) -> None:
    """Raise ConfigError when an account is a worker's node: stake belongs to the worker."""
    worker = await chain.workers.worker_of_node(account)
    if worker != ZERO_ADDRESS:
        raise ConfigError(
            f"{account} is the node of worker {worker}, and holds no stake of its own",
            hint="give the worker's keystore (muster init calls it worker.json) with --keystore",
        )


async def require_worker(chain: Chain, account: Address) -> WorkerAccount:
    """Return a worker's record; raises ConfigError when the account is none."""
    await require_cold(chain, account)
    record = await chain.workers.worker_of(account)
    if record.status is WorkerStatus.NONE:
        raise ConfigError(
            f"{account} is not registered as a worker",
            hint="register it: muster stake --keystore FILE --node FILE",
        )
    return record


def find_run(view: ChainView, run: int) -> RunView:
    """Return a run; raises ConfigError when there is none of that number."""
    found = view.runs.get(RunId(run))
    if found is None:
        known = f"there are {len(view.runs)}" if view.runs else "there is none yet"
        raise ConfigError(
            f"there is no run {run}, {known}", hint="see muster runs list; check --rpc"
        )
    return found
