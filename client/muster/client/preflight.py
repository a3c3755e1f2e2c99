"""What is refused before it is signed: no money for gas, or a keystore of the wrong role."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from eth_abi.abi import encode

from muster.chain import (
    ZERO_ADDRESS,
    Chain,
    ChainView,
    Member,
    RunView,
    WorkerAccount,
    WorkerStatus,
)
from muster.chain.rpc import from_hex
from muster.client.quantities import format_coins
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, RpcError
from muster.protocol.ids import Address, RunId

logger = logging.getLogger(__name__)

GAS_AND_BYTES = {
    "stake": (320_000, 900),
    "validator join": (400_000, 600),
    "juror join": (300_000, 500),
    "unstake": (200_000, 400),
    "rejoin": (150_000, 200),
    "rotate": (200_000, 600),
    "vote": (400_000, 600),
    "show": (400_000, 8000),
    "dispute": (500_000, 3000),
}
"""What each command may use of gas, and sign in bytes, with room to spare (`make bench-gas`)."""

OP_ORACLE = "0x420000000000000000000000000000000000000F"
"""GasPriceOracle of every OP stack chain; elsewhere there is nothing at this address."""
NODE_INTERFACE = "0x00000000000000000000000000000000000000C8"
"""NodeInterface, which every Arbitrum node answers for; elsewhere there is nothing."""
NITRO_MARGIN = 1.1
"""On the estimate, by the advice of NodeInterface's documentation."""


@dataclass(frozen=True, slots=True)
class GasMoney:
    """What a command may take of the chain's coin."""

    execution_wei: int
    """For gas."""
    data_wei: int = 0
    """For what the chain has to post on its L1."""

    @property
    def wei(self) -> int:
        """Both."""
        return self.execution_wei + self.data_wei

    def __str__(self) -> str:
        """Return the amount in coins, and what of it is for data."""
        data = f", {format_coins(self.data_wei)} of it for data on its L1" if self.data_wei else ""
        return format_coins(self.wei) + data


async def gas_money(chain: Chain, command: str) -> GasMoney:
    """Return what a command may cost now, the fee for its data on an L1 included where one is due.

    An OP stack chain says it (`GasPriceOracle.getL1Fee`, `getOperatorFee`), an Arbitrum chain as
    well (`NodeInterface.gasEstimateL1Component`). The question is about data of the command's size
    that does not compress, so the answer is an upper bound. Another chain may have anything at
    those addresses: an answer of another form adds nothing.
    """
    return await money_for(chain, *GAS_AND_BYTES[command])


async def money_for(chain: Chain, gas: int, size_bytes: int) -> GasMoney:
    """Return what so much gas and so many signed bytes cost now, as `gas_money` does."""
    data = _incompressible(size_bytes)
    price, l1_fee, operator_fee, nitro = await chain.rpc.try_batch(
        [
            ("eth_gasPrice", []),
            _call(OP_ORACLE, "getL1Fee(bytes)", ["bytes"], [data]),
            _call(OP_ORACLE, "getOperatorFee(uint256)", ["uint256"], [gas]),
            _call(
                NODE_INTERFACE,
                "gasEstimateL1Component(address,bool,bytes)",
                ["address", "bool", "bytes"],
                [chain.deployment.contracts["WorkerRegistry"], False, data],
            ),
        ]
    )
    if isinstance(price, RpcError):
        raise price
    wei = from_hex(price)
    op_fee = _word(l1_fee, words=1)
    # Chains before Isthmus have no operator fee, and no function to ask.
    op_fee += _word(operator_fee, words=1) if op_fee else 0
    nitro_fee = int(_word(nitro, words=3) * wei * NITRO_MARGIN)
    return GasMoney(gas * wei, op_fee + nitro_fee)


def _call(to: str, signature: str, types: list[str], values: list[Any]) -> tuple[str, list[Any]]:
    data = keccak(signature.encode())[:4] + encode(types, values)
    return "eth_call", [{"to": to, "data": hex0x(data)}, "latest"]


def _word(answer: object, *, words: int) -> int:
    """Return the first of so many 32-byte words; 0 for an error and for any other answer."""
    if not isinstance(answer, str) or len(answer) != 2 + 64 * words:
        return 0
    return from_hex(answer[:66])


def _incompressible(size: int) -> bytes:
    return b"".join(keccak(b"data %d" % n) for n in range(size // 32 + 1))[:size]


async def coins_of(chain: Chain, account: Address) -> int:
    """Return an account's balance of the chain's own coin, in wei."""
    return from_hex(await chain.rpc.call("eth_getBalance", account, "latest"))


async def require_gas(
    chain: Chain, account: Address, command: str, needed: GasMoney | None = None
) -> None:
    """Raise ConfigError when an account cannot pay for a command; `needed` if it is known."""
    needed = needed or await gas_money(chain, command)
    held = await coins_of(chain, account)
    if held < needed.wei:
        raise ConfigError(
            f"{account} holds {format_coins(held)} of the chain's coin, muster {command} may take "
            f"{needed} for gas",
            hint="send it some; on a development chain: muster devnet fund KEYSTORE",
        )


async def warn_of_gas(chain: Chain, account: Address, command: str, need: str) -> None:
    """Log a warning when an account cannot pay for a command that it may have to send later.

    `need` says in words what for.
    """
    held, needed = await coins_of(chain, account), await gas_money(chain, command)
    if held < needed.wei:
        logger.warning(
            f"too little gas money {need}",
            extra={"holds": format_coins(held), "once_takes": str(needed)},
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
    """Return a worker's number and node; raises ConfigError when the account is no worker."""
    await require_cold(chain, account)
    number, node = await chain.workers.worker_of(account)
    if number == 0:
        raise ConfigError(
            f"{account} is no worker of any run",
            hint="join one: muster stake --run N --keystore FILE --node FILE",
        )
    return WorkerAccount(number, node)


async def require_member(chain: Chain, account: Address, run_id: RunId) -> Member:
    """Return how a worker stands in a run; raises ConfigError when it never joined it."""
    await require_worker(chain, account)
    member = await chain.workers.member_of(run_id, account)
    if member.status is WorkerStatus.NONE:
        raise ConfigError(
            f"{account} never joined run {run_id}",
            hint=f"join it: muster stake --run {run_id} --keystore FILE",
        )
    return member


def find_run(view: ChainView, run: int) -> RunView:
    """Return a run; raises ConfigError when there is none of that number."""
    found = view.runs.get(RunId(run))
    if found is None:
        known = f"there are {len(view.runs)}" if view.runs else "there is none yet"
        raise ConfigError(
            f"there is no run {run}, {known}", hint="see muster run list; check --rpc"
        )
    return found
