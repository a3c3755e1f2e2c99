"""Verification of a deployment: its code against artifacts and parameters, and its power holders.

Every parameter except the supply is an immutable: it is part of the code, at offsets listed in the
artifacts. So code that equals the artifact byte for byte, with the expected words at those offsets,
is the contract with these parameters; and parameters can be read from the code.

`standard_json` is the compiler's input, for explorers. It needs a checkout with `node_modules`; the
artifacts are made from the same document.
"""

import json
import posixpath
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eth_utils.address import to_checksum_address

from muster.chain import Chain, Deployment
from muster.chain.abi import FACTORY, contract_abi
from muster.chain.rpc import from_hex
from muster.client.quantities import format_share, format_tokens
from muster.deploy import DeployParameters, DeployPlan
from muster.deploy.parameters import FAUCET_CHAIN_ID
from muster.deploy.plan import ORDER, PARAMETER_OF, start_block
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ChainError, ConfigError
from muster.protocol.ids import Address, to_address

MINT_SPAN = 2_000
"""Blocks per query in the search for the mint."""
_TRANSFER = hex0x(keccak(b"Transfer(address,address,uint256)"))
_WORD = 32


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between code on chain and expected code."""

    contract: str
    """The contract's name."""
    address: Address
    """Address of the contract."""
    offset: int
    """The first byte that differs."""
    immutable: str | None
    """The immutable at this offset, if there is one."""
    expected: bytes
    """Expected word at the offset, or the shorter rest of the code."""
    found: bytes
    """Word found on chain."""

    def describe(self) -> str:
        """Return the difference in one line."""
        where = f", in the immutable {self.immutable}" if self.immutable else ""
        return (
            f"{self.contract} at {self.address} differs at byte {self.offset}{where}: "
            f"0x{self.found.hex()} instead of 0x{self.expected.hex()}"
        )


def plan_of(deployment: Deployment) -> DeployPlan:
    """Return the plan that a deployment's file describes; raises ConfigError when it does not."""
    given = deployment.parameters
    values = {k: v for k, v in given.items() if k in DeployParameters.model_fields}
    try:
        account = to_address(str(given["deployer"]))
        return DeployPlan(str(given["name"]), account, DeployParameters.model_validate(values))
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the deployment's file does not say what it was made from: {error}",
            hint="give the NETWORK.toml and the file that muster contracts deploy wrote",
        ) from error


def require_planned_addresses(deployment: Deployment, plan: DeployPlan) -> None:
    """Raise ChainError when the addresses do not follow from the parameters."""
    for name, at in plan.addresses.items():
        if deployment.contracts[name] != at:
            raise ChainError(
                f"{name} is at {deployment.contracts[name]}, its parameters lead to {at}",
                hint="check that parameters, account and version are those of the deployment",
            )


async def code_of(chain: Chain, plan: DeployPlan) -> dict[str, bytes]:
    """Return what is on chain of the factory and of each contract, by name."""
    places = {FACTORY: plan.factory, **plan.addresses}
    codes = await chain.rpc.batch([("eth_getCode", [at, "latest"]) for at in places.values()])
    return {name: bytes.fromhex(code[2:]) for name, code in zip(places, codes, strict=True)}


async def first_difference(chain: Chain, plan: DeployPlan) -> Difference | None:
    """Return the first difference between planned code and the chain; None when there is none."""
    codes = await code_of(chain, plan)
    expected = plan.codes_on(chain.chain_id)
    factory = plan.factory_on_chain(await start_block(chain.rpc, plan)) if codes[FACTORY] else b""
    wanted = {plan.factory: factory, **expected}
    for (name, found), (at, code) in zip(codes.items(), wanted.items(), strict=True):
        # A missing factory has no block of creation; it differs from any code.
        if found != code or not found:
            return difference(name, at, code, found)
    return None


def difference(name: str, at: Address, expected: bytes, found: bytes) -> Difference:
    """Return the first difference between two codes of a contract."""
    pairs = zip(expected, found, strict=False)
    offset = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    places = contract_abi(name).immutables.items()
    for immutable, starts in places:
        for start in starts:
            if start <= offset < start + _WORD:
                word = slice(start, start + _WORD)
                return Difference(name, at, offset, immutable, expected[word], found[word])
    word = slice(offset, offset + _WORD)
    return Difference(name, at, offset, None, expected[word], found[word])


async def require_minted(chain: Chain, plan: DeployPlan) -> None:
    """Raise ChainError unless the initial supply went to the owner, which the code does not
    show."""
    owner, supply = plan.parameters.owner_of(plan.account), plan.parameters.initial_supply
    minted = await _first_mint(chain, plan.addresses["MusterToken"])
    if minted != (owner, supply):
        raise ChainError(
            f"the token was minted as {minted}, not as {(owner, supply)}",
            hint="the parameters are not those that it was deployed with",
        )


async def _first_mint(chain: Chain, token: Address) -> tuple[Address, int] | None:
    start, head = chain.deployment.deploy_block, await chain.block_number()
    for first in range(start, head + 1, MINT_SPAN):
        asked = {
            "address": token,
            "topics": [_TRANSFER, "0x" + "0" * 64],
            "fromBlock": hex(first),
            "toBlock": hex(min(first + MINT_SPAN - 1, head)),
        }
        if logs := await chain.rpc.call("eth_getLogs", asked):
            return to_address("0x" + logs[0]["topics"][2][-40:]), from_hex(logs[0]["data"])
    return None


# ------------------------------------------------------------------------- showing


def parameters_in(codes: Mapping[str, bytes]) -> dict[str, str | int]:
    """Return the parameters in the code on chain; raises ChainError for other code."""
    found: dict[str, str | int] = {}
    for name in ORDER:
        words = _immutables_in(name, codes[name])
        found |= {
            PARAMETER_OF[key]: int.from_bytes(word)
            for key, word in words.items()
            if key in PARAMETER_OF
        }
        if "insurance" in words:
            found["insurance"] = to_checksum_address(words["insurance"][-20:])
    return {name: found[name] for name in DeployParameters.model_fields if name in found}


def _immutables_in(name: str, code: bytes) -> dict[str, bytes]:
    abi = contract_abi(name)
    blank = bytearray(code)
    words = {}
    for immutable, starts in abi.immutables.items():
        words[immutable] = code[starts[0] : starts[0] + _WORD]
        for start in starts:
            blank[start : start + _WORD] = bytes(_WORD)
    if blank != abi.runtime:
        raise ChainError(
            f"the code of {name} is not this version's",
            hint="muster contracts verify names the difference",
        )
    return words


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a power or of money in a deployment."""

    what: str
    """The power."""
    who: str
    """The account, or a description of the holder."""
    limit: str
    """Limits of the power."""


async def holders(chain: Chain, plan: DeployPlan) -> list[Holder]:
    """Return the current holders."""
    owner = plan.parameters.owner_of(plan.account)
    supply = await chain.token.total_supply()
    held = {account: await chain.token.balance_of(account) for account in (owner, plan.account)}
    tokens = [
        Holder("tokens", account, f"{format_tokens(wei)} of {format_tokens(supply)}")
        for account, wei in held.items()
    ]
    has_faucet = chain.chain_id == FAUCET_CHAIN_ID
    return [
        Holder("change, upgrade, pause all", "nobody", "no contract has an administrator"),
        *tokens,
        Holder(
            "insurance",
            await chain.vault.insurance(),
            f"receives {format_share(await chain.vault.insurance_ppm())} of slashed stake; fixed",
        ),
        Holder(
            "factory",
            plan.account,
            "everything is made: no contract asks the factory for anything",
        ),
        Holder(
            "faucet",
            "anybody" if has_faucet else "nobody",
            "mints tokens: a development chain" if has_faucet else "tokens are never minted again",
        ),
        Holder("a run", "its owner", "docs/security.md lists the powers"),
    ]


COMPILER = "v0.8.30+commit.73712a01"
"""Explorers' name of the compiler in npm's `solc`."""
ROOT = Path(__file__).parents[3]
"""Root of a checkout; in an installed wheel there are no sources below it."""
OUTPUTS = ["abi", "evm.bytecode.object", "evm.deployedBytecode"]
_IMPORT = re.compile(r'^import\s[^;]*?"([^"]+)";', re.M)


def standard_json(contracts: Iterable[str], root: Path = ROOT) -> dict[str, Any]:
    """Return solc's standard JSON input of contracts and their imports.

    Raises ConfigError outside a checkout.
    """
    settings = _settings(root)
    sources: dict[str, str] = {}
    waiting = [f"contracts/src/{name}.sol" for name in contracts]
    while waiting:
        name = waiting.pop()
        if name not in sources:
            sources[name] = _read(root, name)
            waiting += _imports(name, sources[name], settings["remappings"])
    return {
        "language": "Solidity",
        "sources": {name: {"content": sources[name]} for name in sorted(sources)},
        "settings": {**settings, "outputSelection": {"*": {"*": OUTPUTS}}},
    }


def write_standard_json(folder: Path, contracts: Iterable[str], root: Path = ROOT) -> list[Path]:
    """Write one input per contract, with its sources only, and return the files."""
    documents = {name: standard_json([name], root) for name in contracts}
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, document in documents.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        paths.append(path)
    return paths


def _settings(root: Path) -> dict[str, Any]:
    forge = tomllib.loads(_read(root, "foundry.toml"))["profile"]["default"]
    return {
        "remappings": forge["remappings"],
        "optimizer": {"enabled": forge["optimizer"], "runs": forge["optimizer_runs"]},
        "metadata": {"bytecodeHash": forge["bytecode_hash"], "appendCBOR": forge["cbor_metadata"]},
        "evmVersion": forge["evm_version"],
        "viaIR": False,
    }


def _imports(name: str, text: str, remappings: Iterable[str]) -> Iterator[str]:
    prefixes: Mapping[str, str] = dict(line.split("=") for line in remappings)
    for path in _IMPORT.findall(text):
        if path.startswith("."):
            yield posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
        else:
            prefix = next(p for p in prefixes if path.startswith(p))
            yield prefixes[prefix] + path.removeprefix(prefix)


def _read(root: Path, name: str) -> str:
    try:
        return (root / name).read_text()
    except OSError as error:
        raise ConfigError(
            f"the contracts' sources are not here: there is no {root / name}",
            hint="a wheel has bytecode only: run this in a checkout after make setup",
        ) from error
