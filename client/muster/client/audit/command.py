"""`muster audit`: who did what, and who was slashed why, rebuilt and re-checked from the chain.

No orchestrator is asked. Exits 1 when anything contradicts. `--json` prints one line:

    {"chain_id", "block",
     "runs": [{"run_id", "owner", "paused", "quorum", "validators", "price_wei", "funded_wei",
               "paid_wei", "batches", "judged", "submitted", "accepted", "rejected", "fraud",
               "units", "checkpoints": [{"version", "manifest_root", "beacon", "block", "tx"}]}],
     "workers": [{"run_id", "address", "worker_id", "node", "status", "stake_wei", "unbonding_wei",
                  "slashed_wei", "submitted", "accepted", "rejected", "fraud", "units",
                  "paid_wei"}],
     "batches": n,
     "slashes": [{"worker", "amount_wei", "reason", "state", "run_id", "batch_id", "position",
                  "offence", "tx", "outcome_tx"}],
     "payments": [{"run_id", "worker", "slots", "units", "amount_wei", "tx"}],
     "checks": [{"name", "passed", "detail", "notes": [text],
                 "not_rerun": [{"batch_id", "position", "why", "how"}]}],
     "contradictions": [{"kind", "detail", "rule", "tx", "block", "batch_id", "position"}],
     "faults": [{"offence", "account", "batch_id", "words", "tx", "refused"}]}

Wei are decimal text; `faults`, of `muster audit run`, are those that prove themselves and that
nobody had reported: `tx` did, with `--report`; `not_rerun`, where verdicts were run again, has
those that could not be and contradicts nothing; `rejected` includes incomplete work; with `--run`,
figures are those of that run while the checks cover the whole chain.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.audit.flags import copy_options, read_history, source_options
from muster.client.audit.lineage_command import lineage
from muster.client.audit.lookup_commands import slashes, submission, worker
from muster.client.audit.verify import verify
from muster.client.audit.watch_command import watch
from muster.client.options import (
    FILE,
    FOLDER,
    HOME,
    PASSWORD_HELP,
    engine_options,
    json_option,
    open_keystore,
)
from muster.protocol.errors import ConfigError
from muster.protocol.ids import RunId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from muster.client.audit.contradictions import Check
    from muster.client.audit.evidence import EvidenceStore
    from muster.client.audit.faults import Fault, Reported
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
      muster audit --run 1 --json
    """
    if context.invoked_subcommand is not None:
        return
    history = read_history(options)
    finish(history.report(None if run is None else RunId(run)), as_json=as_json)


for command in (worker, submission, slashes, watch, lineage, verify):
    audit.add_command(command)


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
@click.option("--sample", type=click.IntRange(1), help="Run so many verdicts again.")
@click.option("--all", "runs_all", is_flag=True, help="Run all verdicts again.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the sample.")
@click.option("--database", type=FILE, help="An orchestrator's, held against the chain.")
@click.option("--orchestrator", metavar="URL", help="Asked for proofs of checking.")
@click.option(
    "--call-timeout-s",
    type=click.IntRange(1),
    help="How long the orchestrator says that it waits for a validator.",
)
@click.option("--report", is_flag=True, help="Have doubly signed outcomes and work punished.")
@click.option("--keystore", type=FILE, help="With --report: who pays the gas.")
@click.option("--password-file", type=FILE, help=PASSWORD_HELP)
@copy_options
@engine_options
@json_option
@source_options
def run_command(run: int, as_json: bool, **options: Any) -> None:
    """Audit one run: export, report, run verdicts again from evidence.

    \b
    Examples:
      muster audit run 1 --export tables --format parquet --html audit.html
      muster audit run 1 --rpc http://one --rpc http://two --prove chain
      muster audit run 1 --evidence files --evidence documents --sample 20
    """
    from muster.client.audit.evidence import EvidenceStore

    run_id, store = RunId(run), EvidenceStore(options["evidence"])
    _require_reporter(options)
    history = read_history(options)
    history.require_run(run_id)
    history = replace(
        history,
        about_source=(*history.about_source, *_extra_checks(history, run_id, store, options)),
    )
    report = history.report(run_id)
    _write_files(history, report, run_id, options)
    finish(report, _faults(history, run_id, store, options), as_json=as_json)


def _require_reporter(options: dict[str, Any]) -> None:
    """Raise ConfigError unless what --report needs is there, and nothing else."""
    if options["report"] and options["dump"] is not None:
        raise ConfigError("faults are reported on a chain", hint="leave out --dump, or --report")
    if options["report"] != (options["keystore"] is not None):
        raise ConfigError(
            "a report on chain is signed",
            hint="--report and --keystore FILE together; without both, faults are only named",
        )


def _faults(
    history: History, run_id: RunId, store: EvidenceStore, options: dict[str, Any]
) -> list[Reported]:
    """Return the faults that nobody had reported, and what came of reporting them now."""
    import asyncio

    from muster.client.audit.faults import Reported, find_faults

    faults = find_faults(history.ledger, history.domain, run_id, store)
    if not faults or not options["report"]:
        return [Reported(fault) for fault in faults]
    key = open_keystore(options["keystore"], options["password_file"]).key
    return asyncio.run(_report(faults, key, options))


async def _report(faults: list[Fault], key: bytes, options: dict[str, Any]) -> list[Reported]:
    from muster.chain import Chain
    from muster.client.audit.faults import report_faults
    from muster.client.audit.flags import wanted_of

    wanted = wanted_of(options)
    async with await Chain.connect(wanted.rpcs[0], wanted.deployments, key=key) as chain:
        return await report_faults(chain, faults)


def _extra_checks(
    history: History, run_id: RunId, store: EvidenceStore, options: dict[str, Any]
) -> Iterator[Check]:
    """Yield the checks of what is not on chain: verdicts run again, a database."""
    from muster.client.audit.statements import check_statements

    yield from check_statements(history, run_id, store, options["call_timeout_s"])
    if options["sample"] or options["runs_all"]:
        yield from _rerun(history, run_id, store, options)
    if options["database"] is not None:
        from muster.client.audit.database import check_database

        yield check_database(options["database"], history.ledger, run_id, history.domain)


def _rerun(
    history: History, run_id: RunId, store: EvidenceStore, options: dict[str, Any]
) -> list[Check]:
    """Return whether verdicts run again are the recorded ones, and whether signers had checked."""
    import asyncio

    from muster.client.audit.reexecution import Copies, draw, require_rows, rerun_verdicts
    from muster.client.audit.table import tabulate
    from muster.client.doctor.command import load_transformers

    if not options["evidence"]:
        raise ConfigError(
            "verdicts are run again from evidence",
            hint="--evidence FOLDER: an orchestrator's files and documents, bundles",
        )
    sample = None if options["runs_all"] else options["sample"]
    rows = draw(tabulate(history.ledger), run_id, sample, options["seed"])
    require_rows(rows, run_id)
    cache = HOME.expanduser() / "doctor" / "policies"
    copies = Copies(store, options["relay"], cache, options["orchestrator"])
    load = load_transformers(options["threads"] or 1)
    engine = load(options["dtype"] or "float32", options["device"] or "cpu")

    def show(done: int, of: int, line: str) -> None:
        click.echo(f"{done}/{of} {line}", err=True)

    return asyncio.run(rerun_verdicts(history, run_id, rows, copies, engine, progress=show))


def _write_files(
    history: History, report: AuditReport, run_id: RunId, options: dict[str, Any]
) -> None:
    if options["export"] is not None:
        from muster.client.audit.export import export_tables

        for path in export_tables(history, report, run_id, options["export"], options["form"]):
            click.echo(f"wrote {path}", err=True)
    if options["html"] is not None:
        from muster.client.audit.html_report import write_html

        write_html(history, report, run_id, options["html"])
        click.echo(f"wrote {options['html']}", err=True)


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
        "checks": [check.to_json() for check in checks],
    }
    if as_json:
        click.echo(json.dumps(found))
    else:
        for check in checks:
            click.echo(f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.detail}")
        click.echo(f"wrote {file}: {found['blocks']} blocks up to block {history.head.number}")
    if not all(check.passed for check in checks):
        sys.exit(1)


def finish(report: AuditReport, faults: Sequence[Reported] | None = None, *, as_json: bool) -> None:
    """Print a report, and exit 1 when it contradicts; `faults` were looked for unless None."""
    if as_json:
        found = report.to_json()
        if faults is not None:
            found["faults"] = [fault.to_json() for fault in faults]
        click.echo(json.dumps(found))
    else:
        from muster.client.audit.tables import print_faults, print_report

        print_report(report)
        print_faults(faults or ())
    if not report.passed:
        sys.exit(1)


async def read_report(rpc: str, deployments: Path, run_id: RunId | None = None) -> AuditReport:
    """Return the audit of a chain; raises ChainError, or ConfigError when there is no such run."""
    from muster.client.audit.history import Wanted, read

    return (await read(Wanted((rpc,), deployments))).report(run_id)
