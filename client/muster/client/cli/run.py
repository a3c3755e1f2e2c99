"""`muster run`: lists runs and their terms, and has the commands of their owners.

`list` and `show` read the chain alone: they need no account and no orchestrator. Each owner's
command prints its effect on the run, the time of that effect and the cost of the gas, asks once,
and sends. With --dry-run it sends nothing, and needs no password.
"""

import asyncio
import textwrap
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import click

from muster.chain import Chain, ChainView, Receipt, RunTerms, RunView, read_view
from muster.client import owning
from muster.client.chain_facts import is_over
from muster.client.cli.options import (
    FILE,
    FOLDER,
    agree,
    chain_options,
    endpoint,
    json_option,
    key_options,
    looking_options,
    open_keystore,
    parse_account,
    together,
    yes_option,
)
from muster.client.cli.printing import print_facts, print_json, print_result, print_table
from muster.client.disputes.cases import bench_words, eligible_jurors
from muster.client.owning import Act, Subject
from muster.client.preflight import GasMoney, find_run, money_for, require_gas
from muster.client.quantities import (
    format_duration,
    format_slashes,
    format_time,
    format_tokens,
    parse_tokens,
)
from muster.client.risks import exposure_of
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Address
from muster.protocol.recipe import Recipe
from muster.wallet import keystore_address

RECENT_S = 3600
"""Period: a worker with work committed within it counts as working."""
COLUMNS = ("run", "state", "price", "version", "age", "workers", "quorum", "funds", "for units")
"""The columns of `muster run list`."""


def state_of(run: RunView, steps: int = 0) -> str:
    """Return whether a run takes submissions, or why not. `steps` is the recipe's number of steps;
    0 for no end, or if not known, because the chain holds only the recipe's hash.
    """
    if run.closed_at:
        return "closed"
    if is_over(run, steps):
        return "finished"
    if run.paused:
        return "paused"
    if run.latest_version is None:
        return "no policy yet"
    return "unfunded" if units_funded(run) == 0 else "open"


def units_funded(run: RunView) -> int | None:
    """Return how many more units a run can pay for; None when units are free."""
    price = run.config.terms.price_per_unit
    return run.available_wei // price if price else None


def describe_run(view: ChainView, run: RunView, now: int, steps: int = 0) -> dict[str, Any]:
    """Return all facts about a run on chain as JSON values; amounts in wei as text.

    `steps` is that of `state_of`.
    """
    version = run.latest_version
    latest = None if version is None else run.checkpoints[version]
    return {
        "run": run.run_id,
        "owner": run.owner,
        "state": state_of(run, steps),
        "steps": steps or None,
        "slashing_paused_until": run.slashing_paused_until if run.is_slashing_paused(now) else None,
        "terms": _terms(run.config.terms),
        "change": None
        if run.proposed is None
        else {"terms": _terms(run.proposed[0]), "effective_at": run.proposed[1]},
        "trainer": run.config.trainer,
        "orchestrator": run.config.orchestrator,
        "terms_number": run.terms_number,
        "validators": [
            {"address": v, "stake_wei": str(view.stake(run.run_id, v).active_wei)}
            for v in run.validators
        ],
        "invited": sorted(run.invited - set(run.validators)),
        "jurors": len(eligible_jurors(view, run)),
        "policy": None
        if latest is None
        else {
            "version": latest.version,
            "published_at": latest.timestamp,
            "age_s": max(now - latest.timestamp, 0),
            "root": "0x" + latest.manifest_root.hex(),
        },
        "workers": _workers(view, run, now),
        "submissions": _submissions(view, run),
        "funds": {
            "available_wei": str(run.available_wei),
            "reserved_wei": str(run.reserved_wei),
            "paid_wei": str(run.paid_wei),
            "units": units_funded(run),
        },
        "exposure": exposure_of(run.run_id, run.config.terms),
        "documents": {
            "base_model": "0x" + run.config.base_model_hash.hex(),
            "task_set": "0x" + run.config.task_set_hash.hex(),
            "recipe": "0x" + run.config.recipe_hash.hex(),
            "calibration": "0x" + run.config.calibration_hash.hex(),
        },
    }


def _terms(terms: RunTerms) -> dict[str, Any]:
    return {
        "price_per_unit_wei": str(terms.price_per_unit),
        "fraud_ppm": terms.fraud_ppm,
        "exact_fraud_ppm": terms.exact_fraud_ppm,
        "quorum": terms.quorum,
    }


def _workers(view: ChainView, run: RunView, now: int) -> dict[str, int]:
    """Return how many workers joined a run, ever had an outcome, and had one within RECENT_S."""
    ever: set[int] = set()
    recent: set[int] = set()
    for batch in view.batches.values():
        if batch.run_id == run.run_id:
            ids = {record.worker_id for record in batch.records or ()}
            ever |= ids
            recent |= ids if batch.committed_at >= now - RECENT_S else set()
    return {"joined": len(run.members), "ever": len(ever), "last_hour": len(recent)}


def _submissions(view: ChainView, run: RunView) -> dict[str, int]:
    counts = {"accepted": 0, "incomplete": 0, "rejected": 0, "fraud": 0, "unjudged": 0, "void": 0}
    for batch in view.batches.values():
        if batch.run_id != run.run_id:
            continue
        if batch.records is None:
            counts["void" if batch.is_void else "unjudged"] += batch.count
        for record in batch.records or ():
            counts[record.verdict.name.lower()] += 1
    return counts


# For people


def row_of(run: dict[str, Any]) -> list[str]:
    """Return a described run as a row of COLUMNS."""
    policy, funds, terms = run["policy"], run["funds"], run["terms"]
    return [
        str(run["run"]),
        run["state"],
        _price(terms),
        str(policy["version"]) if policy else "-",
        format_duration(policy["age_s"]) if policy else "-",
        f"{run['workers']['last_hour']} of {run['workers']['ever']}",
        f"{terms['quorum']} of {len(run['validators'])}",
        f"{int(funds['available_wei']) / 10**18:,.2f}",
        "-" if funds["units"] is None else f"{funds['units']:,}",
    ]


def facts_of(run: dict[str, Any]) -> dict[str, Any]:
    """Return a described run as names and lines for people."""
    policy, funds, terms, change = run["policy"], run["funds"], run["terms"], run["change"]
    done = run["submissions"]
    return {
        "run": f"{run['run']}, {run['state']}",
        "owner": run["owner"],
        "pays": f"{_price(terms)} tokens per unit (a completion token that counts)",
        "funds": f"{format_tokens(int(funds['available_wei']))} tokens left"
        + (f", for {funds['units']:,} units" if funds["units"] is not None else "")
        + f"; {format_tokens(int(funds['paid_wei']))} paid, "
        f"{format_tokens(int(funds['reserved_wei']))} set aside",
        "terms": (
            f"number {run['terms_number']}: workers and validators sign this number when they join"
        ),
        "slashes": _slashes(terms)
        if run["slashing_paused_until"] is None
        else f"nothing until {format_time(run['slashing_paused_until'])}; then {_slashes(terms)}",
        "change": None
        if change is None
        else f"from {format_time(change['effective_at'])}: {_price(change['terms'])} per unit, "
        f"quorum {change['terms']['quorum']}, slashes {_slashes(change['terms'])}",
        "quorum": f"{terms['quorum']} of {len(run['validators'])} validators must agree"
        + ("" if terms["quorum"] <= len(run["validators"]) else ": nothing can be judged yet"),
        "invited": [f"{v}  muster validator join --run {run['run']}" for v in run["invited"]],
        "jurors": bench_words(run["jurors"]),
        "validators": [
            f"{v['address']}  {format_tokens(int(v['stake_wei']))} tokens at stake"
            for v in run["validators"]
        ],
        "policy": "none yet"
        if policy is None
        else f"version {policy['version']}{_of_steps(run)}, "
        f"{format_duration(policy['age_s'])} old, root {policy['root']}",
        "workers": f"{run['workers']['joined']} joined, {run['workers']['ever']} had outcomes, "
        f"{run['workers']['last_hour']} in the last hour",
        "can lose": run["exposure"],
        "submissions": ", ".join(f"{count} {name}" for name, count in done.items() if count),
        "trainer": run["trainer"],
        "orchestrator": run["orchestrator"],
        "documents": [f"{name:12} {value}" for name, value in run["documents"].items()],
    }


def _of_steps(run: dict[str, Any]) -> str:
    return f" of {run['steps']}" if run["steps"] else ""


def _price(terms: dict[str, Any]) -> str:
    return format_tokens(int(terms["price_per_unit_wei"]))


def _slashes(terms: dict[str, Any]) -> str:
    return format_slashes(terms["fraud_ppm"], terms["exact_fraud_ppm"])


# Commands


documents_option = click.option(
    "--documents", type=FOLDER, help="Folder of recipes: tells which runs are finished."
)


@click.command()
@click.option("--all", "everything", is_flag=True, help="Closed runs too.")
@documents_option
@looking_options
def runs_list(everything: bool, as_json: bool, **options: Any) -> None:
    """List runs: what they pay, who works, how long the money lasts. From the chain alone.

    \b
    Examples:
      muster run list
      muster run list --json | jq '.[] | select(.state == "open") | .run'
    """
    found = asyncio.run(_describe(options))
    shown = [run for run in found if everything or run["state"] != "closed"]
    if as_json:
        print_json(shown)
    else:
        print_table(COLUMNS, [row_of(run) for run in shown])


@click.command()
@click.argument("run", type=click.IntRange(min=1))
@documents_option
@looking_options
def runs_show(run: int, as_json: bool, **options: Any) -> None:
    """Show a run: price, funds, slashes, validators and their stakes, policy, documents.

    \b
    Example:
      muster run show 1
    """
    [found] = asyncio.run(_describe(options, run))
    print_result(found, as_json, facts_of(found))


async def _describe(options: dict[str, Any], only: int | None = None) -> list[dict[str, Any]]:
    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, ChainView())
        now = await chain.now()
        shown = list(view.runs.values()) if only is None else [find_run(view, only)]
        folder = options["documents"]
        return [describe_run(view, run, now, steps_of(run, folder)) for run in shown]


def steps_of(run: RunView, documents: Path | None) -> int:
    """Return a run's steps from its recipe in a folder of documents; 0 when that lacks the recipe.

    Raises ConfigError for a file whose hash is not its name.
    """
    path = documents / run.config.recipe_hash.hex() if documents else None
    if path is None or not path.is_file():
        return 0
    data = path.read_bytes()
    if keccak(data) != run.config.recipe_hash:
        raise ConfigError(
            f"{path} is not the recipe that run {run.run_id} pins",
            hint="give the folder that `muster run create` wrote, with --documents",
        )
    return Recipe.from_bytes(data).training.steps


Plan = Callable[[Subject], Awaitable[Act]]
PPM = click.IntRange(0, 10**6)


owner_options = together(
    click.argument("run", type=click.IntRange(min=1)),
    key_options,
    click.option("--dry-run", is_flag=True, help="Say what it does and costs; send nothing."),
    yes_option,
    json_option,
    chain_options,
)
"""RUN and the options of every owner's command."""


@click.command()
@owner_options
@click.argument("amount", metavar="TOKENS")
def fund(amount: str, **options: Any) -> None:
    """Pay tokens into a run, to pay its workers. Anyone may.

    \b
    Example:
      muster run fund 1 500 --keystore owner.json
    """
    wei = parse_tokens(amount)
    _act("fund", options, lambda subject: owning.fund(subject, wei))


@click.command()
@click.option(
    "--slashing",
    "evidence",
    type=FILE,
    help="Stop slashing instead; FILE says why.",
)
@owner_options
def pause(evidence: Path | None, **options: Any) -> None:
    """Take no more submissions until `muster run resume`. The owner only.

    --slashing stops slashing instead, for a time that the network fixed; the orchestrator and the
    validators may do that too. The hash of FILE goes on chain: keep the file.

    \b
    Examples:
      muster run pause 1 --keystore owner.json --dry-run
      muster run pause 1 --keystore owner.json --slashing what-happened.txt
    """
    if evidence is None:
        _act("pause", options, lambda subject: owning.set_paused(subject, True))
        return
    digest = keccak(evidence.read_bytes())
    _act("pause", options, lambda subject: owning.pause_slashing(subject, digest))


@click.command()
@owner_options
def resume(**options: Any) -> None:
    """Take submissions again after `muster run pause`. The owner only.

    \b
    Example:
      muster run resume 1 --keystore owner.json
    """
    _act("resume", options, lambda subject: owning.set_paused(subject, False))


@click.command()
@owner_options
def close(**options: Any) -> None:
    """End a run, for good. The owner only.

    Workers can claim their earnings for some time; `muster run reclaim` pays the owner the rest.

    \b
    Example:
      muster run close 1 --keystore owner.json --dry-run
    """
    _act("close", options, owning.close)


@click.command()
@owner_options
def reclaim(**options: Any) -> None:
    """Pay what is left of a closed run to its owner. Exit code 3: not yet. Anyone may.

    The share that is set aside for workers follows when their time to claim is over.

    \b
    Example:
      muster run reclaim 1 --keystore owner.json
    """
    _act("reclaim", options, owning.reclaim)


@click.command()
@owner_options
def recover(**options: Any) -> None:
    """Free what was set aside for outcomes that were not accepted. Anyone may.

    The tokens can pay workers again; if the run is closed, `muster run reclaim` pays them out.

    \b
    Example:
      muster run recover 1 --keystore owner.json
    """
    _act("recover", options, owning.recover)


@click.command()
@click.option("--price", metavar="TOKENS", help="Pay per unit; half to twice the present price.")
@click.option("--fraud-ppm", type=PPM, metavar="N", help="First fraud, in millionths.")
@click.option("--exact-fraud-ppm", type=PPM, metavar="N", help="Exact fraud, in millionths.")
@click.option("--quorum", type=click.IntRange(min=1), help="Validators that must agree.")
@click.option(
    "--apply", "applies", is_flag=True, help="Apply announced terms once due; anyone may."
)
@click.option("--cancel", "cancels", is_flag=True, help="Drop announced terms.")
@owner_options
def change(
    price: str | None,
    fraud_ppm: int | None,
    exact_fraud_ppm: int | None,
    quorum: int | None,
    applies: bool,
    cancels: bool,
    **options: Any,
) -> None:
    """Announce other terms: they take effect after the network's delay. The owner only.

    \b
    Examples:
      muster run change 1 --keystore owner.json --price 0.002 --dry-run
      muster run change 1 --keystore owner.json --apply
    """
    given: dict[str, int | None] = {
        "price_per_unit": parse_tokens(price) if price else None,
        "fraud_ppm": fraud_ppm,
        "exact_fraud_ppm": exact_fraud_ppm,
        "quorum": quorum,
    }
    if applies + cancels + any(value is not None for value in given.values()) > 1:
        raise click.UsageError("--apply, --cancel and other terms exclude each other")
    if applies:
        _act("apply change", options, owning.apply_change)
    elif cancels:
        _act("cancel change", options, owning.cancel_change)
    else:
        _act("change", options, lambda subject: owning.propose_change(subject, given))


@click.command()
@click.option("--trainer", metavar="ADDR", help="The account that publishes from now on.")
@click.option("--orchestrator", metavar="ADDR", help="The account that commits from now on.")
@owner_options
def rotate(trainer: str | None, orchestrator: str | None, **options: Any) -> None:
    """Replace the run's trainer or its orchestrator, at once. The owner only.

    \b
    Example:
      muster run rotate 1 --keystore owner.json --trainer 0x…
    """
    if (trainer is None) == (orchestrator is None):
        raise click.UsageError("one of --trainer and --orchestrator is needed")
    role, fresh = (
        "trainer" if trainer else "orchestrator",
        parse_account(trainer or orchestrator or ""),
    )
    _act(f"rotate {role}", options, lambda subject: owning.rotate(subject, role, fresh))


@click.command()
@owner_options
@click.argument("validator", metavar="ADDR")
@click.option("--withdraw", "cancels", is_flag=True, help="Take the invitation back.")
def invite(validator: str, cancels: bool, **options: Any) -> None:
    """Invite an account to validate; it takes its seat itself. The owner only.

    The account's own command is `muster validator join`.

    \b
    Example:
      muster run invite 1 0x… --keystore owner.json
    """
    account = parse_account(validator)
    _act("invite", options, lambda subject: owning.invite(subject, account, not cancels))


@click.command()
@owner_options
@click.argument("validator", metavar="ADDR")
def dismiss(validator: str, **options: Any) -> None:
    """Remove a validator. It keeps its stake, and may unbond it at any time. The owner only.

    \b
    Example:
      muster run dismiss 1 0x… --keystore owner.json
    """
    account = parse_account(validator)
    _act("dismiss", options, lambda subject: owning.dismiss(subject, account))


# Carrying out and printing a plan


def _act(name: str, options: dict[str, Any], plan: Plan) -> None:
    asyncio.run(_carry_out(name, options, plan))


async def _carry_out(name: str, options: dict[str, Any], plan: Plan) -> None:

    account, key = keystore_address(options["keystore"]), None
    if not options["dry_run"]:
        key = open_keystore(options["keystore"], options["password_file"]).key
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        view = await read_view(chain, ChainView())
        run = find_run(view, options["run"])
        now = await chain.now()
        act = await plan(Subject(chain, view, run, account, now))
        gas, money = await _rehearse(chain, account, act)
        words = _words(act, now, gas, money)
        report = {"run": options["run"], "action": name, **act.values}
        if options["dry_run"]:
            report |= {"effective_at": now + act.delay_s, "gas": gas, "fee_wei": str(money.wei)}
            _print(report, words, options["as_json"])
            click.echo("nothing was sent", err=True)
            return
        await require_gas(chain, account, f"run {name}", money)
        click.echo("\n".join(lines_of(words)), err=True)
        agree("Go on?", options)
        receipts = [await step.send(chain) for step in act.steps]
    report |= {"effective_at": (_mined_at(receipts) or now) + act.delay_s}
    report |= {"gas": sum(receipt.gas_used for receipt in receipts)}
    hashes = [receipt.tx_hash for receipt in receipts]
    _print(report | {"transactions": hashes}, {"transactions": hashes}, options["as_json"])


async def _rehearse(chain: Chain, account: Address, act: Act) -> tuple[int, GasMoney]:
    """Return the gas of an act and its present cost; raises ContractRevert if it would revert."""
    rehearsal, gas = chain.rehearsed_by(account), 0
    for step in act.steps:
        gas += step.gas if step.gas is not None else (await step.send(rehearsal)).gas_used
    return gas, await money_for(chain, gas, sum(step.size_bytes for step in act.steps))


def _words(act: Act, now: int, gas: int, money: GasMoney) -> dict[str, Any]:
    effect = "at once"
    if act.delay_s:
        effect = f"from {format_time(now + act.delay_s)}, in {format_duration(act.delay_s)}"
    calls = ", ".join(dict.fromkeys(step.call for step in act.steps))
    cost = f"about {gas:,} for {calls}: {money} of the chain's coin"
    return {**act.facts, "takes effect": effect, "gas": cost}


def lines_of(words: Mapping[str, Any]) -> list[str]:
    """Return names and values as lines of 80 columns; empty values are skipped."""
    width = max(map(len, words))
    return [
        line
        for name, value in words.items()
        if value
        for line in textwrap.wrap(
            value,
            80,
            initial_indent=f"{name:{width}}  ",
            subsequent_indent=" " * (width + 2),
            break_long_words=False,
        )
    ]


def _print(report: dict[str, Any], words: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
    elif "transactions" in words:
        print_facts(words)
    else:
        click.echo("\n".join(lines_of(words)))


def _mined_at(receipts: list[Receipt]) -> int:
    """Return the time of the last block, 0 if it is not known; every act ends with an event."""
    return receipts[-1].events[-1].block_timestamp
