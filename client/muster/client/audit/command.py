"""`muster audit`: who did what, and who was slashed why, rebuilt and re-checked from the chain.

No orchestrator is asked. Exits 1 when anything contradicts. `--json` prints one line:

    {"chain_id", "block",
     "runs": [{"run_id", "owner", "paused", "quorum", "validators", "price_wei", "funded_wei",
               "paid_wei", "batches", "judged", "submitted", "accepted", "rejected", "fraud",
               "units", "checkpoints": [{"version", "manifest_root", "beacon", "block", "tx"}]}],
     "workers": [{"address", "worker_id", "node", "status", "stake_wei", "unbonding_wei",
                  "slashed_wei", "submitted", "accepted", "rejected", "fraud", "units",
                  "paid_wei"}],
     "batches": n,
     "slashes": [{"worker", "amount_wei", "reason", "state", "run_id", "batch_id", "position",
                  "offence", "tx", "outcome_tx"}],
     "payments": [{"run_id", "worker", "slots", "units", "amount_wei", "tx"}],
     "checks": [{"name", "passed", "detail"}],
     "contradictions": [{"kind", "detail", "rule", "tx", "block", "batch_id", "position"}]}

Wei are decimal text; `rejected` includes incomplete work; with `--run`, figures are those of that
run while the checks cover the whole chain.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.audit.flags import source_options, wanted_of
from muster.client.audit.verify import verify
from muster.client.options import FILE, FOLDER, json_option
from muster.protocol.errors import ConfigError
from muster.protocol.ids import RunId

if TYPE_CHECKING:
    from muster.client.audit.history import History
    from muster.client.audit.report import AuditReport

FORMATS = ("csv", "parquet", "json")
"""What tables are exported as."""


@click.group(invoke_without_command=True)
@click.option("--run", type=int, help="Show this run only.")
@json_option
@source_options
@click.pass_context
def audit(context: click.Context, /, run: int | None, as_json: bool, **options: Any) -> None:
    """Rebuild and check everything from the chain.

    Without a subcommand: all runs, or one. Exits 1 when anything contradicts.

    \b
    Examples:
      muster audit
      muster audit run 1 --html audit.html
      muster audit worker 0x70997970C51812dc3A010C7d01b50e0d17dc79C8
    """
    if context.invoked_subcommand is not None:
        return
    history = read_history(options)
    finish(history.report(None if run is None else RunId(run)), as_json=as_json)


audit.add_command(verify)


@audit.command("run")
@click.argument("run", type=int)
@click.option("--export", type=FOLDER, help="Write every table into this folder.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="csv",
    show_default=True,
    help="What tables are exported as.",
)
@click.option("--html", type=FILE, help="Write a report that a browser shows.")
@json_option
@source_options
def run_command(
    run: int, as_json: bool, export: Path | None, form: str, html: Path | None, **options: Any
) -> None:
    """Audit one run; export its tables, write a report.

    \b
    Examples:
      muster audit run 1
      muster audit run 1 --export tables --format parquet --html audit.html
      muster audit run 1 --rpc https://one.example --rpc https://two.example --prove chain
    """
    history = read_history(options)
    report = history.report(RunId(run))
    if export is not None:
        from muster.client.audit.export import export_tables

        for path in export_tables(history, report, RunId(run), export, form):
            click.echo(f"wrote {path}", err=True)
    if html is not None:
        from muster.client.audit.html_report import write_html

        write_html(history, report, RunId(run), html)
        click.echo(f"wrote {html}", err=True)
    finish(report, as_json=as_json)


@audit.command("dump")
@click.argument("file", type=FILE)
@json_option
@source_options
def dump_command(file: Path, as_json: bool, **options: Any) -> None:
    """Write down all that an audit reads, for years in which no endpoint has it any more.

    \b
    Examples:
      muster audit dump run-1.dump.gz
      muster audit run 1 --dump run-1.dump.gz
    """
    if options["dump"] is not None:
        raise ConfigError("a dump is written from a chain", hint="leave out --dump")
    history = read_history(options, keeps_blocks=True)
    checks = history.about_source
    found = {
        "file": str(file),
        "blocks": history.save(file),
        "head": {"number": history.head.number, "hash": f"0x{history.head.hash.hex()}"},
        "checks": [{"name": c.name, "passed": c.passed, "detail": c.detail} for c in checks],
    }
    if as_json:
        click.echo(json.dumps(found))
    else:
        for check in checks:
            click.echo(f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.detail}")
        click.echo(f"wrote {file}: {found['blocks']} blocks up to block {history.head.number}")
    if not all(check.passed for check in checks):
        sys.exit(1)


def read_history(options: dict[str, Any], *, keeps_blocks: bool = False) -> History:
    """Return the history that the flags name."""
    import asyncio

    from muster.client.audit.history import read

    return asyncio.run(read(wanted_of(options), keeps_blocks=keeps_blocks))


def finish(report: AuditReport, *, as_json: bool) -> None:
    """Print a report, and exit 1 when it contradicts."""
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        from muster.client.audit.tables import print_report

        print_report(report)
    if not report.passed:
        sys.exit(1)


async def read_report(rpc: str, deployments: Path, run_id: RunId | None = None) -> AuditReport:
    """Return the audit of a chain; raises ChainError, or ConfigError when there is no such run."""
    from muster.client.audit.history import Wanted, read

    return (await read(Wanted((rpc,), deployments))).report(run_id)
