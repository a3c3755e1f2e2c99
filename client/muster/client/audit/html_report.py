"""The audit as one HTML file: tables, charts, and the transaction of every claim.

Static: no JavaScript, no external resource, nothing to fetch; dark and light; readable on a phone.
Everything that comes from the chain is escaped.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from muster.chain import STATE_WORDS, SlashState
from muster.client.audit.charts import Bar, bar_chart
from muster.client.audit.history import History
from muster.client.audit.report import AuditReport, RunReport
from muster.client.audit.table import OutcomeTable, tabulate
from muster.client.audit.tables import tokens
from muster.protocol.errors import StorageError
from muster.protocol.ids import RunId
from muster.protocol.messages import Verdict

MAX_ROWS = 500
"""Rows of one table; the exported tables have all of them."""
BINS = 40
"""Bars of a chart over time."""
SHOWN_WORKERS = 30
"""Workers of the chart of rewards."""

STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--dim:#5b6678;--page:#fff;--line:#d9dee6;--good:#2f8f5b;
--bad:#c23b3b;--soft:#c98a1b;--blue:#2f6fb3}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--dim:#98a3b5;--page:#14181f;--line:#2b323d;
--good:#4fbf83;--bad:#ef6d6d;--soft:#e0ac4a;--blue:#6aa8ea}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;
max-width:72rem;padding:1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
.verdict{font-weight:600;padding:.6rem .8rem;border-left:4px solid var(--good)}
.verdict.bad{border-color:var(--bad);color:var(--bad)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.87rem}
th,td{text-align:left;padding:.3rem .6rem .3rem 0;border-bottom:1px solid var(--line);
vertical-align:top}td.n,th.n{text-align:right}code{font-size:.8rem;overflow-wrap:anywhere}
td code{display:inline-block;min-width:14rem}
.ok{color:var(--good)}.fail{color:var(--bad);font-weight:600}.dim{color:var(--dim)}
figure{margin:1rem 0}svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--dim)}
svg line{stroke:var(--line)}rect.accepted{fill:var(--good)}rect.fraud{fill:var(--bad)}
rect.rejected{fill:var(--soft)}rect.paid{fill:var(--blue)}
"""


def write_html(history: History, report: AuditReport, run_id: RunId, path: Path) -> None:
    """Write the report of one run; it appears whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(render(history, report, run_id), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def render(history: History, report: AuditReport, run_id: RunId) -> str:
    """Return the page."""
    (run,) = report.runs
    outcomes = tabulate(history.ledger)
    title = f"Audit of run {run_id} on chain {report.chain_id}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">Rebuilt from the chain\'s events up to block {report.block} '
        f"(<code>0x{history.head.hash.hex()}</code>). Nobody's word but the chain's was taken.</p>",
        _verdict(report),
        _contradictions(report),
        _figures(run),
        outcome_chart(outcomes, run_id),
        reward_chart(report),
        _checks(report),
        _slashes(report),
        _payments(report),
        _policies(run),
        _workers(report),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f"{''.join(parts)}</body></html>\n"
    )


def _verdict(report: AuditReport) -> str:
    count = sum(check.count for check in report.checks)
    if count:
        return f'<p class="verdict bad">{count} contradictions</p>'
    return f'<p class="verdict">No contradiction in {len(report.checks)} checks</p>'


Cell = tuple[str, str]
"""A cell's class and its HTML."""


def text(value: object) -> Cell:
    """Return a cell of words."""
    return "", escape("" if value is None else str(value))


def number(value: object) -> Cell:
    """Return a cell of a figure."""
    return "n", escape(f"{value:,}" if isinstance(value, int) else str(value))


def code(value: object) -> Cell:
    """Return a cell of an address, hash or transaction."""
    return "", "" if value is None else f"<code>{escape(str(value))}</code>"


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table; empty without rows. Figures are aligned right."""
    listed = list(rows)
    if not listed:
        return ""
    marks = [kind for kind, _ in listed[0]]
    head = "".join(
        f'<th class="{mark}">{escape(name)}</th>' for name, mark in zip(header, marks, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{html}</td>' for kind, html in row) + "</tr>"
        for row in listed[:MAX_ROWS]
    )
    more = len(listed) - MAX_ROWS
    note = f'<p class="dim">{more} more: muster audit run --export.</p>' if more > 0 else ""
    return (
        f'<h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def _contradictions(report: AuditReport) -> str:
    return table(
        "Contradictions",
        ("kind", "found", "the rule", "batch", "position", "block", "transaction"),
        (
            (
                *(text(found.kind), text(found.detail), text(found.kind.rule)),
                *(number(found.batch_id), number(found.position), number(found.block)),
                code(found.tx),
            )
            for found in report.contradictions
        ),
    ).replace(">None<", "><")


def _figures(run: RunReport) -> str:
    rows = (
        ("owner", code(run.owner)),
        ("validators, quorum", text(f"{len(run.validators)}, {run.quorum}")),
        ("batches, judged", text(f"{run.batches:,}, {run.judged:,}")),
        ("submissions", text(f"{run.submitted:,}")),
        (
            "accepted, rejected, fraud",
            text(f"{run.accepted:,}, {run.rejected:,}, {run.fraud:,}"),
        ),
        ("units accepted", text(f"{run.units:,}")),
        ("tokens funded, paid", text(f"{tokens(run.funded_wei)}, {tokens(run.paid_wei)}")),
    )
    return table("The run", ("", ""), ((text(name), cell) for name, cell in rows))


def outcome_chart(outcomes: OutcomeTable, run_id: RunId) -> str:
    """Return outcomes over the chain's time, by the verdict that stands."""
    rows = np.flatnonzero(outcomes.is_of(run_id))
    if not len(rows):
        return ""
    times = outcomes.of_batches([batch.posted_at or 0 for batch in outcomes.batches])[rows]
    edges = np.linspace(times.min(), times.max() + 1, BINS + 1)
    kinds = {
        "accepted": (Verdict.ACCEPTED,),
        "rejected": (Verdict.REJECTED, Verdict.INCOMPLETE),
        "fraud": (Verdict.FRAUD,),
    }
    counts = {
        kind: np.histogram(times[outcomes.is_verdict(*verdicts)[rows]], edges)[0]
        for kind, verdicts in kinds.items()
    }
    bars = [
        Bar(
            moment(edges[place]),
            tuple((kind, float(of_kind[place])) for kind, of_kind in counts.items()),
            f"from {moment(edges[place])}: "
            + ", ".join(f"{of_kind[place]} {kind}" for kind, of_kind in counts.items()),
        )
        for place in range(BINS)
    ]
    return bar_chart("Outcomes over time: accepted, rejected, fraud", bars, unit="at most")


def moment(seconds: float) -> str:
    """Return a time of the chain's clock, in UTC."""
    try:
        then = datetime.datetime.fromtimestamp(float(seconds), datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return str(int(seconds))
    return then.strftime("%Y-%m-%d %H:%M")


def reward_chart(report: AuditReport) -> str:
    """Return what the best-paid workers were paid."""
    paid = sorted(report.workers, key=lambda worker: -int(worker.paid_wei))[:SHOWN_WORKERS]
    bars = [
        Bar(
            worker.address[:8],
            (("paid", int(worker.paid_wei) / 10**18),),
            f"{worker.address}: {tokens(worker.paid_wei)} tokens",
        )
        for worker in paid
        if int(worker.paid_wei)
    ]
    return bar_chart("Tokens paid, by worker", bars, unit="tokens")


def _checks(report: AuditReport) -> str:
    return table(
        "What was recomputed",
        ("", "check", "compared"),
        (
            (
                ("ok", "ok") if check.passed else ("fail", "FAIL"),
                text(check.name),
                text(check.detail),
            )
            for check in report.checks
        ),
    )


def _slashes(report: AuditReport) -> str:
    return table(
        "Slashes",
        ("worker", "tokens", "why", "state", "outcome", "verdict posted in", "slashed in"),
        (
            (
                *(
                    code(s.worker),
                    number(tokens(s.amount_wei)),
                    text(s.reason),
                    text(STATE_WORDS[SlashState(s.state)]),
                ),
                text("" if s.batch_id is None else f"{s.batch_id}:{s.position}"),
                *(code(s.outcome_tx), code(s.tx)),
            )
            for s in report.slashes
        ),
    )


def _payments(report: AuditReport) -> str:
    return table(
        "Payments",
        ("worker", "slots", "units", "tokens", "transaction"),
        (
            (
                *(code(p.worker), number(p.slots), number(p.units)),
                *(number(tokens(p.amount_wei)), code(p.tx)),
            )
            for p in report.payments
        ),
    )


def _policies(run: RunReport) -> str:
    return table(
        "Policies",
        ("version", "block", "root of its manifest", "transaction"),
        (
            (number(c.version), number(c.block), code(c.manifest_root), code(c.tx))
            for c in run.checkpoints
        ),
    )


def _workers(report: AuditReport) -> str:
    return table(
        "Workers",
        ("worker", "run", "status", "stake", "accepted", "rejected", "fraud", "units", "paid"),
        (
            (
                *(code(w.address), number(w.run_id), text(w.status), number(tokens(w.stake_wei))),
                *(number(w.accepted), number(w.rejected), number(w.fraud), number(w.units)),
                number(tokens(w.paid_wei)),
            )
            for w in report.workers
        ),
    )
