"""What an audit finds, on a terminal: the result first, in tokens and 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from muster.client.cli.printing import WIDTH, print_facts, print_table, printable
from muster.client.quantities import format_tokens

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from muster.client.audit.contradictions import Check, NotRerun
    from muster.client.audit.evidence import Reported
    from muster.client.audit.lineage import Ancestor, PolicyLineage
    from muster.client.audit.report import AuditReport

SHOWN_NOTES = 5
"""Notes of one check that are printed."""
SHOWN_CONTRADICTIONS = 20
"""Contradictions that are printed."""
COLUMNS = {
    "runs": "run_id policy batches accepted rejected fraud units funded_wei paid_wei",
    "workers": "address run_id status stake_wei accepted rejected fraud units paid_wei",
    "policies": "run_id version block manifest_root tx",
    "payments": "worker run_id slots units amount_wei tx",
}
"""Values that each table shows."""
HEADINGS = {"address": "worker", "amount_wei": "tokens", "tx": "transaction"}
"""What columns are called where it is not their values' name."""
USES = {
    "dropped": "paid, offered, and dropped whole by filters",
    "offered": "paid, and offered to training",
    "overturned": "offered, and taken for accepted by mistake, as a jury found",
    "repeated": "passed over: repeated",
    "stale": "passed over: stale",
    "trained": "paid, and trained on",
    "undone": "trained on, and undone by a rollback",
}
"""What became of a file of a lineage, for people."""
SHOWN_OUTCOMES = 30
"""Newest outcomes of a worker that are printed; --json has all."""
SHOWN_POLICIES = 8
"""Newest policy versions of the table."""


def print_report(report: AuditReport) -> None:
    """Print the result first, then what contradicts, the checks and the tables."""
    console = _console()
    fold = partial(_fold, console)
    fold(f"chain {report.chain_id}, read up to block {report.block}")
    if report.others:
        runs = ", ".join(str(run.run_id) for run in report.runs)
        fold(f"run {runs} alone; {report.others} other runs were not checked: muster audit does")
    fold(_result(report), style="bold green" if report.passed else "bold red")
    for check in report.checks:
        if check.not_rerun:
            fold(check.detail)
    _print_contradictions(fold, report)
    for check in report.checks:
        _print_not_rerun(fold, check)
    console.print()
    for check in report.checks:
        _print_check(fold, check)
    for table in _tables(report):
        if table.row_count:
            console.print()
            console.print(table)
    if report.losses:
        fold("\nslashes", style="bold")
    for loss in report.losses:
        fold(f"{short(loss.owner)}  {loss.words(format_tokens)}", indent=2)
    fold("\n--json has whole hashes, amounts in wei, and everything that is left out here")


def print_faults(faults: Sequence[Reported]) -> None:
    """Print faults that prove themselves, with the result of a report or the command for one."""
    fold = partial(_fold, _console())
    unreported = [each.fault for each in faults if each.tx is None and each.refused is None]
    for each in faults:
        state = f"reported, {each.tx}" if each.tx else f"not reported: {each.refused}"
        fold(f"\n{each.fault.words}" + ("" if each.fault in unreported else f": {state}"), indent=2)
    if unreported:
        run_id = unreported[0].batch.run_id
        fold(
            f"\nanybody can have that punished: muster audit run {run_id} --report "
            "--keystore FILE, with the same --evidence",
            indent=2,
        )


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def _result(report: AuditReport) -> str:
    checks, failed = len(report.checks), sum(not check.passed for check in report.checks)
    count = sum(check.count for check in report.checks)
    if report.passed:
        return f"no contradiction in {checks} checks"
    if not count:
        return f"{failed} of {checks} checks could not be made"
    things = "contradiction" if count == 1 else "contradictions"
    return f"{count} {things}: {failed} of {checks} checks failed"


def _print_contradictions(fold: Callable[..., None], report: AuditReport) -> None:
    for found in report.contradictions[:SHOWN_CONTRADICTIONS]:
        fold(f"\n{found.kind}: {found}", indent=2)
        fold(f"  the rule is that {found.kind.rule}", indent=2)
    if (more := sum(check.count for check in report.checks) - SHOWN_CONTRADICTIONS) > 0:
        fold(f"\nand {more} more contradictions")


def _print_not_rerun(fold: Callable[..., None], check: Check) -> None:
    """Print the outcomes that could not be run again, grouped by what would help."""
    groups: dict[str, list[NotRerun]] = {}
    for each in check.not_rerun:
        groups.setdefault(each.how, []).append(each)
    for how, members in groups.items():
        first = members[0]
        fold(
            f"\n{len(members)} cannot be run again, such as {first.batch_id}:{first.position}: "
            f"{first.why}",
            indent=2,
        )
        fold(f"  {how}", indent=2)


def _print_check(fold: Callable[..., None], check: Check) -> None:
    found = f"{check.count} contradict" if check.count and not check.not_rerun else check.detail
    fold(f"{check.word:4} {check.name}: {found}", indent=5)
    for note in check.notes[:SHOWN_NOTES]:
        fold(f"note {note}", indent=5)
    if (more := len(check.notes) - SHOWN_NOTES) > 0:
        fold(f"note {more} more: --json has them")


def _fold(console: Console, text: str, *, indent: int = 0, style: str = "") -> None:
    """Print a text folded between words: hashes stay whole, to be copied."""
    lead = text[: len(text) - len(text.lstrip("\n"))]
    lines = textwrap.wrap(
        printable(text.lstrip("\n")),
        console.width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    console.print(lead + "\n".join(lines), style=style, soft_wrap=True)


def _tables(report: AuditReport) -> Iterator[Table]:
    runs = [
        {
            **asdict(run),
            "policy": run.checkpoints[-1].version if run.checkpoints else "-",
            "batches": f"{run.judged}/{run.batches}",
        }
        for run in report.runs
    ]
    policies = [
        {"run_id": run.run_id, **asdict(checkpoint)}
        for run in report.runs
        for checkpoint in run.checkpoints[-SHOWN_POLICIES:]
    ]
    rows = {
        "runs": runs,
        "workers": map(asdict, report.workers),
        "policies": policies,
        "payments": map(asdict, report.payments),
    }
    yield from (_table(title, of_table) for title, of_table in rows.items())


def _table(title: str, rows: Iterable[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    names = COLUMNS[title].split()
    for name in names:
        heading = HEADINGS.get(name, name.removesuffix("_wei").removesuffix("_id"))
        table.add_column(heading.replace("_", " "), no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(_cell(name, row[name]) for name in names))
    return table


def _cell(name: str, value: Any) -> str:
    if name.endswith("_wei"):
        return tokens(value)
    return short(value) if str(value).startswith("0x") else str(value)


def short(text: str) -> str:
    """Return the beginning and the end of an address or hash."""
    return f"{text[:8]}…{text[-6:]}"


def tokens(wei: str) -> str:
    """Return wei as whole tokens, six digits."""
    return f"{int(wei) / 10**18:,.6g}"


# One thing


def print_worker(found: dict[str, Any]) -> None:
    """Print what a worker did, was paid and was slashed for."""
    print_facts(found["worker"])
    for membership in found["memberships"]:
        click.echo()
        print_facts(dict(map(_in_tokens, membership.items())))
    _print_rows([_outcome_row(each) for each in found["outcomes"][-SHOWN_OUTCOMES:]])
    _print_rows([_payment_row(each) for each in found["payments"]])
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


def _outcome_row(outcome: dict[str, Any]) -> dict[str, str]:
    """Return an outcome as columns that fit a screen together; --json has the rest."""
    verdict, stands = outcome["verdict"], outcome["standing_verdict"]
    reason = outcome["reason"]
    return {
        "outcome": f"{outcome['batch_id']}:{outcome['position']}",
        "run": str(outcome["run_id"]),
        "step": f"{outcome['step']}:{outcome['index']}",
        "policy": str(outcome["policy_version"]),
        "units": str(outcome["units"]),
        "verdict": verdict if reason == "none" else f"{verdict}, {reason}",
        "stands": "" if stands == verdict else stands,
        "file": outcome["file_sha256"][:12],
    }


def _payment_row(payment: dict[str, Any]) -> dict[str, str]:
    """Return a payment as columns that fit a screen together."""
    return {
        "paid": f"{format_tokens(int(payment['amount_wei']))} tokens",
        "run": str(payment["run_id"]),
        "submissions": str(payment["slots"]),
        "units": str(payment["units"]),
        "transaction": payment["tx"][:18],
    }


def _words(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return [str(each) for each in value] if isinstance(value, list) else str(value)


def _print_rows(rows: list[dict[str, str]]) -> None:
    if rows:
        click.echo()
        print_table(list(rows[0]), [list(row.values()) for row in rows])


def _in_tokens(item: tuple[str, Any]) -> tuple[str, str]:
    """Return a named value for people: amounts in tokens."""
    name, value = item
    if name.endswith("_wei") and value is not None:
        return f"{name.removesuffix('_wei')}_tokens", format_tokens(int(value))
    return name, str(value)


# A lineage


def print_lineage(found: PolicyLineage, *, knows_recipe: bool, has_log: bool = False) -> None:
    """Print a version's ancestry as a chain of versions, and who contributed."""
    click.echo(f"run {found.run_id}, policy {found.version}: {len(found.ingredients)} files\n")
    for line in _lines_of_versions(found):
        click.echo(line)
    click.echo()
    rows = [[worker, str(count), str(units)] for worker, count, units in found.by_worker()]
    print_table(("worker", "files trained on" if has_log else "files offered", "units"), rows)
    for line in _lines_of_uses(found):
        click.echo(line)
    if not knows_recipe:
        click.echo("the recipe is not at hand: stale files count as offered")
    if not has_log:
        click.echo(
            "Of an offered file the recipe's filters leave out groups whose rewards are all\n"
            "equal, and more: --trainer-log metrics.jsonl says what was trained on."
        )
    for each in found.contradictions:
        click.echo(f"FAIL {each.kind}: {each}")
    click.echo(f"{len(found.contradictions) or 'no'} contradictions")


def _lines_of_uses(found: PolicyLineage) -> Iterator[str]:
    """Yield the files by use, and their samples by use where the trainer's log tells."""
    uses = Counter(each.use for each in found.ingredients)
    for use, count in sorted(uses.items()):
        yield f"{count:6,} {'file' if count == 1 else 'files'} {USES[use]}"
    if found.not_taken:
        yield f"{found.not_taken:6,} files paid, and not taken by this version"
    known = [each for each in found.ingredients if each.trained_samples is not None]
    if known:
        left_out: Counter[str] = Counter()
        for each in known:
            left_out.update(each.dropped)
        trained = sum(each.trained_samples or 0 for each in known)
        words = "".join(
            f", {count:,} {reason} left out" for reason, count in left_out.most_common()
        )
        yield f"{trained:,} samples trained on{words}"
    for version, dropped in found.late.items():
        words = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        yield f"version {version} left out {words} of them, the log does not say of which files"


def _lines_of_versions(found: PolicyLineage) -> list[str]:
    """Return one line per version, the base model first."""
    lines, unknown = [], 0
    for ancestor in found.ancestors:
        if ancestor.stream_to is None:
            unknown += 1
            continue
        if unknown:
            lines.append(f"  ┆  {unknown} versions whose manifests are not at hand")
        unknown = 0
        lines.append(_line_of(found, ancestor))
    return lines


def _line_of(found: PolicyLineage, ancestor: Ancestor) -> str:
    own = [each for each in found.ingredients if each.version == ancestor.version]
    workers = len({each.worker for each in own})
    name = "base model" if ancestor.version == 0 else f"version {ancestor.version}"
    taken = f"stream {ancestor.stream_from} to {ancestor.stream_to}" if own else "nothing consumed"
    return (
        f"  ● {name:12} {taken:22} {len(own):4} files of {workers} workers  "
        f"root {ancestor.manifest_root[:18]}…  tx {ancestor.tx}"
    )
