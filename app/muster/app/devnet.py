"""`muster devnet`: a local chain with the contracts deployed, and funding for its accounts.

`muster devnet join` does `init`, `devnet fund`, `stake` and `worker run` in one command; on a real
network each of them is a separate decision.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.app.demo.keys import PASSWORD
from muster.client.cli.options import (
    FILE,
    FOLDER,
    HOME,
    chain_options,
    endpoint,
    orchestrator_option,
)
from muster.protocol.errors import ConfigError
from muster.settings import DEPLOYMENTS

if TYPE_CHECKING:
    from muster.chain import Chain
    from muster.protocol.ids import Address, RunId
    from muster.wallet import Wallet

TOKENS = 100_000 * 10**18
"""Tokens in wei that `fund` gives each account."""


@click.group(invoke_without_command=True)
@click.option("--port", default=8545, help="Port of the chain's RPC endpoint.")
@click.option(
    "--deployments",
    type=FOLDER,
    default=DEPLOYMENTS,
    help="Folder to write the contracts' addresses to.",
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
    from muster.app.anvil import fetch_anvil
    from muster.lifecycle import run_until_stopped

    fetch_anvil(lambda text: click.echo(text, err=True))
    run_until_stopped(lambda: _serve(port, deployments, state))


async def _serve(port: int, deployments: Path, state: Path | None) -> None:
    import asyncio

    from muster.app.anvil import Anvil
    from muster.chain import save_deployment
    from muster.client.stake import FAUCET_CHAIN_ID
    from muster.deploy import DeployParameters, deploy_contracts
    from muster.settings.profiles import NetworkProfile, announced

    kept = state is not None and state.exists()
    async with Anvil(port=port, state=state) as anvil:
        if not kept:
            deployment = await deploy_contracts(anvil.rpc_url, anvil.key(0), DeployParameters())
            click.echo(f"contracts  {save_deployment(deployments, deployment)}", err=True)
        place = deployments.expanduser().absolute()
        with announced() as devnet_of_machine:
            devnet_of_machine.tell(
                NetworkProfile(chain_id=FAUCET_CHAIN_ID, rpc=(anvil.rpc_url,), deployments=place)
            )
            click.echo(anvil.rpc_url)
            click.echo("Press Ctrl-C to stop the chain.", err=True)
            await asyncio.Event().wait()


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
    from muster.app.anvil import Anvil
    from muster.chain import Chain
    from muster.client.stake import GAS_MONEY

    async with await Chain.connect(rpc, deployments, key=Anvil.key(0)) as chain:
        for account in accounts:
            await _give(chain, account)
            click.echo(
                f"{account} received {GAS_MONEY / 1e18:g} ether and {TOKENS / 1e18:g} tokens"
            )


async def _give(chain: Chain, account: Address) -> None:
    from muster.client.stake import take_from_faucet, take_gas_money

    await take_gas_money(chain, account)
    await take_from_faucet(chain, account, TOKENS)


@devnet.command()
@click.option("--run", type=click.IntRange(min=1), required=True, help="The run to work for.")
@orchestrator_option
@click.option("--home", type=FOLDER, help=f"Keys and state. [default: {HOME / 'devnet'}]")
@click.option("--plain", is_flag=True, help="Print log lines instead of the live view.")
@chain_options
def join(
    run: int, orchestrator: str | None, home: Path | None, *, plain: bool, **options: Any
) -> None:
    """Work for a run of a development network: makes keys, takes test tokens, stakes, works.

    \b
    Example:
      muster devnet join --run 2
    """
    import asyncio

    from muster.client.settings import WorkerSettings
    from muster.client.worker.live import make_watch
    from muster.client.worker.process import run_worker
    from muster.lifecycle import run_until_stopped
    from muster.protocol.ids import RunId
    from muster.telemetry import setup_logging

    if orchestrator is None:
        raise ConfigError(
            f"the URL of run {run}'s orchestrator is not known",
            hint="start muster demo --keep on this machine, or give --orchestrator URL",
        )
    rpc, deployments = endpoint(options)
    folder = (home or HOME / "devnet").expanduser()
    worker, node = open_keys(folder)
    ledger = asyncio.run(prepare(rpc, deployments, worker, node, RunId(run)))
    setup_logging("worker")
    settings = WorkerSettings(
        run=RunId(run),
        orchestrator=orchestrator,
        rpc=rpc,
        deployments=deployments,
        # State belongs to one chain: a restarted chain does not know the signatures of the last
        # one.
        state_dir=folder / f"state-{ledger[2:10]}-{run}",
        worker=worker.address,
        plain=plain,
    )
    run_until_stopped(lambda: run_worker(settings, node, watch=make_watch(settings)))


def open_keys(folder: Path) -> tuple[Wallet, Wallet]:
    """Return the worker and node keys of a folder; creates them if there are none."""
    from muster.client.cli.keys import NODE_FILE, WORKER_FILE, create_identity
    from muster.wallet import load_wallet, new_words

    if not (folder / WORKER_FILE).exists():
        create_identity(folder, new_words(), (PASSWORD, PASSWORD), light=True)
    worker, node = (load_wallet(folder / name, PASSWORD) for name in (WORKER_FILE, NODE_FILE))
    return worker, node


async def prepare(rpc: str, deployments: Path, worker: Wallet, node: Wallet, run_id: RunId) -> str:
    """Let the worker join a run with test tokens, and return the ledger's address.

    Raises ConfigError on any chain but a development chain.
    """
    from muster.chain import Chain, WorkerStatus
    from muster.client.stake import FAUCET_CHAIN_ID, join_run, take_from_faucet, take_gas_money

    async with await Chain.connect(rpc, deployments, key=worker.key) as chain:
        if chain.chain_id != FAUCET_CHAIN_ID:
            raise ConfigError(
                f"chain {chain.chain_id} is not a development chain",
                hint="join a run there step by step, as docs/guides/worker.md shows",
            )
        member = await chain.workers.member_of(run_id, worker.address)
        if member.status is WorkerStatus.NONE:
            await take_gas_money(chain, worker.address)
            stake = await chain.workers.required_stake()
            await take_from_faucet(chain, worker.address, stake)
            # For bonds, in case nobody accepts or judges its work.
            await take_gas_money(chain, node.address)
            await take_from_faucet(chain, node.address, (await chain.court.terms()).bond)
            _, bound = await chain.workers.worker_of(worker.address)
            await join_run(chain, worker, node if int(bound, 16) == 0 else None, run_id, stake)
            click.echo(
                f"{worker.address} joined run {run_id}, with {stake / 1e18:g} test tokens", err=True
            )
        return chain.deployment.contracts["ContributionLedger"]
