"""Checks before an action begins: money for gas, the keystore's role, and the software that a run
requires.

A run requires a version of this software, an engine and the engine's version. They are checked
before a model is loaded. Work of other software, for which the run has no calibration, could be
rejected and its honest worker punished.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

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
from muster.client.quantities import format_coins, format_tokens
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, RpcError, install_hint
from muster.protocol.ids import Address, RunId

if TYPE_CHECKING:
    from muster.client.doctor.command import Examination
    from muster.client.settings import EngineSettings, NodeSettings
    from muster.protocol.recipe import Recipe
    from muster.toploc import Calibration


logger = logging.getLogger(__name__)

GAS_AND_BYTES = {
    "stake": (320_000, 900),
    "validator join": (400_000, 600),
    "juror join": (300_000, 500),
    "juror shorten": (3_500_000, 100),
    "unstake": (200_000, 400),
    "rejoin": (150_000, 200),
    "rotate": (200_000, 600),
    "vote": (400_000, 600),
    "show": (400_000, 8000),
    "show and post": (1_000_000, 24_000),
    "dispute": (500_000, 3400),
}
"""Upper bounds of each command's gas and signed bytes (`make bench-gas`)."""

OP_ORACLE = "0x420000000000000000000000000000000000000F"
"""GasPriceOracle of every OP stack chain; other chains have nothing at this address."""
NODE_INTERFACE = "0x00000000000000000000000000000000000000C8"
"""NodeInterface of every Arbitrum node; other chains have nothing at this address."""
NITRO_MARGIN = 1.1
"""Factor on the estimate, as NodeInterface's documentation advises."""


@dataclass(frozen=True, slots=True)
class GasMoney:
    """Upper bound of a command's cost in the chain's coin."""

    execution_wei: int
    """Cost of execution gas."""
    data_wei: int = 0
    """Cost of the data that the chain posts to its L1."""

    @property
    def wei(self) -> int:
        """Sum of both."""
        return self.execution_wei + self.data_wei

    def __str__(self) -> str:
        """Return the amount in coins, and its part for data."""
        data = f", {format_coins(self.data_wei)} of it for data on its L1" if self.data_wei else ""
        return format_coins(self.wei) + data


async def gas_money(chain: Chain, command: str) -> GasMoney:
    """Return the highest cost of a command now, with the L1 data fee if there is one.

    OP stack chains (`GasPriceOracle.getL1Fee`, `getOperatorFee`) and Arbitrum chains
    (`NodeInterface.gasEstimateL1Component`) return the fee. The query uses incompressible data of
    the command's size, so the answer is an upper bound. Another chain may have anything at those
    addresses: an answer of another form is ignored.
    """
    return await money_for(chain, *GAS_AND_BYTES[command])


async def money_for(chain: Chain, gas: int, size_bytes: int) -> GasMoney:
    """Return the cost of this gas and these signed bytes now, as `gas_money` does."""
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
    # Chains before Isthmus have no operator fee, and no function for it.
    op_fee += _word(operator_fee, words=1) if op_fee else 0
    nitro_fee = int(_word(nitro, words=3) * wei * NITRO_MARGIN)
    return GasMoney(gas * wei, op_fee + nitro_fee)


def _call(to: str, signature: str, types: list[str], values: list[Any]) -> tuple[str, list[Any]]:
    data = keccak(signature.encode())[:4] + encode(types, values)
    return "eth_call", [{"to": to, "data": hex0x(data)}, "latest"]


def _word(answer: object, *, words: int) -> int:
    """Return the first 32-byte word of an answer of `words` words; 0 for any other answer."""
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
    """Raise ConfigError when an account cannot pay for a command; `needed` if it is known.

    Also while it has a transaction that is not mined: it may be the same command's, from before.
    """
    await _require_settled(chain, account)
    needed = needed or await gas_money(chain, command)
    held = await coins_of(chain, account)
    if held < needed.wei:
        raise ConfigError(
            f"{account} holds {format_coins(held)} of the chain's coin, muster {command} may take "
            f"{needed} for gas",
            hint=f"send {account} some of the coin; on a development chain: muster devnet "
            "fund KEYSTORE",
        )


async def _require_settled(chain: Chain, account: Address) -> None:
    counts = await chain.rpc.batch(
        [("eth_getTransactionCount", [account, block]) for block in ("latest", "pending")]
    )
    mined, sent = map(from_hex, counts)
    if sent > mined:
        raise ConfigError(
            f"{account} has sent {sent - mined} transactions that are not mined yet",
            hint="this command may have sent them before: wait until they are mined, and see what "
            "they did before you run it again",
        )


@dataclass(frozen=True, slots=True)
class NodeMoney:
    """The money with which a node submits its own work when the orchestrator ignores it."""

    tokens_wei: int
    """Tokens that the node holds."""
    coins_wei: int
    """Coins that the node holds."""
    bond_wei: int
    """Tokens of a bond, which comes back."""
    gas: GasMoney

    @property
    def is_enough(self) -> bool:
        """Whether the node can submit work by itself."""
        return self.tokens_wei >= self.bond_wei and self.coins_wei >= self.gas.wei

    @property
    def held(self) -> str:
        """What the node holds, in words."""
        return f"{format_tokens(self.tokens_wei)} tokens, {format_coins(self.coins_wei)} for gas"

    @property
    def needed(self) -> str:
        """What the node needs, in words."""
        return f"a bond of {format_tokens(self.bond_wei)} tokens, {self.gas} for gas"


async def node_money(chain: Chain, node: Address) -> NodeMoney:
    """Return what a node holds and needs to submit its own work."""
    return NodeMoney(
        tokens_wei=await chain.token.balance_of(node),
        coins_wei=await coins_of(chain, node),
        bond_wei=(await chain.court.terms()).bond,
        gas=await gas_money(chain, "dispute"),
    )


async def warn_of_gas(
    chain: Chain, account: Address, command: str, need: str, *, share: float = 1
) -> None:
    """Log a warning when an account cannot pay for a command that it may have to send later, out of
    the share of its coin that it may spend.

    `need` says what the gas is needed for.
    """
    held, needed = await coins_of(chain, account), await gas_money(chain, command)
    must_hold = int(needed.wei / share)
    if held < must_hold:
        fields = {"once_takes": str(needed), "must_hold": format_coins(must_hold)}
        logger.warning(f"too little gas money {need}", extra={"holds": format_coins(held)} | fields)


def require_hot(node: Address, worker: Address) -> None:
    """Raise ConfigError when the key that is to be a worker's node is the worker's own."""
    if node == worker:
        raise ConfigError(
            f"{node} is the worker's own key, which belongs on no working machine",
            hint="give --node the keystore of another key: muster wallet new FILE makes one",
        )


async def require_cold(chain: Chain, account: Address) -> None:
    """Raise ConfigError when an account is a worker's node, and no worker itself: stake belongs to
    the worker.
    """
    worker = await chain.workers.worker_of_node(account)
    number, _ = await chain.workers.worker_of(account)
    if worker != ZERO_ADDRESS and number == 0:
        raise ConfigError(
            f"{account} is the node of worker {worker}, and holds no stake of its own",
            hint="give the worker's keystore (muster init calls it worker.json) with --keystore",
        )


async def require_worker(chain: Chain, account: Address) -> WorkerAccount:
    """Return a worker's number and node; raises ConfigError when the account is no worker."""
    number, node = await chain.workers.worker_of(account)
    if number == 0:
        await require_cold(chain, account)
        raise ConfigError(
            f"{account} is no worker of any run",
            hint="join a run: muster stake --run N --keystore FILE --node FILE",
        )
    return WorkerAccount(number, node)


async def require_member(chain: Chain, account: Address, run_id: RunId) -> Member:
    """Return a worker's membership in a run; raises ConfigError when it never joined."""
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
            f"there is no run {run}, {known}",
            hint="choose a run of muster run list, or check --rpc",
        )
    return found


# Software that a run requires

PACKAGE = "muster-rl"


def installed_version() -> str:
    """Return the version of this software."""
    return metadata.version(PACKAGE)


def engine_name(settings: EngineSettings | Examination) -> str:
    """Return the name in calibrations of these settings' engine, number format, and layout over
    several devices.
    """
    name = f"{settings.engine}:{settings.dtype}"
    return f"{name}:tp{settings.tensor_parallel}" if settings.tensor_parallel > 1 else name


def require_software(recipe: Recipe, version: str) -> None:
    """Raise ConfigError when the run pins a newer version than this one."""
    if _numbers(version) < _numbers(recipe.min_software):
        raise ConfigError(
            f"this is {PACKAGE} {version}, the run asks for {recipe.min_software} or newer",
            hint="install a newer release (docs/guides/install.md), then start again",
        )


def require_covered(calibration: Calibration, engine: str) -> None:
    """Raise ConfigError when the run's limits were not measured with an engine."""
    covered = [name.strip() for name in calibration.model.engine.split(",")]
    if engine not in covered:
        raise ConfigError(
            f"the run is calibrated for {', '.join(covered)}, not for {engine}: "
            "honest work might be rejected",
            hint="choose one of those with --engine, --dtype and --tensor-parallel, or ask the "
            "run's owner to calibrate for this one",
        )


def require_ordered_slashes(fraud_ppm: int, exact_fraud_ppm: int) -> None:
    """Raise ConfigError, as the contract does, when an exact fraud costs less than another."""
    if fraud_ppm > exact_fraud_ppm:
        raise ConfigError(
            f"fraud_ppm {fraud_ppm} is above exact_fraud_ppm {exact_fraud_ppm}: an exact fraud "
            "cannot cost less",
            hint="raise exact_fraud_ppm",
        )


def require_pinned_engine(requirements: list[str] | None = None) -> None:
    """Raise ConfigError when a package that runs the model is not in the pinned version.

    `requirements` are by default this package's own. A missing package is skipped: the command that
    imports it reports that.
    """
    for name, pinned in _pins(metadata.requires(PACKAGE) if requirements is None else requirements):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        # The local part of a version (+cpu, +cu130) does not change the results.
        if found.split("+")[0] != pinned:
            raise ConfigError(
                f"{name} {found} is installed, limits are measured with {pinned}",
                hint=f"{install_hint('model')}; it brings the pinned versions",
            )


def require_fit(recipe: Recipe, calibration: Calibration, settings: NodeSettings) -> None:
    """Raise ConfigError with the reason when this software must not take part in a run."""
    require_software(recipe, installed_version())
    require_covered(calibration, engine_name(settings))
    require_pinned_engine()


def _pins(requirements: list[str] | None) -> list[tuple[str, str]]:
    """Return the pinned packages of the extra `model`."""
    pattern = re.compile(r"([A-Za-z0-9_.-]+)==([0-9.]+)\s*;.*extra == ['\"]model['\"]")
    found = (pattern.fullmatch(text.strip()) for text in requirements or ())
    return [(match[1], match[2]) for match in found if match]


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's release numbers, without trailing zeros and suffixes such as rc1."""
    release = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
