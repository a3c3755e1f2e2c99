"""An audit's report on a terminal: the result first, in tokens and 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from muster.client.printing import WIDTH, printable
from muster.client.quantities import format_tokens

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from muster.client.audit.contradictions import Check, NotRerun
    from muster.client.audit.faults import Reported
    from muster.client.audit.report import AuditReport

SHOWN_NOTES = 5
"""Notes of one check that are printed."""
SHOWN_CONTRADICTIONS = 20
"""Contradictions that are printed."""
SHOWN_POLICIES = 8
"""Newest policy versions of the table."""


def print_report(report: AuditReport) -> None:
    """Print the result first, then what contradicts, the checks and the tables."""
    console = _console()
    fold = partial(_fold, console)
    fold(f"chain {report.chain_id}, read up to block {report.block}")
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
    """Print faults that prove themselves: what came of reporting them, or how to."""
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
    """Print what could not be run again, by what would let it be."""
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
    fold(f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {found}", indent=5)
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


def _tables(report: AuditReport) -> list[Table]:
    return [
        _table(
            "runs",
            ("run", "policy", "batches", "accepted", "rejected", "fraud"),
            ("units", "funded", "paid"),
            [
                (
                    *(r.run_id, r.checkpoints[-1].version if r.checkpoints else "-"),
                    f"{r.judged}/{r.batches}",
                    *(r.accepted, r.rejected, r.fraud, r.units),
                    *(tokens(r.funded_wei), tokens(r.paid_wei)),
                )
                for r in report.runs
            ],
        ),
        _table(
            "workers",
            ("worker", "run", "status", "stake", "accepted", "rejected", "fraud"),
            ("units", "paid"),
            [
                (
                    *(short(w.address), w.run_id, w.status, tokens(w.stake_wei), w.accepted),
                    *(w.rejected, w.fraud, w.units, tokens(w.paid_wei)),
                )
                for w in report.workers
            ],
        ),
        _table(
            "policies",
            ("run", "version", "block"),
            ("manifest root", "transaction"),
            [
                (r.run_id, c.version, c.block, short(c.manifest_root), short(c.tx))
                for r in report.runs
                for c in r.checkpoints[-SHOWN_POLICIES:]
            ],
        ),
        _table(
            "payments",
            ("worker", "run", "slots"),
            ("units", "tokens", "transaction"),
            [
                (short(p.worker), p.run_id, p.slots, p.units, tokens(p.amount_wei), short(p.tx))
                for p in report.payments
            ],
        ),
    ]


def _table(
    title: str, columns: tuple[str, ...], more: tuple[str, ...], rows: list[tuple[Any, ...]]
) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in (*columns, *more):
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    return table


def short(text: str) -> str:
    """Return the beginning and the end of an address or hash."""
    return f"{text[:8]}…{text[-6:]}"


def tokens(wei: str) -> str:
    """Return wei as whole tokens, six digits."""
    return f"{int(wei) / 10**18:,.6g}"
