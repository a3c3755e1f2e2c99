"""`muster devnet`: a local chain with the contracts deployed, and money for accounts on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.options import FILE, FOLDER, chain_options, endpoint
from muster.devnet.joining import join
from muster.settings import DEPLOYMENTS

if TYPE_CHECKING:
    from muster.chain import Chain
    from muster.protocol.ids import Address

TOKENS = 100_000 * 10**18
"""What `fund` gives each account."""


@click.group(invoke_without_command=True)
@click.option("--port", default=8545, show_default=True, help="Port of the chain's RPC endpoint.")
@click.option(
    "--deployments",
    type=FOLDER,
    default=DEPLOYMENTS,
    show_default=True,
    help="Where the contracts' addresses are written.",
)
@click.option("--state", type=FILE, help="File that keeps the chain between two starts.")
@click.pass_context
def devnet(context: click.Context, port: int, deployments: Path, state: Path | None) -> None:
    """Start a local chain with the contracts. Its accounts are publicly known test accounts.

    \b
    Example:
      muster devnet --port 8545 --state chain.json
    """
    if context.invoked_subcommand is not None:
        return
    from muster.devnet.anvil_binary import fetch_anvil
    from muster.lifecycle import run_until_stopped

    fetch_anvil(lambda text: click.echo(text, err=True))
    run_until_stopped(lambda: _serve(port, deployments, state))


async def _serve(port: int, deployments: Path, state: Path | None) -> None:
    import asyncio

    from muster.chain import save_deployment
    from muster.client.stake import FAUCET_CHAIN_ID
    from muster.deploy import DeployParameters, deploy_contracts
    from muster.devnet.anvil import Anvil
    from muster.settings.network import Profile, announced

    kept = state is not None and state.exists()
    async with Anvil(port=port, state=state) as anvil:
        if not kept:
            deployment = await deploy_contracts(anvil.rpc_url, anvil.key(0), DeployParameters())
            click.echo(f"contracts  {save_deployment(deployments, deployment)}", err=True)
        place = deployments.expanduser().absolute()
        with announced() as devnet_of_machine:
            devnet_of_machine.tell(
                Profile(chain_id=FAUCET_CHAIN_ID, rpc=(anvil.rpc_url,), deployments=place)
            )
            click.echo(anvil.rpc_url)
            click.echo("Ctrl-C ends it.", err=True)
            await asyncio.Event().wait()


devnet.add_command(join)


@devnet.command()
@click.argument("keystores", type=FILE, nargs=-1, required=True)
@chain_options
def fund(keystores: tuple[Path, ...], **options: Any) -> None:
    """Give the accounts of KEYSTORES gas money and tokens. Works on a development chain only.

    \b
    Example:
      muster devnet fund worker.json validator.json
    """
    import asyncio

    from muster.wallet import keystore_address

    rpc, deployments = endpoint(options)
    asyncio.run(_fund(rpc, deployments, [keystore_address(path) for path in keystores]))


async def _fund(rpc: str, deployments: Path, accounts: list[Address]) -> None:
    from muster.chain import Chain
    from muster.client.stake import GAS_MONEY
    from muster.devnet.anvil import Anvil

    async with await Chain.connect(rpc, deployments, key=Anvil.key(0)) as chain:
        for account in accounts:
            await _give(chain, account)
            click.echo(f"{account} has {GAS_MONEY / 1e18:g} ether, {TOKENS / 1e18:g} tokens more")


async def _give(chain: Chain, account: Address) -> None:
    from muster.client.stake import take_from_faucet, take_gas_money

    await take_gas_money(chain, account)
    await take_from_faucet(chain, account, TOKENS)
