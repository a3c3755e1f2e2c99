"""Prints the result of an audit on a terminal: the result first, in tokens and 80 columns.

A new column is a field of the row in `muster.client.audit.report` and a name in PRINTED_COLUMNS.
The tables of --export have every field of their rows (`muster.client.audit.write_tables`).
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from muster.client.cli.printing import WIDTH, print_facts, print_table, printable
from muster.client.quantities import format_tokens

if TYPE_CHECKING:
    from muster.client.audit.contradictions import Check, NotRerun
    from muster.client.audit.evidence import Reported
    from muster.client.audit.lineage import Ancestor, PolicyLineage
    from muster.client.audit.report import AuditReport

SHOWN_NOTES = 5
"""Notes of one check that are printed."""
SHOWN_CONTRADICTIONS = 20
"""Contradictions that are printed."""
PRINTED_COLUMNS = {
    "runs": "run_id policy batches accepted rejected fraud units funded_wei paid_wei",
    "workers": "address run_id status stake_wei accepted rejected fraud units paid_wei",
    "policies": "run_id version block manifest_root tx",
    "payments": "worker run_id slots units amount_wei tx",
    "outcomes": "outcome run_id step policy units verdict stands file",
}
"""Columns that each table shows: fields of its rows, which `audit.report` defines."""
HEADINGS = {"address": "worker", "amount_wei": "tokens", "tx": "transaction"}
"""Headings that differ from the column's name."""
USES = {
    "offered": "paid, and offered to training",
    "overturned": "offered, but accepted by mistake, as a jury found",
    "repeated": "passed over: repeated",
    "stale": "passed over: stale",
}
"""Uses of a file in a lineage, in words."""
SHOWN_OUTCOMES = 30
"""Newest outcomes of a worker that are printed; --json has all."""
SHOWN_POLICIES = 8
"""Newest policy versions that are printed."""


def print_report(report: AuditReport) -> None:
    """Print the result first, then the contradictions, the checks and the tables."""
    _fold(f"chain {report.chain_id}, read up to block {report.block}")
    if report.others:
        runs = ", ".join(str(run.run_id) for run in report.runs)
        _fold(f"run {runs} alone; {report.others} other runs were not checked: muster audit does")
    _fold(_result(report), fg="green" if report.passed else "red", bold=True)
    for check in report.checks:
        if check.not_rerun:
            _fold(check.detail)
    _print_contradictions(report)
    for check in report.checks:
        _print_not_rerun(check)
    click.echo()
    for check in report.checks:
        _print_check(check)
    for title, rows in _tables(report).items():
        _print_table(title, rows)
    if report.losses:
        _fold("\nslashes", bold=True)
    for loss in report.losses:
        _fold(f"{short(loss.owner)}  {loss.words(format_tokens)}", indent=2)
    _fold("\n--json has whole hashes, amounts in wei, and everything that is left out here")


def print_faults(faults: Sequence[Reported]) -> None:
    """Print self-proving faults, with the result of a report or the command for one."""
    unreported = [each.fault for each in faults if each.tx is None and each.refused is None]
    for each in faults:
        state = f"reported, {each.tx}" if each.tx else f"not reported: {each.refused}"
        words = each.fault.words + ("" if each.fault in unreported else f": {state}")
        _fold(f"\n{words}", indent=2)
    if unreported:
        run_id = unreported[0].batch.run_id
        _fold(
            f"\nanybody can have that punished: muster audit run {run_id} --report "
            "--keystore FILE, with the same --evidence",
            indent=2,
        )


def _result(report: AuditReport) -> str:
    checks, failed = len(report.checks), sum(not check.passed for check in report.checks)
    count = sum(check.count for check in report.checks)
    if report.passed:
        return f"no contradiction in {checks} checks"
    if not count:
        return f"{failed} of {checks} checks could not be made"
    things = "contradiction" if count == 1 else "contradictions"
    return f"{count} {things}: {failed} of {checks} checks failed"


def _print_contradictions(report: AuditReport) -> None:
    for found in report.contradictions[:SHOWN_CONTRADICTIONS]:
        _fold(f"\n{found.kind}: {found}", indent=2)
        _fold(f"  the rule is that {found.kind.rule}", indent=2)
    if (more := sum(check.count for check in report.checks) - SHOWN_CONTRADICTIONS) > 0:
        _fold(f"\nand {more} more contradictions")


def _print_not_rerun(check: Check) -> None:
    """Print the outcomes that could not be run again, grouped by what would help."""
    groups: dict[str, list[NotRerun]] = {}
    for each in check.not_rerun:
        groups.setdefault(each.how, []).append(each)
    for how, members in groups.items():
        first = f"{members[0].batch_id}:{members[0].position}: {members[0].why}"
        _fold(f"\n{len(members)} cannot be run again, such as {first}", indent=2)
        _fold(f"  {how}", indent=2)


def _print_check(check: Check) -> None:
    found = f"{check.count} contradict" if check.count and not check.not_rerun else check.detail
    _fold(f"{check.word:4} {check.name}: {found}", indent=5)
    for note in check.notes[:SHOWN_NOTES]:
        _fold(f"note {note}", indent=5)
    if (more := len(check.notes) - SHOWN_NOTES) > 0:
        _fold(f"note {more} more: --json has them")


def _fold(text: str, *, indent: int = 0, **style: Any) -> None:
    """Print a text folded between words; hashes stay whole, so that they can be copied."""
    lead = text[: len(text) - len(text.lstrip("\n"))]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    lines = textwrap.wrap(
        printable(text.lstrip("\n")),
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    click.secho(lead + "\n".join(lines), **style)


def _tables(report: AuditReport) -> dict[str, list[dict[str, Any]]]:
    return {
        "runs": [
            {
                **asdict(run),
                "policy": run.checkpoints[-1].version if run.checkpoints else "-",
                "batches": f"{run.judged}/{run.batches}",
            }
            for run in report.runs
        ],
        "workers": [asdict(worker) for worker in report.workers],
        "policies": [
            {"run_id": run.run_id, **asdict(checkpoint)}
            for run in report.runs
            for checkpoint in run.checkpoints[-SHOWN_POLICIES:]
        ],
        "payments": [asdict(payment) for payment in report.payments],
    }


def _print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with the columns of PRINTED_COLUMNS; nothing without rows."""
    if not rows:
        return
    names = PRINTED_COLUMNS[title].split()
    plain = (name.removesuffix("_wei").removesuffix("_id").replace("_", " ") for name in names)
    headings = [HEADINGS.get(name, words) for name, words in zip(names, plain, strict=True)]
    click.secho(f"\n{title}", bold=True)
    print_table(headings, [[_cell(name, row[name]) for name in names] for row in rows])


def _cell(name: str, value: Any) -> str:
    if name.endswith("_wei"):
        return f"{int(value) / 10**18:,.6g}"
    return short(value) if str(value).startswith("0x") else str(value)


def short(text: str) -> str:
    """Return the beginning and the end of an address or hash."""
    return f"{text[:8]}…{text[-6:]}"


# One thing


def print_worker(found: dict[str, Any]) -> None:
    """Print what a worker did, was paid and was slashed for."""
    print_facts(found["worker"])
    for membership in found["memberships"]:
        click.echo()
        print_facts(dict(map(_in_tokens, membership.items())))
    _print_table("outcomes", [_outcome_row(each) for each in found["outcomes"][-SHOWN_OUTCOMES:]])
    _print_table("payments", found["payments"])
    for slash in found["slashes"]:
        click.echo()
        print_slash(slash)


def print_submission(found: dict[str, Any]) -> None:
    """Print what the chain proves about one outcome."""
    print_facts({name: _words(value) for name, value in found.items() if name != "contradictions"})


def print_slash(slash: dict[str, Any]) -> None:
    """Print a slash as names and lines of at most 80 columns; hashes stay whole."""
    place = None if slash["batch_id"] is None else f"{slash['batch_id']}:{slash['position']}"
    print_facts(
        {
            "slash": f"{format_tokens(int(slash['amount_wei']))} tokens for {slash['reason']}",
            "of": slash["worker"],
            "outcome": place and f"{place} of run {slash['run_id']}",
            "state": slash["state"] + ("" if slash.get("is_founded", True) else ", CONTRADICTED"),
            "slashed": slash["tx"],
            "verdict": slash["outcome_tx"],
        }
    )


def _outcome_row(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return an outcome as columns that fit a screen; --json has the rest."""
    verdict, stands = outcome["verdict"], outcome["standing_verdict"]
    reason = outcome["reason"]
    return outcome | {
        "outcome": f"{outcome['batch_id']}:{outcome['position']}",
        "step": f"{outcome['step']}:{outcome['index']}",
        "policy": outcome["policy_version"],
        "verdict": verdict if reason == "none" else f"{verdict}, {reason}",
        "stands": "" if stands == verdict else stands,
        "file": outcome["file_sha256"],
    }


def _words(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return [str(each) for each in value] if isinstance(value, list) else str(value)


def _in_tokens(item: tuple[str, Any]) -> tuple[str, str]:
    """Return a named value for people: amounts in tokens."""
    name, value = item
    if name.endswith("_wei"):
        return f"{name.removesuffix('_wei')}_tokens", format_tokens(int(value))
    return name, str(value)


# A lineage


def print_lineage(found: PolicyLineage, *, knows_recipe: bool) -> None:
    """Print a version's ancestry, the base model first, and who contributed."""
    click.echo(f"run {found.run_id}, policy {found.version}: {len(found.ingredients)} files\n")
    columns = ("version", "stream", "files", "workers", "root", "transaction")
    print_table(columns, [_row_of(found, ancestor) for ancestor in found.ancestors])
    click.echo()
    rows = [[worker, str(count), str(units)] for worker, count, units in found.by_worker()]
    print_table(("worker", "files offered", "units"), rows)
    for use, count in sorted(Counter(each.use for each in found.ingredients).items()):
        click.echo(f"{count:6,} {'file' if count == 1 else 'files'} {USES[use]}")
    if found.not_taken:
        click.echo(f"{found.not_taken:6,} files paid, and not taken by this version")
    if not knows_recipe:
        click.echo("the recipe is not at hand: stale files count as offered")
    click.echo(
        "Of an offered file the recipe's filters leave out groups whose rewards are all\n"
        "equal, and more: the trainer's metrics.jsonl says which."
    )
    for each in found.contradictions:
        click.echo(printable(f"FAIL {each.kind}: {each}"))
    click.echo(f"{len(found.contradictions) or 'no'} contradictions")


def _row_of(found: PolicyLineage, ancestor: Ancestor) -> list[str]:
    """Return the row of an ancestor; its range of the stream is known from its manifest only."""
    own = [each for each in found.ingredients if each.version == ancestor.version]
    is_known = ancestor.stream_to is not None
    return [
        str(ancestor.version or "base model"),
        f"{ancestor.stream_from} to {ancestor.stream_to}" if is_known else "no manifest at hand",
        str(len(own)) if is_known else "?",
        str(len({each.worker for each in own})) if is_known else "?",
        short(ancestor.manifest_root),
        ancestor.tx,
    ]
