"""An audit's report as tables on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from muster.client.audit.report import AuditReport

SHOWN_NOTES = 5
"""Notes of one check that are printed."""
WIDTH = 160
"""Columns of the tables when nobody watches: wide enough for everything."""


def print_report(report: AuditReport) -> None:
    """Print a report as tables."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(f"chain {report.chain_id}, read up to block {report.block}")
    for table in _tables(report):
        if table.row_count:
            console.print(table)
    print_checks(console, report)


def _tables(report: AuditReport) -> list[Table]:
    return [
        _table(
            "runs",
            ("run", "policy", "batches", "judged", "submitted", "accepted", "rejected", "fraud"),
            ("units", "funded", "paid"),
            [
                (
                    *(r.run_id, r.checkpoints[-1].version if r.checkpoints else "-", r.batches),
                    *(r.judged, r.submitted, r.accepted, r.rejected, r.fraud, r.units),
                    *(tokens(r.funded_wei), tokens(r.paid_wei)),
                )
                for r in report.runs
            ],
        ),
        _table(
            "workers",
            ("worker", "status", "stake", "judged", "accepted", "rejected", "fraud"),
            ("units", "paid"),
            [
                (
                    *(short(w.address), w.status, tokens(w.stake_wei), w.submitted, w.accepted),
                    *(w.rejected, w.fraud, w.units, tokens(w.paid_wei)),
                )
                for w in report.workers
            ],
        ),
        _table(
            "slashes",
            ("worker", "tokens", "reason"),
            ("state", "batch", "transaction"),
            [
                (short(s.worker), tokens(s.amount_wei), s.reason, s.state, s.batch_id, s.tx)
                for s in report.slashes
            ],
        ),
        _table(
            "policies",
            ("run", "version", "block"),
            ("manifest root", "transaction"),
            [
                (r.run_id, c.version, c.block, short(c.manifest_root), c.tx)
                for r in report.runs
                for c in r.checkpoints
            ],
        ),
        _table(
            "payments",
            ("worker", "run", "slots"),
            ("units", "tokens", "transaction"),
            [
                (short(p.worker), p.run_id, p.slots, p.units, tokens(p.amount_wei), p.tx)
                for p in report.payments
            ],
        ),
    ]


def _table(
    title: str, columns: tuple[str, ...], more: tuple[str, ...], rows: list[tuple[Any, ...]]
) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1))
    for column in (*columns, *more):
        # Whole transaction hashes are what an auditor copies: they fold where the rest is cut.
        is_hash = column == "transaction"
        table.add_column(column, no_wrap=not is_hash, overflow="fold" if is_hash else "ellipsis")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    return table


def short(text: str) -> str:
    """Return the beginning and the end of an address or hash."""
    return f"{text[:8]}…{text[-6:]}"


def tokens(wei: str) -> str:
    """Return wei as whole tokens, six digits."""
    return f"{int(wei) / 10**18:,.6g}"


def print_checks(console: Console, report: AuditReport) -> None:
    """Print every check with its mark, then every contradiction with its rule."""
    for check in report.checks:
        mark = "[green]ok  [/green]" if check.passed else "[red]FAIL[/red]"
        console.print(f"{mark} {check.name}: ", soft_wrap=True, highlight=False, end="")
        console.print(check.detail, soft_wrap=True, highlight=False, markup=False)
        for note in check.notes[:SHOWN_NOTES]:
            console.print(f"note {note}", soft_wrap=True, highlight=False, markup=False)
        if (more := len(check.notes) - SHOWN_NOTES) > 0:
            console.print(f"note {more} more: --json has them")
    kinds = sorted({found.kind for found in report.contradictions})
    for kind in kinds:
        console.print(f"{kind}: the rule is that {kind.rule}", soft_wrap=True, highlight=False)
    failed = sum(not check.passed for check in report.checks)
    verdict = f"{failed} contradictions" if failed else "no contradiction"
    console.print(f"{verdict} in {len(report.checks)} checks")
