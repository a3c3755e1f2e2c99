"""The audit as files: its tables as CSV, Parquet or JSON lines, and a page for browsers.

Columns are stable: their order, names and types are those of TABLES, from whose fields
docs/reference/audit.md is made. Amounts in wei are decimal text, for they do not fit 64 bits;
hashes and addresses are `0x` hexadecimal; times are Unix seconds of the chain's clock. A value
that does not apply is null (empty in CSV).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypedDict, get_args, get_type_hints

import numpy as np

from muster.chain import STATE_WORDS, SlashState
from muster.client.audit.history import ChainHistory
from muster.client.audit.ledger import Ledger
from muster.client.audit.report import (
    AuditReport,
    PaymentReport,
    RunReport,
    SlashReport,
    WorkerReport,
)
from muster.client.audit.table import OutcomeTable, tabulate
from muster.client.audit.tables import tokens
from muster.client.journal import whole_file
from muster.protocol.encoding import hex0x
from muster.protocol.ids import RunId
from muster.protocol.messages import Reason, Verdict

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
"""A row of a table, by column."""
ROWS_AT_ONCE = 50_000
"""Rows that are turned into Python objects together."""


class OutcomeRow(TypedDict):
    """A posted outcome."""

    run_id: int
    """The run."""
    batch_id: int
    """The batch."""
    position: int
    """Place in the batch, from 0."""
    worker_id: int
    """Number of the worker, 0 for nobody."""
    worker: str | None
    """Its staking wallet; null for a worker that is not registered."""
    step: int
    """Rollout step."""
    index: int
    """Slot number within worker and step."""
    policy_version: int
    """Policy that generated."""
    file_sha256: str
    """Hash of the submission's file."""
    rollouts: int
    """Samples in the file."""
    units: int
    """Units recorded."""
    verdict: str
    """As recorded."""
    reason: str
    """Reason code, by name."""
    standing_verdict: str
    """The verdict that stands after disputes."""
    committed_at_s: int
    """Time of the commitment."""
    posted_at_s: int
    """Time of the outcomes."""
    price_wei_per_unit: str
    """Price at the commitment."""
    committed_tx: str
    """Transaction of the commitment."""
    posted_tx: str
    """Transaction of the outcomes."""


class BatchRow(TypedDict):
    """A committed batch."""

    batch_id: int
    """The batch."""
    run_id: int
    """Its run."""
    root: str
    """Merkle root over its submissions."""
    submissions: int
    """How many."""
    units_declared: int
    """Units that they claim together."""
    price_wei_per_unit: str
    """Price at the commitment."""
    committed_at_s: int
    """Time of the commitment."""
    committed_block: int
    """Block of the commitment."""
    committed_tx: str
    """Its transaction."""
    outcomes_root: str | None
    """Merkle root over its outcomes; null until they are posted."""
    posted_at_s: int | None
    """Time of the outcomes."""
    posted_block: int | None
    """Their block."""
    posted_tx: str | None
    """Their transaction."""
    signatures: int
    """Validators' signatures under the outcomes."""
    is_direct: bool
    """Whether a worker committed it, or took it out of another."""


class CheckpointRow(TypedDict):
    """A published policy version."""

    run_id: int
    """The run."""
    version: int
    """Policy version."""
    manifest_root: str
    """Keccak-256 of its manifest."""
    beacon: str
    """Hash of the publishing block."""
    block: int
    """The publishing block."""
    tx: str
    """The publishing transaction."""


class ContradictionRow(TypedDict):
    """A contradiction."""

    kind: str
    """Named kind."""
    detail: str
    """What was found."""
    rule: str
    """What the protocol says."""
    tx: str | None
    """The transaction."""
    block: int | None
    """The block."""
    batch_id: int | None
    """The batch."""
    position: int | None
    """The place there."""


TABLES: dict[str, type] = {
    "outcomes": OutcomeRow,
    "batches": BatchRow,
    "workers": WorkerReport,
    "slashes": SlashReport,
    "payments": PaymentReport,
    "checkpoints": CheckpointRow,
    "contradictions": ContradictionRow,
}
"""What a row of each table is: its fields are the columns, in order."""
COLUMNS = {name: get_type_hints(row) for name, row in TABLES.items()}
"""Columns of each table in order, with their types."""


def export_tables(
    history: ChainHistory, report: AuditReport, run_id: RunId, folder: Path, form: str
) -> list[Path]:
    """Write every table of a run, each whole or not at all; return the files."""
    import pyarrow as pa

    tables = {"outcomes": outcome_table(history.ledger, tabulate(history.ledger), run_id)}
    for name, rows in rows_of(history.ledger, report, run_id).items():
        tables[name] = pa.Table.from_pylist(rows, schema=_schema(name))
    written = []
    for name, table in tables.items():
        path = folder / f"{name}.{'jsonl' if form == 'json' else form}"
        with whole_file(path) as partial:
            _write(table, partial, form)
        written.append(path)
    return written


def rows_of(ledger: Ledger, report: AuditReport, run_id: RunId) -> dict[str, Sequence[Row]]:
    """Return every table of a run but that of its outcomes."""
    return {
        "batches": list(_batches(ledger, run_id)),
        "workers": [asdict(worker) for worker in report.workers],
        "slashes": [asdict(slash) for slash in report.slashes],
        "payments": [asdict(payment) for payment in report.payments],
        "checkpoints": [
            {"run_id": run.run_id, **asdict(checkpoint)}
            for run in report.runs
            for checkpoint in run.checkpoints
        ],
        "contradictions": [found.to_json() for found in report.contradictions],
    }


def _schema(table: str) -> pa.Schema:
    import pyarrow as pa

    def kind(hint: Any) -> pa.DataType:
        named = next(each for each in get_args(hint) or (hint,) if each is not NoneType)
        plain = getattr(named, "__supertype__", named)
        return {int: pa.int64(), bool: pa.bool_()}.get(plain, pa.string())

    return pa.schema([(name, kind(hint)) for name, hint in COLUMNS[table].items()])


def _batches(ledger: Ledger, run_id: RunId) -> Iterator[BatchRow]:
    for batch in ledger.batches.values():
        if batch.run_id == run_id:
            yield {
                "batch_id": batch.batch_id,
                "run_id": batch.run_id,
                "root": hex0x(batch.root),
                "submissions": batch.count,
                "units_declared": batch.units,
                "price_wei_per_unit": str(batch.price_per_unit),
                "committed_at_s": batch.committed_at,
                "committed_block": batch.block_number,
                "committed_tx": batch.tx_hash,
                "outcomes_root": None if (root := batch.outcomes_root) is None else hex0x(root),
                "posted_at_s": batch.posted_at,
                "posted_block": batch.posted_block,
                "posted_tx": batch.posted_tx,
                "signatures": len(batch.signatures),
                "is_direct": batch.direct is not None,
            }


def outcome_table(ledger: Ledger, table: OutcomeTable, run_id: RunId) -> pa.Table:
    """Return a run's outcomes as a table, without an object per row."""
    import pyarrow as pa

    rows = np.flatnonzero(table.is_of(run_id))
    records, batch = table.records_N[rows], table.batch_N[rows]
    addresses = {n: w.address for n, w in ledger.worker_by_id.items()}
    numbers, which = np.unique(records["worker_id"].astype(np.int64), return_inverse=True)
    of_batch = {
        "run_id": [each.run_id for each in table.batches],
        "batch_id": [each.batch_id for each in table.batches],
        "committed_at_s": [each.committed_at for each in table.batches],
        "posted_at_s": [each.posted_at for each in table.batches],
        "price_wei_per_unit": [str(each.price_per_unit) for each in table.batches],
        "committed_tx": [each.tx_hash for each in table.batches],
        "posted_tx": [each.posted_tx for each in table.batches],
    }
    schema = _schema("outcomes")
    columns: dict[str, Any] = {
        name: pa.array(values, schema.field(name).type).take(pa.array(batch))
        for name, values in of_batch.items()
    }
    whole = ("worker_id", "step", "index", "policy_version", "rollouts", "units")
    columns |= {name: pa.array(records[name].astype(np.int64)) for name in whole}
    columns["position"] = pa.array(rows - table.starts[batch])
    known = [addresses.get(number) for number in numbers.tolist()]
    columns["worker"] = pa.array(known, pa.string()).take(pa.array(which))
    columns["file_sha256"] = pa.array(
        ["0x" + value.tobytes().hex() for value in records["file_hash"]], pa.string()
    )
    columns["verdict"] = _named(records["verdict"], Verdict)
    columns["reason"] = _named(records["reason"], Reason)
    columns["standing_verdict"] = _named(table.verdict_N[rows], Verdict)
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _named(values: Any, kind: type[Verdict | Reason]) -> pa.Array:
    import pyarrow as pa

    names = {int(each): each.name.lower() for each in kind}
    labels = [names.get(number, f"unknown_{number}") for number in range(256)]
    return pa.array(labels, pa.string()).take(pa.array(values.astype(np.int64)))


def _write(table: pa.Table, path: Path, form: str) -> None:
    if form == "csv":
        from pyarrow import csv

        csv.write_csv(table, path)
    elif form == "parquet":
        import pyarrow.parquet as pq

        pq.write_table(table, path, compression="zstd")
    else:
        with path.open("w", encoding="utf-8") as file:
            for part in table.to_batches(max_chunksize=ROWS_AT_ONCE):
                file.writelines(json.dumps(row) + "\n" for row in part.to_pylist())


# The page is static: no JavaScript, no external resources. It follows the reader's dark or light
# theme and is readable on a phone. Every value from the chain is escaped.

MAX_ROWS = 500
"""Rows of one table; the exported tables have all of them."""

STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--dim:#5b6678;--page:#fff;--line:#d9dee6;--good:#2f8f5b;
--bad:#c23b3b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--dim:#98a3b5;--page:#14181f;--line:#2b323d;
--good:#4fbf83;--bad:#ef6d6d}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;
max-width:72rem;padding:1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
.verdict{font-weight:600;padding:.6rem .8rem;border-left:4px solid var(--good)}
.verdict.bad{border-color:var(--bad);color:var(--bad)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.87rem}
th,td{text-align:left;padding:.3rem .6rem .3rem 0;border-bottom:1px solid var(--line);
vertical-align:top}td.n,th.n{text-align:right}code{font-size:.8rem;overflow-wrap:anywhere}
td code{display:inline-block;min-width:14rem}
.ok{color:var(--good)}.fail{color:var(--bad);font-weight:600}.open{font-weight:600}.dim{color:var(--dim)}
"""


def write_html(history: ChainHistory, report: AuditReport, run_id: RunId, path: Path) -> None:
    """Write the report of one run; it appears whole or not at all."""
    with whole_file(path) as partial:
        partial.write_text(render(history, report, run_id), encoding="utf-8")


def render(history: ChainHistory, report: AuditReport, run_id: RunId) -> str:
    """Return the page."""
    (run,) = report.runs
    rows = rows_of(history.ledger, report, run_id)
    slashes = [{**row, "state": STATE_WORDS[SlashState(row["state"])]} for row in rows["slashes"]]
    checks = [
        {"result": check.word, "check": check.name, "compared": check.detail}
        for check in report.checks
    ]
    title = f"Audit of run {run_id} on chain {report.chain_id}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">Rebuilt from the chain\'s events up to block {report.block} '
        f"(<code>0x{history.head.hash.hex()}</code>). Nobody's word but the chain's was taken.</p>",
        _verdict(report),
        table("Contradictions", rows["contradictions"]),
        table("The run", _figures(run)),
        table("What was recomputed", checks),
        table("Slashes", slashes),
        table("Payments", rows["payments"]),
        table("Policies", rows["checkpoints"]),
        table("Workers", rows["workers"]),
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


def _figures(run: RunReport) -> list[Row]:
    figures = {
        "owner": run.owner,
        "validators, quorum": f"{len(run.validators)}, {run.quorum}",
        "batches, judged": f"{run.batches:,}, {run.judged:,}",
        "submissions": f"{run.submitted:,}",
        "accepted, rejected, fraud": f"{run.accepted:,}, {run.rejected:,}, {run.fraud:,}",
        "units accepted": f"{run.units:,}",
        "tokens funded, paid": f"{tokens(run.funded_wei)}, {tokens(run.paid_wei)}",
    }
    return [{"figure": name, "value": value} for name, value in figures.items()]


# Tables


def table(title: str, rows: Sequence[Row]) -> str:
    """Return a table of rows with the same columns; empty without rows."""
    if not rows:
        return ""
    head = "".join(_cell("th", name, value, _heading(name)) for name, value in rows[0].items())
    lines = (
        "".join(_cell("td", name, value, _shown(name, value)) for name, value in row.items())
        for row in rows[:MAX_ROWS]
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    more = len(rows) - MAX_ROWS
    note = f'<p class="dim">{more} more: muster audit run --export.</p>' if more > 0 else ""
    return (
        f'<h2>{escape(title)}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def _cell(tag: str, name: str, value: Any, html: str) -> str:
    """Return a cell: figures are aligned right, results of checks are coloured."""
    is_figure = isinstance(value, int) or name.endswith("_wei")
    is_result = (tag, name) == ("td", "result")
    kind = "n" if is_figure else str(value).lower() if is_result else ""
    return f'<{tag} class="{escape(kind)}">{html}</{tag}>'


def _heading(name: str) -> str:
    words = f"{name.removesuffix('_wei')} in tokens" if name.endswith("_wei") else name
    return escape(words.replace("_", " "))


def _shown(name: str, value: Any) -> str:
    """Return a value for people: amounts in tokens, hashes to be copied."""
    if value is None:
        return ""
    if name.endswith("_wei"):
        return escape(tokens(value))
    text = escape(f"{value:,}" if isinstance(value, int) else str(value))
    return f"<code>{text}</code>" if text.startswith("0x") else text
