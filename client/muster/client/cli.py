"""The commands of `muster.client`: wallet, stake, rewards, worker, validator, juror, calibrate.

Parses flags, asks, prints; what is printed to stdout is data. Everything heavy is imported by the
command that needs it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.leaving import rejoin
from muster.client.options import (
    FILE,
    FOLDER,
    JUROR_VARIABLES,
    PASSWORD_HELP,
    VALIDATOR_VARIABLES,
    WORKER_VARIABLES,
    chain_options,
    endpoint,
    engine_choice,
    json_option,
    key_options,
    node_options,
    open_keystore,
    relay_option,
    yes_option,
)
from muster.client.printing import print_facts, print_json
from muster.client.seating import (
    juror_join,
    juror_leave,
    juror_status,
    validator_join,
    validator_leave,
)
from muster.client.trap_cli import trap
from muster.client.worker.by_hand import submit_direct
from muster.client.worker_status import status
from muster.protocol.errors import ConfigError
from muster.protocol.ids import RunId
from muster.settings.options import CONFIRMATIONS_HELP
from muster.settings.presets import RECIPE

if TYPE_CHECKING:
    from muster.wallet import Wallet


@click.group()
def wallet() -> None:
    """Create and show encrypted keystores."""


@wallet.command("new")
@click.argument("file", type=FILE)
@click.option("--password-file", type=FILE, help=PASSWORD_HELP)
@click.option("--light", is_flag=True, help="Weak, fast encryption: for development chains only.")
@json_option
def wallet_new(file: Path, password_file: Path | None, light: bool, as_json: bool) -> None:
    """Create an account; FILE becomes its encrypted keystore. Prints the address.

    \b
    Example:
      muster wallet new validator.json
    """
    from muster.wallet import create_wallet, read_password

    password = read_password(password_file, confirm=True, what="new keystore")
    created = create_wallet(file, password, light=light)
    _print_address(created.address, file, as_json)
    click.echo(f"The key is in {file}: back it up, nobody can restore it.", err=True)


@wallet.command("show")
@click.argument("file", type=FILE)
@json_option
def wallet_show(file: Path, as_json: bool) -> None:
    """Print the address of a keystore; needs no password.

    \b
    Example:
      muster wallet show ~/.muster/worker.json
    """
    from muster.wallet import keystore_address

    _print_address(keystore_address(file), file, as_json)


def _print_address(address: str, file: Path, as_json: bool) -> None:
    if as_json:
        print_json({"address": address, "keystore": str(file)})
    else:
        click.echo(address)


@click.command()
@key_options
@click.option("--run", type=click.IntRange(min=1), required=True, help="The run to stake for.")
@click.option("--node", type=FILE, help="Keystore of the node that signs for the worker.")
@click.option("--node-password-file", type=FILE, help="Password of the node's keystore.")
@click.option("--amount", metavar="TOKENS", help="How much. [default: what is required there]")
@click.option("--faucet", is_flag=True, help="Take tokens and gas money: development chains.")
@yes_option
@json_option
@chain_options
def stake(
    keystore: Path,
    password_file: Path | None,
    node: Path | None,
    node_password_file: Path | None,
    **options: Any,
) -> None:
    """Stake for a run, and become its worker, in one transaction; or add stake there.

    A new worker signs the number of the run's terms; --node names its hot key, the first time. Who
    is in the run already only adds the amount. Prints the transaction's hash.

    \b
    Examples:
      muster stake --run 1 --keystore ~/.muster/worker.json --node ~/.muster/node.json
      muster stake --run 1 --keystore ~/.muster/worker.json --amount 50
    """
    import asyncio

    owner = open_keystore(keystore, password_file)
    node_wallet = open_keystore(node, node_password_file or password_file, "node") if node else None
    asyncio.run(_stake(owner, node_wallet, options))


async def _stake(owner: Wallet, node: Wallet | None, options: dict[str, Any]) -> None:
    from muster.chain import Chain
    from muster.client.preflight import require_cold, require_gas
    from muster.client.quantities import format_tokens, parse_tokens
    from muster.client.stake import (
        add_stake,
        join_run,
        stake_offer,
        take_from_faucet,
        take_gas_money,
        what_next,
    )

    run_id = RunId(options["run"])
    amount = parse_tokens(options["amount"]) if options["amount"] else None
    async with await Chain.connect(*endpoint(options), key=owner.key) as chain:
        await require_cold(chain, owner.address)
        if options["faucet"]:
            await take_gas_money(chain, owner.address)
        await require_gas(chain, owner.address, "stake")
        make_offer = partial(
            stake_offer, chain, owner.address, run_id, amount, with_node=node is not None
        )
        offer = await make_offer()
        missing = offer.amount_wei - offer.balance_wei
        if missing > 0 and options["faucet"]:
            await take_from_faucet(chain, owner.address, missing)
            offer = await make_offer()
        offer.require_funds()
        offer.require_something(with_node=node is not None)
        click.echo(f"account {owner.address}\n{offer.describe()}", err=True)
        if not options["yes"]:
            click.confirm("Stake?", abort=True, err=True)
        if offer.joins:
            receipt = await join_run(chain, owner, node, run_id, offer.amount_wei)
        else:
            receipt = await add_stake(chain, run_id, owner.address, offer.amount_wei)
        next_step = await what_next(chain, owner.address, run_id)
    if options["as_json"]:
        staked = {
            "account": owner.address,
            "run": run_id,
            "amount_tokens": format_tokens(offer.amount_wei),
        }
        print_json({**staked, "transaction": receipt.tx_hash})
    else:
        click.echo(receipt.tx_hash)
    click.echo(next_step, err=True)


@click.command()
@click.argument("action", type=click.Choice(["show", "claim"]), default="show")
@click.option("--run", type=int, required=True, help="The run that pays.")
@click.option("--worker", metavar="ADDRESS", help="Whose rewards. [default: the keystore's]")
@click.option("--keystore", type=FILE, help="Sends the claims and pays their gas; any account.")
@click.option("--password-file", type=FILE, help=PASSWORD_HELP)
@json_option
@chain_options
def rewards(action: str, keystore: Path | None, password_file: Path | None, **options: Any) -> None:
    """Show or claim what a worker has earned. Rewards are always paid to the worker.

    \b
    Examples:
      muster rewards --run 1 --worker 0x...
      muster rewards claim --run 1 --keystore ~/.muster/worker.json
    """
    import asyncio

    if action == "claim" and keystore is None:
        raise ConfigError("a claim needs --keystore", hint="any account that can pay gas will do")
    sender = open_keystore(keystore, password_file) if keystore and action == "claim" else None
    worker = options["worker"]
    if worker is None:
        if keystore is None:
            raise ConfigError("whose rewards?", hint="give --worker ADDRESS or --keystore FILE")
        from muster.wallet import keystore_address

        worker = keystore_address(keystore)
    asyncio.run(_rewards(sender, worker, options))


async def _rewards(sender: Wallet | None, worker: str, options: dict[str, Any]) -> None:
    from muster.chain import Chain, ChainView, find_worker, read_view
    from muster.client.preflight import find_run
    from muster.client.rewards import claim, describe_earnings, facts_of, find_earnings

    key = sender.key if sender else None
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        view = await read_view(chain, ChainView())
        find_run(view, options["run"])
        account = find_worker(view, worker).address
        earnings = await find_earnings(chain, view, RunId(options["run"]), account)
        transactions = await claim(chain, earnings) if sender else []
    report = describe_earnings(earnings, account, transactions)
    if options["as_json"]:
        print_json(report)
    else:
        print_facts(facts_of(report))


@click.group()
def worker() -> None:
    """Generate rollouts and be paid."""


@worker.command("run")
@node_options
@click.option("--worker", metavar="ADDRESS", help="The staking wallet this node works for.")
@click.option("--heartbeat-s", type=float, help="Seconds between signs of life. [default: 10]")
@click.option("--plain", is_flag=True, default=None, help="Log lines, no live view.")
def worker_run(
    config: Path | None, keystore: Path, password_file: Path | None, **flags: Any
) -> None:
    """Lease tickets, generate, sign and upload until stopped; --keystore is the node's.

    A terminal shows a live view, anything else gets a line per event.

    \b
    Example:
      muster worker run --run 1 --keystore node.json --worker 0x... --state-dir worker \\
        --orchestrator http://orchestrator:8600
    """
    from muster.client.settings import WorkerSettings
    from muster.lifecycle import run_until_stopped
    from muster.settings import load_settings
    from muster.telemetry import setup_logging

    settings = load_settings(
        WorkerSettings,
        file=config,
        flags=flags,
        env_prefix=WORKER_VARIABLES,
    )
    node = open_keystore(keystore, password_file, "node")
    setup_logging("worker")
    from muster.client.worker.live import make_watch
    from muster.client.worker.process import run_worker

    watch = make_watch(settings)
    run_until_stopped(lambda: run_worker(settings, node, watch=watch))


worker.add_command(rejoin)
worker.add_command(status)
worker.add_command(submit_direct)


@click.group()
def validator() -> None:
    """Check rollouts and sign verdicts."""


@validator.command("run")
@node_options
@click.option("--file-patience-s", type=float, help="Wait this long for a missing file.")
@click.option(
    "--checks-everything", is_flag=True, default=None, help="Judge uncalled batches as well."
)
def validator_run(
    config: Path | None, keystore: Path, password_file: Path | None, **flags: Any
) -> None:
    """Judge the run's batches until stopped; --keystore is the validator's.

    \b
    Example:
      muster validator run --run 1 --keystore validator.json --state-dir validator \\
        --orchestrator http://orchestrator:8600
    """
    from muster.client.settings import ValidatorSettings
    from muster.lifecycle import run_until_stopped
    from muster.settings import load_settings
    from muster.telemetry import setup_logging

    settings = load_settings(
        ValidatorSettings,
        file=config,
        flags=flags,
        env_prefix=VALIDATOR_VARIABLES,
    )
    account = open_keystore(keystore, password_file, "validator")
    setup_logging("validator")
    from muster.client.validator.process import run_validator

    run_until_stopped(lambda: run_validator(settings, account))


validator.add_command(trap)
validator.add_command(validator_join, "join")
validator.add_command(validator_leave, "leave")


@click.group()
def juror() -> None:
    """Judge disputes of the whole network."""


@juror.command("run")
@engine_choice
@key_options
@chain_options
@click.option("--config", type=FILE, help="TOML file with any of these settings.")
@click.option("--state-dir", type=FOLDER, help="Where the process keeps its state.")
@click.option("--source", multiple=True, metavar="URL", help="Shows work and files; repeatable.")
@relay_option
@click.option("--poll-s", type=float, help="Seconds between looks at the chain.")
@click.option("--confirmations", metavar="N|safe|finalized", help=CONFIRMATIONS_HELP)
def juror_run(
    config: Path | None, keystore: Path, password_file: Path | None, **flags: Any
) -> None:
    """Sit in the cases that draw this account, until stopped; --keystore is the juror's.

    Cases name sources that show their work; --source adds orchestrators that are asked first.

    \b
    Example:
      muster juror run --keystore juror.json --state-dir juror --source http://orchestrator:8600
    """
    from muster.client.settings import JurorSettings
    from muster.lifecycle import run_until_stopped
    from muster.settings import load_settings
    from muster.telemetry import setup_logging

    settings = load_settings(JurorSettings, file=config, flags=flags, env_prefix=JUROR_VARIABLES)
    account = open_keystore(keystore, password_file, "juror")
    setup_logging("juror")
    from muster.client.juror.process import run_juror

    run_until_stopped(lambda: run_juror(settings, account))


juror.add_command(juror_join, "join")
juror.add_command(juror_leave, "leave")
juror.add_command(juror_status, "status")


@click.command()
@click.option("--model", type=FOLDER, required=True, help="Folder of the base model.")
@click.option("--task-set", type=FILE, help="The run's task set; without, the model's own prompts.")
@click.option(
    "--recipe", type=RECIPE, help="The run's: TOML, canonical JSON, preset; without, a plain one."
)
@click.option(
    "--out",
    type=FILE,
    default="calibration.json",
    show_default=True,
    help="Where the calibration is written.",
)
@click.option("--plot", type=FILE, help="Where detection is drawn: .svg or .png.")
@click.option(
    "--engines",
    default="transformers:float32",
    show_default=True,
    help="Engines and number formats, comma-separated; cheats run on the first.",
)
@click.option(
    "--other", "others", multiple=True, help="NAME=FOLDER: a model that a cheat could run instead."
)
@click.option(
    "--profile",
    type=click.Choice(["quick", "full"]),
    default="full",
    show_default=True,
    help="How many honest ways and cheats are measured.",
)
@click.option("--samples", type=int, default=320, show_default=True, help="Samples to measure.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the measurement.")
def calibrate(
    model: Path,
    task_set: Path | None,
    recipe: Path | None,
    out: Path,
    plot: Path | None,
    engines: str,
    others: tuple[str, ...],
    **options: Any,
) -> None:
    """Measure the limits inside which validators take work for honest. Prints the document's hash.

    Writes nothing and fails for a model on which a forger that computed nothing, or a cheat that
    saves most of the work, gets through.

    \b
    Example:
      muster calibrate --model model --task-set tasks.jsonl --recipe recipe.toml
    """
    from rich.console import Console

    from muster.client import calibration as inputs
    from muster.client.calibration_report import make_table, save_drawing
    from muster.client.journal import write_durably
    from muster.protocol.encoding import hex0x

    rules = inputs.PLAIN_RECIPE if recipe is None else inputs.read_recipe(recipe)
    prompts = [] if task_set is None else inputs.prompts_of(inputs.read_task_set(task_set), rules)
    cheaper = inputs.parse_others(others)
    from muster.inference.calibrate import calibrate_model
    from muster.inference.plan import Plan

    plan = Plan(rules, prompts, tuple(engines.split(",")), cheaper, **options)
    found = calibrate_model(model, plan, progress=lambda message: click.echo(message, err=True))
    Console(stderr=True).print(make_table(found.table, rules))
    if plot is not None:
        save_drawing(plot, found.table, rules, f"{model.resolve().name}, {engines}")
    if found.refusal is not None:
        raise found.refusal
    write_durably(out, found.calibration.to_bytes())
    click.echo(hex0x(found.calibration.hash()))
