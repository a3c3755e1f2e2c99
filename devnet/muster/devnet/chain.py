"""`muster devnet`: a local chain with the contracts deployed, until interrupted."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--port", default=8545, show_default=True, help="Port of the RPC endpoint.")
@click.option(
    "--deployments",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("contracts/deployments"),
    show_default=True,
    help="Where the addresses are written.",
)
@click.option(
    "--state",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that keeps the chain between two starts.",
)
def devnet(port: int, deployments: Path, state: Path | None) -> None:
    """Start a local chain with the contracts. Its accounts are publicly known test accounts."""
    from muster.client.process import run_until_stopped

    run_until_stopped(lambda: _serve(port, deployments, state))


async def _serve(port: int, deployments: Path, state: Path | None) -> None:
    import asyncio

    from muster.chain import Anvil, DeployParameters, deploy_contracts, save_deployment

    kept = state is not None and state.exists()
    async with Anvil(port=port, state=state) as anvil:
        if not kept:
            deployment = await deploy_contracts(anvil.rpc_url, anvil.key(0), DeployParameters())
            path = save_deployment(deployments, deployment)
            click.echo(f"contracts  {path}", err=True)
        click.echo(anvil.rpc_url)
        click.echo("Ctrl-C ends it.", err=True)
        await asyncio.Event().wait()
