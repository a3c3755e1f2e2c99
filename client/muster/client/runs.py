"""`muster run list` and `show`: which runs there are and what they promise, from the chain alone.

Nobody needs an account, an orchestrator or anybody's word for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.ending import is_over
from muster.client.exposure import bench_words, eligible_jurors, exposure_of
from muster.client.options import FOLDER, chain_options, endpoint, json_option
from muster.client.printing import print_facts, print_json, print_table
from muster.client.quantities import format_duration, format_slashes, format_time, format_tokens
from muster.protocol.errors import ConfigError

if TYPE_CHECKING:
    from muster.chain import ChainView, RunTerms, RunView

RECENT_S = 3600
"""Workers with work committed within this time count as working."""
COLUMNS = ("run", "state", "price", "version", "age", "workers", "quorum", "funds", "for units")
"""The columns of `muster run list`."""


def state_of(run: RunView, steps: int = 0) -> str:
    """Return whether a run takes submissions, or why not. `steps` is how many its recipe says; 0
    for no end, or when nobody knows: the chain holds the recipe's hash alone.
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
    """Return how many more units a run can pay; None when units are free."""
    price = run.config.terms.price_per_unit
    return run.available_wei // price if price else None


def describe_run(view: ChainView, run: RunView, now: int, steps: int = 0) -> dict[str, Any]:
    """Return everything the chain says about a run, as JSON values; amounts in wei as text.

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
    """Return how many workers joined a run, ever had an outcome in it, and had one of late."""
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
        "terms": f"number {run['terms_number']}: whoever joins signs this number",
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
    "--documents", type=FOLDER, help="Recipes by their hashes: tells which runs are finished."
)


@click.command()
@click.option("--all", "everything", is_flag=True, help="Closed runs too.")
@documents_option
@json_option
@chain_options
def runs_list(everything: bool, as_json: bool, **options: Any) -> None:
    """List runs: what they pay, who works, how long the money lasts. From the chain alone.

    \b
    Examples:
      muster run list
      muster run list --json | jq '.[] | select(.state == "open") | .run'
    """
    import asyncio

    found = asyncio.run(_describe(options))
    shown = [run for run in found if everything or run["state"] != "closed"]
    if as_json:
        print_json(shown)
    else:
        print_table(COLUMNS, [row_of(run) for run in shown])


@click.command()
@click.argument("run", type=click.IntRange(min=1))
@documents_option
@json_option
@chain_options
def runs_show(run: int, as_json: bool, **options: Any) -> None:
    """Show a run: price, funds, slashes, validators and their stakes, policy, documents.

    \b
    Example:
      muster run show 1
    """
    import asyncio

    [found] = asyncio.run(_describe(options, run))
    if as_json:
        print_json(found)
    else:
        print_facts(facts_of(found))


async def _describe(options: dict[str, Any], only: int | None = None) -> list[dict[str, Any]]:
    from muster.chain import Chain, ChainView, read_view
    from muster.client.preflight import find_run

    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, ChainView())
        now = await chain.now()
        shown = list(view.runs.values()) if only is None else [find_run(view, only)]
        folder = options["documents"]
        return [describe_run(view, run, now, steps_of(run, folder)) for run in shown]


def steps_of(run: RunView, documents: Path | None) -> int:
    """Return a run's steps by its recipe in a folder of documents; 0 when it is not there.

    Raises ConfigError for a file that is not what its name says.
    """
    from muster.protocol.encoding import keccak
    from muster.protocol.recipe import Recipe

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
