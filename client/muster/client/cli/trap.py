"""`muster validator trap`: try validators with files whose right verdict is known.

For run owners, or whoever has a staked worker to spare. A plan is committed to on chain, a trap
worker follows it, and the report proves what validators made of it.
"""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from muster.chain import Chain, ChainView, read_view
from muster.client.cli.options import (
    FILE,
    begin_process,
    endpoint,
    key_options,
    looking_options,
    node_options,
    open_keystore,
    run_option,
)
from muster.client.cli.printing import print_facts, print_json, print_result, print_table
from muster.client.journal import write_durably
from muster.client.preflight import find_run
from muster.client.quantities import format_share, format_tokens
from muster.client.settings import WorkerSettings
from muster.client.validator.traps import (
    Found,
    PlanOnChain,
    anchor_plan,
    find_anchor,
    find_traps,
    require_before,
    score,
    to_challenge,
)
from muster.lifecycle import run_until_stopped
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import Hash32, RunId, Step, to_address
from muster.protocol.traps import MILLION, TrapPlan

COLUMNS = ("submission", "step:index", "kind", "verdict", "fate", "signed by")


@click.group()
def trap() -> None:
    """Try validators with hidden traps."""


@trap.command("plan")
@key_options
@run_option
@click.option("--worker", metavar="ADDRESS", required=True, help="The staked trap worker.")
@click.option("--rate", type=click.FloatRange(0, 1), default=0.05, help="Share.")
@click.option("--first-step", type=int, default=0, help="First step.")
@click.option("--last-step", type=int, required=True, help="Last step.")
@click.option("--out", type=FILE, required=True, help="Where the secret plan goes.")
@looking_options
def trap_plan(keystore: Path, password_file: Path | None, out: Path, **options: Any) -> None:
    """Draw up a plan, commit to it on chain, and write it to a file; keep that secret.

    Send it from any account but the trap worker's, which it would give away.

    \b
    Example:
      muster validator trap plan --run 1 --worker 0x... --rate 0.05 --last-step 500 \\
        --keystore owner.json --out plan.json
    """
    plan = TrapPlan(
        run_id=RunId(options["run"]),
        worker=to_address(options["worker"]),
        first_step=Step(options["first_step"]),
        last_step=Step(options["last_step"]),
        rate_ppm=round(options["rate"] * MILLION),
        secret=Hash32(os.urandom(32)),
    )
    key = open_keystore(keystore, password_file)
    if key.address == plan.worker:
        raise ConfigError(
            "the trap worker's own account would tell everybody which files to look at",
            hint="commit from another account",
        )
    write_durably(out, json.dumps(plan.to_json(), indent=1).encode() + b"\n")
    out.chmod(0o600)
    transaction = asyncio.run(_anchor(key.key, plan, options))
    report = {"commitment": f"0x{plan.commitment().hex()}", "transaction": transaction}
    words = {"plan": f"{out}: keep it secret until its traps were judged"}
    print_result(report, options["as_json"], report | words)


async def _anchor(key: bytes, plan: TrapPlan, options: dict[str, Any]) -> str:
    async with await Chain.connect(*endpoint(options), key=key) as chain:
        return await anchor_plan(chain, plan)


@trap.command("run")
@node_options
@click.option("--worker", metavar="ADDRESS", help="The staking wallet this node works for.")
@click.option("--heartbeat-s", type=float, help="Seconds between signs of life. [default: 10]")
@click.option("--plan", "plan_file", type=FILE, required=True, help="The secret plan.")
def trap_run(plan_file: Path, **options: Any) -> None:
    """Run the trap worker: `muster worker run`, but for one sample in the planned files.

    Its right verdict there is Rejected: it loses that file's pay, and no stake.

    \b
    Example:
      muster validator trap run --plan plan.json --run 1 --keystore node.json --worker 0x... \\
        --state-dir trap --orchestrator http://orchestrator:8600
    """
    from muster.client.worker.process import run_worker
    from muster.client.worker.trapping import TrapJournal, TrapWorker

    plan = read_plan(plan_file)
    settings, node = begin_process(WorkerSettings, "worker", options)
    settings = settings.model_copy(update={"tickets_per_engine": 1})
    with TrapJournal(settings.state_dir) as traps:
        make_loop = partial(TrapWorker, plan=plan, traps=traps)
        run_until_stopped(lambda: run_worker(settings, node, loop_class=make_loop))


@trap.command("report")
@click.option("--plan", "plan_file", type=FILE, required=True, help="The plan, revealed.")
@click.option("--journal", type=FILE, help="The trap worker's STATE/traps.jsonl.")
@looking_options
def trap_report(plan_file: Path, journal: Path | None, **options: Any) -> None:
    """Say what validators made of a plan's traps, and prove that the plan came first.

    Anybody who has the plan can repeat it. An accepted trap is a wrong verdict: the report says how
    to challenge it. Without the journal, a planned file may be an honest one: re-run it.

    \b
    Example:
      muster validator trap report --plan plan.json --journal trap/traps.jsonl
    """
    plan, laid = read_plan(plan_file), read_laid(journal)
    anchor, found = asyncio.run(_report(plan, laid, options))
    if options["as_json"]:
        print_json(report_json(plan, anchor, found))
    else:
        print_report(plan, anchor, found)


async def _report(
    plan: TrapPlan, laid: dict[tuple[int, int], Any] | None, options: dict[str, Any]
) -> tuple[PlanOnChain, list[Found]]:
    async with await Chain.connect(*endpoint(options)) as chain:
        view = await read_view(chain, ChainView())
        find_run(view, plan.run_id)
        found = find_traps(view, plan, laid)
        return require_before(await find_anchor(chain, plan), view, found), found


def read_plan(path: Path) -> TrapPlan:
    """Return a plan; raises ConfigError when the file has none."""
    try:
        return TrapPlan.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, EncodingError) as error:
        raise ConfigError(
            f"cannot read the plan {path}: {error}", hint="muster validator trap plan writes one"
        ) from error


def read_laid(path: Path | None) -> dict[tuple[int, int], Any] | None:
    """Return what a trap worker noted, by slot; raises ConfigError when it cannot be read."""
    if path is None:
        return None
    try:
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        return {(int(each["step"]), int(each["index"])): each for each in entries}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the journal {path}: {error}") from error


def report_json(plan: TrapPlan, anchor: PlanOnChain, found: list[Found]) -> dict[str, Any]:
    """Return a report as JSON values."""
    return {
        "commitment": f"0x{plan.commitment().hex()}",
        "committed": {"block": anchor.block_number, "transaction": anchor.tx_hash},
        "traps": [
            {
                "submission": each.name,
                "step": each.record.step,
                "index": each.record.index,
                "kind": each.trap.kind,
                "verdict": each.record.verdict.name.lower(),
                "fate": each.fate,
                "signers": list(each.signers),
                "slashed_wei": {who: str(wei) for who, wei in each.slashed.items()},
            }
            for each in found
        ],
        "validators": score(found),
    }


def print_report(plan: TrapPlan, anchor: PlanOnChain, found: list[Found]) -> None:
    """Print a report for people, with what to do about wrong verdicts."""
    print_facts(
        {
            "plan": f"worker {plan.worker}, steps {plan.first_step} to {plan.last_step}, "
            f"{format_share(plan.rate_ppm)} of its files",
            "committed": f"block {anchor.block_number}, {anchor.tx_hash}: before every file below",
        }
    )
    rows = [
        [
            each.name,
            f"{each.record.step}:{each.record.index}",
            each.trap.kind,
            each.record.verdict.name.lower(),
            each.fate,
            ", ".join(who[:10] for who in each.signers),
        ]
        for each in found
    ]
    print_table(COLUMNS, rows)
    for who, counts in score(found).items():
        click.echo(f"{who}  caught {counts['caught']}, missed {counts['missed']}")
    for each in found:
        for who, wei in each.slashed.items():
            click.echo(f"{who}  slashed {format_tokens(wei)} tokens for accepting {each.name}")
    for each in to_challenge(found):
        click.echo(
            f"challenge it: muster dispute open {each.name} --ruling rejected --keystore FILE "
            "--wait"
        )
