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
     "checks": [{"name", "passed", "open", "detail", "notes": [text],
                 "not_rerun": [{"batch_id", "position", "why", "how"}]}],
     "contradictions": [{"kind", "detail", "rule", "tx", "block", "batch_id", "position"}],
     "faults": [{"offence", "account", "batch_id", "words", "tx", "refused"}]}

Amounts in wei are decimal text. `faults` (of `muster audit run`) are self-proving faults not yet
reported; with `--report`, `tx` is the report's transaction. `not_rerun` lists the verdicts that
could not be run again; it contradicts nothing. A check is `open` when part of it is undecided.
`rejected` includes incomplete work. With `--run`, figures and checks cover that run and what all
runs share: contracts, their sums, workers, the jurors' bench.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.client.audit.contradictions import ProofLevel
from muster.client.audit.print_tables import (
    print_faults,
    print_lineage,
    print_report,
    print_slash,
    print_submission,
    print_worker,
)
from muster.client.cli.options import (
    FILE,
    FOLDER,
    HOME,
    PASSWORD_HELP,
    chain_options,
    endpoint,
    engine_choice,
    json_option,
    looking_options,
    open_keystore,
    tell_what_is_sent,
    together,
)
from muster.client.cli.printing import print_json, printable
from muster.protocol.errors import ConfigError
from muster.protocol.ids import PolicyVersion, RunId
from muster.settings import urls_of
from muster.settings.flags import RELAY_HELP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from muster.chain.doubles import Fault
    from muster.client.audit.contradictions import Check
    from muster.client.audit.evidence import EvidenceFolders, Reported
    from muster.client.audit.history import ChainHistory, HistorySource
    from muster.client.audit.report import AuditReport

dump_option = together(
    chain_options, click.option("--dump", type=FILE, help="Read this dump instead of a chain.")
)
"""Options that name the chain, or its dump."""
source_options = together(
    dump_option,
    click.option(
        "--prove",
        type=click.Choice([level.value for level in ProofLevel]),
        default=ProofLevel.BLOCKS.value,
        help="What the endpoint must prove by block hashes.",
    ),
    click.option("--since", type=FILE, help="An earlier dump that must still hold."),
)
"""Options that name the source of the history."""


def wanted_of(options: Mapping[str, Any], run: int | None = None) -> HistorySource:
    """Return the source of the history; blocks are proven unless a flag says otherwise. With a
    run, the contracts are asked only about that run and what all runs share.
    """
    from muster.client.audit.history import HistorySource

    since = options.get("since")
    if options["dump"] is not None and (options["rpc"] or since):
        raise ConfigError(
            "--dump replaces the chain, so it excludes --rpc and --since",
            hint="leave out --rpc and --since, or --dump",
        )
    rpc, deployments = endpoint(options)
    return HistorySource(
        rpcs=tuple(urls_of(rpc)),
        deployments=deployments,
        dump=options["dump"],
        proof=ProofLevel(options.get("prove", "blocks")),
        since=since,
        run_id=None if run is None else RunId(run),
    )


def read_history(
    options: Mapping[str, Any], run: int | None = None, *, dump_to: Path | None = None
) -> ChainHistory:
    """Return the history that the flags name, and write its dump to a file."""
    from muster.client.audit.history import read

    return asyncio.run(read(wanted_of(options, run), dump_to=dump_to))


evidence_option = click.option(
    "--evidence", type=FOLDER, multiple=True, help="Copy of the evidence; repeatable."
)


copy_options = together(
    evidence_option, click.option("--relay", multiple=True, metavar="URL", help=RELAY_HELP)
)
"""Options that name copies of the evidence."""


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
    history = read_history(options, run)
    finish(history.report(None if run is None else RunId(run)), as_json=as_json)


@audit.command("run")
@click.argument("run", type=int)
@click.option("--export", type=FOLDER, help="Write every table into this folder.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "parquet"]),
    default="csv",
    help="What tables are exported as.",
)
@click.option("--sample", type=click.IntRange(1), help="Run so many verdicts again.")
@click.option("--all", "runs_all", is_flag=True, help="Run all verdicts again.")
@click.option("--seed", type=click.IntRange(0), help="Draws the sample. [default: random]")
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
@engine_choice
@json_option
@source_options
def run_command(run: int, as_json: bool, **options: Any) -> None:
    """Audit one run: export, run verdicts again from evidence.

    \b
    Examples:
      muster audit run 1 --export tables --format parquet
      muster audit run 1 --rpc http://one --rpc http://two --prove chain
      muster audit run 1 --evidence files --evidence documents --sample 20
    """
    from muster.client.audit.evidence import EvidenceFolders

    run_id, store = RunId(run), EvidenceFolders(options["evidence"])
    _require_reporter(options)
    history = read_history(options, run)
    history.require_run(run_id)
    history = replace(
        history,
        about_source=(*history.about_source, *_extra_checks(history, run_id, store, options)),
    )
    report = history.report(run_id)
    if options["export"] is not None:
        from muster.client.audit.write_tables import export_tables

        for path in export_tables(history, report, run_id, options["export"], options["form"]):
            click.echo(f"wrote {path}", err=True)
    finish(report, _faults(history, run_id, store, options), as_json=as_json)


def _require_reporter(options: dict[str, Any]) -> None:
    """Raise ConfigError unless --report has a chain and a key, or --keystore is missing too."""
    if options["report"] and options["dump"] is not None:
        raise ConfigError(
            "--report needs a chain, not a dump", hint="leave out --dump, or --report"
        )
    if options["report"] != (options["keystore"] is not None):
        raise ConfigError(
            "--report and --keystore need each other",
            hint="--report and --keystore FILE together; without both, faults are only named",
        )


def _faults(
    history: ChainHistory, run_id: RunId, store: EvidenceFolders, options: dict[str, Any]
) -> list[Reported]:
    """Return the unreported faults, each with the result of its report if it was reported now."""
    from muster.client.audit.evidence import Reported, find_faults

    faults = find_faults(history.ledger, history.domain, run_id, store)
    if not faults or not options["report"]:
        return [Reported(fault) for fault in faults]
    key = open_keystore(options["keystore"], options["password_file"]).key
    return asyncio.run(_report(faults, key, options))


async def _report(faults: list[Fault], key: bytes, options: dict[str, Any]) -> list[Reported]:
    from muster.chain import Chain
    from muster.client.audit.evidence import report_faults

    wanted = wanted_of(options)
    tell_what_is_sent(is_repeatable=True)
    async with await Chain.connect(wanted.rpcs[0], wanted.deployments, key=key) as chain:
        return await report_faults(chain, faults)


def _extra_checks(
    history: ChainHistory, run_id: RunId, store: EvidenceFolders, options: dict[str, Any]
) -> Iterator[Check]:
    """Yield the checks of off-chain evidence: validators' statements, verdicts run again."""
    from muster.client.audit.calls import check_statements

    yield from check_statements(history, run_id, store, options["call_timeout_s"])
    if options["sample"] or options["runs_all"]:
        yield from _rerun(history, run_id, store, options)


def _rerun(
    history: ChainHistory, run_id: RunId, store: EvidenceFolders, options: dict[str, Any]
) -> list[Check]:
    """Return the checks that verdicts run again equal those recorded, and that signers checked."""
    from muster.client.audit.outcome_table import tabulate
    from muster.client.audit.reexecution import Copies, draw, require_rows, rerun_verdicts
    from muster.client.disputes.rerun import SILENCE_S
    from muster.inference.loading import engine_of

    if not options["evidence"]:
        raise ConfigError(
            "--evidence is missing: verdicts are run again from evidence",
            hint="give --evidence FOLDER: an orchestrator's files and documents, or evidence "
            "bundles",
        )
    sample = None if options["runs_all"] else options["sample"]
    # Whoever knows the seed before the outcomes are posted knows which are not run again.
    seed = secrets.randbits(32) if options["seed"] is None else options["seed"]
    rows = draw(tabulate(history.ledger), run_id, sample, seed)
    require_rows(rows, run_id)
    cache = HOME.expanduser() / "doctor" / "policies"
    copies = Copies(store, options["relay"], cache, options["orchestrator"])
    engine = engine_of(options, silence_s=SILENCE_S)

    def show(done: int, of: int, line: str) -> None:
        click.echo(printable(f"{done}/{of} {line}"), err=True)

    first, *more = asyncio.run(rerun_verdicts(history, run_id, rows, copies, engine, progress=show))
    if sample is not None:
        first = replace(first, detail=f"{first.detail}; drawn with --seed {seed}")
    return [first, *more]


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
        raise ConfigError("a dump cannot be written from another dump", hint="leave out --dump")
    history = read_history(options, dump_to=file)
    checks = history.about_source
    found = {
        "file": str(file),
        "blocks": history.dumped,
        "head": {"number": history.head.number, "hash": f"0x{history.head.hash.hex()}"},
        "checks": [check.to_json() for check in checks],
    }
    if as_json:
        print_json(found)
    else:
        for check in checks:
            click.echo(printable(f"{check.word:4} {check.name}: {check.detail}"))
        click.echo(f"wrote {file}: {found['blocks']} blocks up to block {history.head.number}")
    if not all(check.passed for check in checks):
        sys.exit(1)


def finish(report: AuditReport, faults: Sequence[Reported] | None = None, *, as_json: bool) -> None:
    """Print a report; exit 1 when it contradicts. `faults` is None if none were searched for."""
    if as_json:
        found = report.to_json()
        if faults is not None:
            found["faults"] = [fault.to_json() for fault in faults]
        print_json(found)
    else:
        print_report(report)
        print_faults(faults or ())
    if not report.passed:
        sys.exit(1)


# One thing


@audit.command("worker")
@click.argument("worker", metavar="WORKER")
@json_option
@source_options
def worker_command(worker: str, as_json: bool, **options: Any) -> None:
    """Show what a worker did, was paid and was slashed for, checked.

    It is named by its address, its node's, six digits of either, or its work.

    \b
    Example:
      muster audit worker 0x70997970C51812dc3A010C7d01b50e0d17dc79C8
    """
    from muster.client.audit.report import worker_facts

    _show(worker_facts(read_history(options), worker), print_worker, as_json=as_json)


@audit.command("submission")
@click.argument("submission")
@json_option
@source_options
def submission_command(submission: str, as_json: bool, **options: Any) -> None:
    """Show what the chain proves about one outcome.

    It is named as BATCH:POSITION, by its file's hash or a transaction's, or six digits of one.

    \b
    Example:
      muster audit submission 12:3
    """
    from muster.client.audit.report import submission_facts

    _show(submission_facts(read_history(options), submission), print_submission, as_json=as_json)


@audit.command("slashes")
@json_option
@source_options
def slashes_command(as_json: bool, **options: Any) -> None:
    """Show every slash, with the outcome and the transactions that it rests on.

    \b
    Example:
      muster audit slashes
    """
    from muster.client.audit.report import slash_facts

    def show(found: dict[str, Any]) -> None:
        for slash in found["slashes"]:
            print_slash(slash)
            click.echo()

    _show(slash_facts(read_history(options)), show, as_json=as_json)


def _show(found: dict[str, Any], show: Callable[[dict[str, Any]], None], *, as_json: bool) -> None:
    """Print what was found as JSON, or as `show` does, with the contradictions; exit 1 when there
    are some.
    """
    contradictions = found["contradictions"]
    if as_json:
        print_json(found)
    else:
        show(found)
        for each in contradictions:
            line = f"FAIL {each['kind']}: {each['detail']} (the rule: {each['rule']})"
            click.echo(printable(line))
        click.echo(f"{len(contradictions) or 'no'} contradictions")
    if contradictions:
        sys.exit(1)


# Where a policy comes from


@audit.command("lineage")
@click.option("--run", type=int, required=True, help="The run.")
@click.option("--version", type=int, required=True, help="The policy version.")
@copy_options
@json_option
@source_options
def lineage_command(run: int, version: int, as_json: bool, **options: Any) -> None:
    """Show which files, workers and verdicts went into a policy version.

    Manifests may come from anybody: their roots are on chain. Without those of older versions
    their steps are shown together. --json lists every file.

    \b
    Examples:
      muster audit lineage --run 1 --version 3 --relay http://127.0.0.1:8700
      muster audit lineage --run 1 --version 3 --evidence origin --json
    """
    from muster.client.audit.evidence import EvidenceFolders
    from muster.client.audit.lineage import find_manifests, max_async_level_of, trace

    run_id, wanted = RunId(run), PolicyVersion(version)
    history = read_history(options, run)
    of_run, _ = history.version_of(run_id, wanted)
    store = EvidenceFolders(options["evidence"])
    manifest_of = asyncio.run(find_manifests(store, options["relay"], of_run, wanted))
    level = max_async_level_of(store, of_run.config.recipe_hash)
    found = trace(history.ledger, run_id, wanted, manifest_of, max_async_level=level)
    if as_json:
        print_json(found.to_json())
    else:
        print_lineage(found, knows_recipe=level is not None)
    if found.contradictions or not all(check.passed for check in history.about_source):
        sys.exit(1)


# One bundle


@audit.command("verify")
@click.argument("submission")
@click.option("--bundle", type=FILE, required=True, help="Its evidence bundle.")
@click.option("--policy", type=FOLDER, help="The policy's files, if the bundle lacks them.")
@click.option("--offline", is_flag=True, help="Ask no chain: print the bundle's facts instead.")
@engine_choice
@looking_options
def verify_command(submission: str, as_json: bool, **options: Any) -> None:
    """Re-run a verdict from its evidence bundle.

    The submission is named as BATCH:POSITION, by its file's hash or a transaction's, or six digits
    of one; with --offline not by a transaction.

    Every check says agree or contradict. muster explain --save writes bundles.

    \b
    Examples:
      muster audit verify 12:3 --bundle evidence.zip
      muster audit verify 12:3 --bundle evidence.zip --offline --json
    """
    from muster.client.audit.rerun_bundle import print_verdict, to_json, verify

    evidence, facts, checks = asyncio.run(verify(submission, options))
    found = to_json(evidence, facts, checks)
    if as_json:
        print_json(found)
    else:
        print_verdict(found, checks, facts if options["offline"] else None)
    if not found["agrees"]:
        sys.exit(1)
