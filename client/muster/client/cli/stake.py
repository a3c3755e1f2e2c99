"""`muster stake`, `muster unstake` and `muster worker rejoin`: deposit and withdraw stake.

`muster.client.stake` describes what each does, and sends the transactions.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.chain import Chain
from muster.client.cli.options import (
    FILE,
    acting_options,
    agree,
    endpoint,
    key_options,
    open_keystore,
    orchestrator_option,
    run_option,
)
from muster.client.cli.printing import print_result, printable
from muster.client.preflight import require_cold, require_gas, require_hot, require_worker
from muster.client.quantities import format_time, format_tokens, parse_tokens
from muster.client.stake import (
    add_stake,
    join_run,
    leaving,
    return_offer,
    stake_offer,
    take_from_faucet,
    take_gas_money,
    terms_of_run,
    unbond,
    what_next,
)
from muster.protocol.errors import ApiError, EncodingError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.recipe import Recipe
from muster.wallet import Wallet

if TYPE_CHECKING:
    from muster.api import OrchestratorApi


@click.command()
@key_options
@run_option
@click.option("--node", type=FILE, help="Keystore of the node that signs for the worker.")
@click.option("--node-password-file", type=FILE, help="Password of the node's keystore.")
@click.option("--amount", metavar="TOKENS", help="How much. [default: what is required there]")
@orchestrator_option
@click.option("--faucet", is_flag=True, help="Take tokens and gas money: development chains.")
@acting_options
def stake(
    keystore: Path,
    password_file: Path | None,
    node: Path | None,
    node_password_file: Path | None,
    **options: Any,
) -> None:
    """Stake for a run, and become its worker, in one transaction; or add stake there.

    The default --amount is what the contracts require, and what the largest ticket of the run's
    recipe takes, which --orchestrator shows: less brings no work. With it, a finished run is
    refused. A new worker signs the number of the run's terms; --node names its hot key, the first
    time. A worker of the run only adds the amount. Prints the transaction's hash.

    \b
    Examples:
      muster stake --run 1 --keystore ~/.muster/worker.json --node ~/.muster/node.json
      muster stake --run 1 --keystore ~/.muster/worker.json --amount 50
    """
    owner = open_keystore(keystore, password_file)
    node_wallet = open_keystore(node, node_password_file or password_file, "node") if node else None
    if node_wallet:
        require_hot(node_wallet.address, owner.address)
    asyncio.run(_stake(owner, node_wallet, options))


async def _stake(owner: Wallet, node: Wallet | None, options: dict[str, Any]) -> None:
    run_id = RunId(options["run"])
    amount = parse_tokens(options["amount"]) if options["amount"] else None
    async with await Chain.connect(*endpoint(options), key=owner.key) as chain:
        await require_cold(chain, owner.address)
        if options["faucet"]:
            await take_gas_money(chain, owner.address)
        await require_gas(chain, owner.address, "stake")
        make_offer = partial(
            stake_offer,
            *(chain, owner.address, run_id, amount),
            with_node=node is not None,
            recipe=await _recipe(chain, run_id, options["orchestrator"]),
        )
        offer = await make_offer()
        missing = offer.amount_wei - offer.balance_wei
        if missing > 0 and options["faucet"]:
            await take_from_faucet(chain, owner.address, missing)
            offer = await make_offer()
        offer.require_funds()
        offer.require_something(with_node=node is not None)
        click.echo(f"account {owner.address}\n{offer.describe()}", err=True)
        agree("Stake?", options)
        if offer.joins:
            receipt = await join_run(
                chain, owner, node, run_id, offer.amount_wei, terms=offer.terms_number
            )
        else:
            receipt = await add_stake(chain, run_id, owner.address, offer.amount_wei)
        staked = {
            "account": owner.address,
            "run": run_id,
            "amount_tokens": format_tokens(offer.amount_wei),
            "amount_wei": str(offer.amount_wei),
            "transaction": receipt.tx_hash,
        }
        print_result(staked, options["as_json"], receipt.tx_hash)
        click.echo(await what_next(chain, owner.address, run_id), err=True)


async def _recipe(chain: Chain, run_id: RunId, url: str | None) -> Recipe | None:
    """Return the recipe that the chain pins; None when the orchestrator does not show it."""
    await terms_of_run(chain, run_id)
    if url is None:
        return None
    from muster.api import OrchestratorApi

    async with OrchestratorApi(url) as api:
        return await shown_recipe(api, (await chain.runs.config_of(run_id)).recipe_hash)


async def shown_recipe(api: OrchestratorApi, recipe_hash: Hash32) -> Recipe | None:
    """Return the recipe of a hash; None, and say so, when the orchestrator does not show it."""
    try:
        return Recipe.from_bytes(await api.document(recipe_hash))
    except (ApiError, EncodingError) as error:
        click.echo(printable(f"note    the orchestrator shows no recipe: {error}"), err=True)
        return None


@click.command()
@key_options
@click.option(
    "--run",
    type=click.IntRange(min=0),
    required=True,
    help="The run that it is staked for; 0 is the jurors' bench.",
)
@click.option("--amount", metavar="TOKENS", help="How much to unbond. [default: everything]")
@click.option(
    "--all", "everything", is_flag=True, help="Unbond the rest, though some unbonds already."
)
@acting_options
def unstake(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Take stake back from a run: the first call starts unbonding, a second one later withdraws it.

    The worker or validator leaves the run. With --amount it stays while enough stake is left; with
    less, a worker is jailed and a validator loses its seat. Exit code 3: the unbonding period is
    not over.

    \b
    Examples:
      muster unstake --run 1 --keystore ~/.muster/worker.json           leave; later, withdraw
      muster unstake --run 1 --keystore validator.json --amount 100     spare stake only
    """
    if options["amount"] and options["everything"]:
        raise click.UsageError("--amount and --all exclude each other")
    asyncio.run(_unstake(open_keystore(keystore, password_file).key, options))


async def _unstake(key: bytes, options: dict[str, Any]) -> None:
    asked = parse_tokens(options["amount"]) if options["amount"] else None
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        state = await leaving(chain, chain.me, RunId(options["run"]))
        if state.stake.unbonding_wei and asked is None and not options["everything"]:
            state.require_due()
            click.echo(f"withdraws {format_tokens(state.stake.unbonding_wei)} tokens", err=True)
            await _agree(chain, state.account, options)
            receipt = await chain.vault.withdraw(state.run_id)
            action, amount, due = "withdrawn", state.stake.unbonding_wei, state.now
        else:
            amount = state.amount(asked)
            click.echo(state.describe(amount), err=True)
            await _agree(chain, state.account, options)
            receipt = await unbond(chain, state, amount)
            requested = receipt.event("UnbondRequested")
            action, due = "unbonding", int(requested.args["withdrawable_at"])
    facts = {"action": action, "amount_tokens": format_tokens(amount)}
    sent = {"transaction": receipt.tx_hash}
    exact = {"amount_wei": str(amount), "due_at": due}
    print_result(facts | exact | sent, options["as_json"], facts | {"due": format_time(due)} | sent)


async def _agree(chain: Chain, account: Address, options: dict[str, Any]) -> None:
    await require_gas(chain, account, "unstake")
    agree("Go on?", options)


@click.command()
@key_options
@run_option
@acting_options
def rejoin(keystore: Path, password_file: Path | None, **options: Any) -> None:
    """Work again for a run after jail, or after having started to leave, under its present terms.

    --keystore is the worker's. Stake that unbonds does not count: add what is missing first. Exit
    code 3: not possible yet.

    \b
    Example:
      muster worker rejoin --run 1 --keystore ~/.muster/worker.json
    """
    asyncio.run(_rejoin(open_keystore(keystore, password_file).key, options))


async def _rejoin(key: bytes, options: dict[str, Any]) -> None:
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        await require_worker(chain, chain.me)
        await require_gas(chain, chain.me, "rejoin")
        run_id = RunId(options["run"])
        terms, agreed = await return_offer(chain, chain.me, run_id)
        click.echo(f"account {chain.me}\n{agreed}", err=True)
        agree("Go on?", options)
        receipt = await chain.workers.come_back(run_id, terms)
    back = receipt.event("WorkerReturned")
    facts = {"active_from_block": back.args["active_from"], "transaction": receipt.tx_hash}
    print_result(facts, options["as_json"])
