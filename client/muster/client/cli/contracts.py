"""`muster contracts`: deploy a network's contracts, verify them, show them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from muster.chain import Chain, TransactionSender, save_deployment
from muster.chain.connection import open_journal
from muster.chain.quorum import open_rpc
from muster.chain.rpc import Rpc, from_hex
from muster.client.cli.options import (
    FILE,
    FOLDER,
    acting_options,
    agree,
    endpoint,
    key_options,
    looking_options,
    open_keystore,
)
from muster.client.cli.printing import plain_table, print_json, print_result, print_table
from muster.client.deployed import (
    COMPILER,
    code_of,
    first_difference,
    holders,
    parameters_in,
    plan_of,
    require_minted,
    require_planned_addresses,
    write_standard_json,
)
from muster.client.network_file import AMOUNTS, DeploymentCost, NetworkFile, estimate, read_network
from muster.client.quantities import format_coins, format_duration, format_tokens
from muster.deploy import DeployPlan, send_plan
from muster.deploy.plan import STEPS, DeployStage, require_proxy
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ChainError, WrongChain
from muster.wallet import keystore_address


@click.group()
def contracts() -> None:
    """Deploy a network's contracts and see what they are fixed to.

    Nobody can change them afterwards: read docs/guides/deploy.md first.
    """


# -------------------------------------------------------------------------- deploy


@contracts.command()
@click.argument("network", type=FILE)
@key_options
@click.option("--dry-run", is_flag=True, help="Say what it does and costs; send nothing.")
@acting_options
def deploy(network: Path, keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Deploy the contracts that NETWORK describes, a TOML file, and write their addresses.

    docs/reference/deployment.md lists the bounds of its parameters, with reasons. The same file and
    account give the same addresses on every chain. To continue an interrupted deployment, run the
    same command again: nothing is sent twice. After a finished one it only writes the addresses.

    \b
    Examples:
      muster contracts deploy network.toml --keystore owner.json --dry-run
      muster contracts deploy network.toml --keystore owner.json --rpc https://…
    """
    described = read_network(network)
    if options["dry_run"]:
        plan = described.plan(keystore_address(keystore))
        asyncio.run(_dry_run(described, plan, options))
        return
    asyncio.run(_deploy(described, open_keystore(keystore, password_file).key, options))


async def _dry_run(described: NetworkFile, plan: DeployPlan, options: dict[str, Any]) -> None:
    async with open_rpc(endpoint(options)[0]) as rpc:
        await _require_chain(rpc, described)
        await require_proxy(rpc)
        found = await estimate(rpc, plan, described.chain_id)
    if options["as_json"]:
        print_json(_cost_json(plan, found))
        return
    columns, rows = _cost_table(found)
    print_table(columns, rows)
    click.echo(_funds_line(found), err=True)
    click.echo("nothing was sent", err=True)


async def _deploy(described: NetworkFile, key: bytes, options: dict[str, Any]) -> None:
    rpc_url, deployments = endpoint(options)
    chain_id, plan = described.chain_id, described.plan(address_of(key))
    async with open_rpc(rpc_url) as rpc:
        await _require_chain(rpc, described)
        await require_proxy(rpc)
        found = await estimate(rpc, plan, chain_id)
        click.echo("\n".join(plain_table(*_cost_table(found))), err=True)
        click.echo(_funds_line(found), err=True)
        found.require_funds(plan.account)
        agree("Deploy? Nobody can change it later", options)
        # One journal of an account's sent transactions, for all chains, beside the addresses.
        journal = deployments.expanduser() / f"{plan.account}.journal"
        opened = await open_journal(rpc, chain_id, plan.account, journal)
        sender = TransactionSender(rpc, key, chain_id, journal=opened)
        try:
            made = await send_plan(rpc, sender, plan, _report_to(click.echo))
        finally:
            sender.close()
    path = save_deployment(deployments, made)
    facts = {"file": str(path), "deploy_block": made.deploy_block}
    print_result(
        facts | {"contracts": made.contracts}, options["as_json"], {**facts, **made.contracts}
    )


def _report_to(echo: Callable[..., None]) -> Callable[[DeployStage], None]:
    def report(stage: DeployStage) -> None:
        spent = "there already" if stage.gas_used is None else f"{stage.gas_used} gas"
        echo(f"{stage.contract:18}  {stage.address}  {spent}", err=True)

    return report


async def _require_chain(rpc: Rpc, described: NetworkFile) -> None:
    served = from_hex(await rpc.call("eth_chainId"))
    if served != described.chain_id:
        raise WrongChain(
            f"{rpc.masked_url} serves chain {served}, the network is for {described.chain_id}",
            hint="check --rpc and chain_id",
        )


def _cost_table(found: DeploymentCost) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            cost.contract,
            cost.address,
            f"{'' if cost.is_estimated else '~'}{cost.gas}" if cost.gas else "there already",
            format_coins(found.fee_wei(cost.gas)),
        ]
        for cost in found.costs
    ]
    total = ["total", "", str(found.gas), format_coins(found.fee_wei(found.gas))]
    return ["contract", "address", "gas", "ETH"], [*rows, total]


def _cost_json(plan: DeployPlan, found: DeploymentCost) -> dict[str, Any]:
    return {
        "account": plan.account,
        "contracts": {c.contract: {"address": c.address, "gas": c.gas} for c in found.costs},
        "gas": found.gas,
        "base_fee_wei": str(found.base_fee_wei),
        "fee_wei": str(found.fee_wei(found.gas)),
        "balance_wei": str(found.balance_wei),
    }


def _funds_line(found: DeploymentCost) -> str:
    return (
        f"base fee {found.base_fee_wei / 1e9:.6g} gwei, tip {found.tip_wei / 1e9:.6g} gwei; "
        f"the account holds {format_coins(found.balance_wei)} ETH"
    )


# -------------------------------------------------------------------------- verify


@contracts.command()
@click.argument("network", type=FILE, required=False)
@click.option(
    "--standard-json", "sources", type=FOLDER, help="Write the compiler's input for explorers."
)
@looking_options
def verify(network: Path | None, sources: Path | None, **options: Any) -> None:
    """Compare the code on chain with this version's, byte for byte, immutables included.

    The parameters are those of NETWORK; without it, those of the deployment's file.

    \b
    Examples:
      muster contracts verify network.toml
      muster contracts verify --standard-json explorer/
    """
    asyncio.run(_verify(network, sources, options))


async def _verify(network: Path | None, sources: Path | None, options: dict[str, Any]) -> None:
    async with await Chain.connect(*endpoint(options)) as chain:
        plan = _plan_on(chain, network)
        require_planned_addresses(chain.deployment, plan)
        if found := await first_difference(chain, plan):
            raise ChainError(
                found.describe(),
                hint="give the NETWORK.toml that it was deployed with, or "
                "use the version that deployed it",
            )
        await require_minted(chain, plan)
    written = write_standard_json(sources, STEPS) if sources else []
    if options["as_json"]:
        print_json({"equal": list(STEPS), "written": [str(path) for path in written]})
        return
    print_table(
        ["contract", "address", "code"],
        [[name, plan.addresses.get(name, plan.factory), "equal"] for name in STEPS],
    )
    if sources:
        click.echo(f"{len(written)} files in {sources}; the compiler is {COMPILER}", err=True)


def _plan_on(chain: Chain, network: Path | None) -> DeployPlan:
    recorded = plan_of(chain.deployment)
    if network is None:
        return recorded
    described = read_network(network)
    if described.chain_id != chain.chain_id:
        raise WrongChain(
            f"{network} is for chain {described.chain_id}, not for {chain.chain_id}",
            hint="check --rpc",
        )
    return described.plan(recorded.account)


# ---------------------------------------------------------------------------- show


@contracts.command()
@looking_options
def show(**options: Any) -> None:
    """Show the contracts, what they are fixed to, and who holds what.

    Parameters are read from the code on chain, not from the deployment's file.

    \b
    Example:
      muster contracts show --rpc https://…
    """
    asyncio.run(_show(options))


async def _show(options: dict[str, Any]) -> None:
    async with await Chain.connect(*endpoint(options)) as chain:
        plan = plan_of(chain.deployment)
        parameters = parameters_in(await code_of(chain, plan))
        held = await holders(chain, plan)
    places = chain.deployment.contracts
    if options["as_json"]:
        shown = {k: v if isinstance(v, str) else str(v) for k, v in parameters.items()}
        powers = [{"power": h.what, "holder": h.who, "limit": h.limit} for h in held]
        print_json(
            {
                "chain_id": chain.chain_id,
                "deploy_block": chain.deployment.deploy_block,
                "contracts": places,
                "parameters": shown,
                "holders": powers,
            }
        )
        return
    print_table(["contract", "address"], [list(place) for place in places.items()])
    click.echo()
    print_table(["parameter", "value"], [[k, _worded(k, v)] for k, v in parameters.items()])
    click.echo()
    print_table(["power", "holder", "limit"], [[h.what, h.who, h.limit] for h in held])


def _worded(name: str, value: str | int) -> str:
    if isinstance(value, str):
        return value
    if name in AMOUNTS:
        return f"{format_tokens(value)} tokens"
    return format_duration(value) if name.endswith("_s") else str(value)
