"""The audit's tables as files: CSV, Parquet or JSON lines, one per table.

Columns are stable: their order, names and meaning are COLUMNS, from which docs/reference/audit.md
is checked. Amounts in wei are decimal text, for they do not fit 64 bits; hashes and addresses are
`0x` hexadecimal; times are Unix seconds of the chain's clock. What does not apply is null (empty in
CSV).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.client.audit.history import History
from muster.client.audit.report import AuditReport
from muster.client.audit.table import OutcomeTable, tabulate
from muster.protocol.errors import StorageError
from muster.protocol.ids import RunId
from muster.protocol.messages import Reason, Verdict

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS: dict[str, dict[str, str]] = {
    "outcomes": {
        "run_id": "the run",
        "batch_id": "the batch",
        "position": "place in the batch, from 0",
        "worker_id": "number of the worker, 0 for nobody",
        "worker": "its staking wallet; null for a worker that is not registered",
        "step": "rollout step",
        "index": "slot number within worker and step",
        "policy_version": "policy that generated",
        "file_sha256": "hash of the submission's file",
        "rollouts": "samples in the file",
        "units": "units recorded",
        "verdict": "as recorded",
        "reason": "reason code, by name",
        "standing_verdict": "the verdict that stands after disputes",
        "committed_at_s": "time of the commitment",
        "posted_at_s": "time of the outcomes",
        "price_wei_per_unit": "price at the commitment",
        "committed_tx": "transaction of the commitment",
        "posted_tx": "transaction of the outcomes",
    },
    "batches": {
        "batch_id": "the batch",
        "run_id": "its run",
        "root": "Merkle root over its submissions",
        "submissions": "how many",
        "units_declared": "units that they claim together",
        "price_wei_per_unit": "price at the commitment",
        "committed_at_s": "time of the commitment",
        "committed_block": "block of the commitment",
        "committed_tx": "its transaction",
        "outcomes_root": "Merkle root over its outcomes; null until they are posted",
        "posted_at_s": "time of the outcomes",
        "posted_block": "their block",
        "posted_tx": "their transaction",
        "signatures": "validators' signatures under the outcomes",
        "is_direct": "whether a worker committed it, or took it out of another",
    },
    "workers": {
        "run_id": "the run",
        "worker_id": "number in outcome records",
        "address": "the staking wallet",
        "node": "the hot key that signs for it now",
        "status": "active, jailed, exiting or banned",
        "stake_wei": "active stake",
        "unbonding_wei": "stake that is leaving",
        "slashed_wei": "stake taken and not given back",
        "submitted": "submissions judged",
        "accepted": "accepted, by the verdict that stands",
        "rejected": "rejected or incomplete",
        "fraud": "fraudulent",
        "units": "units of the accepted ones",
        "paid_wei": "reward paid",
    },
    "slashes": {
        "worker": "whose stake it was: a worker's, a validator's or a juror's",
        "amount_wei": "what was taken",
        "reason": "why",
        "state": "escrowed, released or restored",
        "run_id": "run that it was staked for; 0 for the jurors' bench",
        "batch_id": "its batch",
        "position": "its place there",
        "offence": "fraud, exact_fraud, double_submission, wrong_verdict, double_outcome, "
        "absent_juror",
        "tx": "transaction that slashed",
        "outcome_tx": "transaction that posted the verdict",
    },
    "payments": {
        "run_id": "the run that paid",
        "worker": "who was paid",
        "slots": "for how many slots",
        "units": "for how many units",
        "amount_wei": "how much",
        "tx": "the transaction",
    },
    "checkpoints": {
        "run_id": "the run",
        "version": "policy version",
        "manifest_root": "Keccak-256 of its manifest",
        "beacon": "hash of the publishing block",
        "block": "the publishing block",
        "tx": "the publishing transaction",
    },
    "contradictions": {
        "kind": "named kind",
        "detail": "what was found",
        "rule": "what the protocol says",
        "tx": "the transaction",
        "block": "the block",
        "batch_id": "the batch",
        "position": "the place there",
    },
}
"""Columns of each table in order, with their meaning."""
_WHOLE = frozenset(
    {"run_id", "batch_id", "position", "worker_id", "units", "rollouts", "step", "index"}
    | {"policy_version", "version", "block", "slots", "submitted", "accepted", "rejected", "fraud"}
    | {"submissions", "units_declared", "signatures", "committed_block", "posted_block"}
    | {"committed_at_s", "posted_at_s"}
)
"""Columns of integers; others are text, but for `is_direct`."""
ROWS_AT_ONCE = 50_000
"""Rows that are turned into Python objects together."""


def export_tables(
    history: History, report: AuditReport, run_id: RunId, folder: Path, form: str
) -> list[Path]:
    """Write every table of a run; return the files."""
    outcomes = tabulate(history.ledger)
    plain = {
        "batches": list(_batches(history, run_id)),
        "workers": [_fields(worker, "workers") for worker in report.workers],
        "slashes": [_fields(slash, "slashes") for slash in report.slashes],
        "payments": [_fields(payment, "payments") for payment in report.payments],
        "checkpoints": [
            {"run_id": run.run_id, **_fields(checkpoint, "checkpoints", skip=("run_id",))}
            for run in report.runs
            for checkpoint in run.checkpoints
        ],
        "contradictions": [found.to_json() for found in report.contradictions],
    }
    tables = {"outcomes": outcome_table(history, outcomes, run_id)} | {
        name: _as_table(name, rows) for name, rows in plain.items()
    }
    return [write_table(table, name, folder, form) for name, table in tables.items()]


def _fields(row: Any, table: str, skip: Sequence[str] = ()) -> dict[str, Any]:
    return {name: getattr(row, name) for name in COLUMNS[table] if name not in skip}


def _schema(table: str) -> pa.Schema:
    import pyarrow as pa

    def kind(name: str) -> pa.DataType:
        return pa.int64() if name in _WHOLE else pa.bool_() if name[:3] == "is_" else pa.string()

    return pa.schema([(name, kind(name)) for name in COLUMNS[table]])


def _as_table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_pylist(rows, schema=_schema(name))


def _batches(history: History, run_id: RunId) -> Iterator[dict[str, Any]]:
    for batch in history.ledger.batches.values():
        if batch.run_id == run_id:
            root = batch.outcomes_root
            yield {
                "batch_id": batch.batch_id,
                "run_id": batch.run_id,
                "root": "0x" + batch.root.hex(),
                "submissions": batch.count,
                "units_declared": batch.units,
                "price_wei_per_unit": str(batch.price_per_unit),
                "committed_at_s": batch.committed_at,
                "committed_block": batch.block_number,
                "committed_tx": batch.tx_hash,
                "outcomes_root": None if root is None else "0x" + root.hex(),
                "posted_at_s": batch.posted_at,
                "posted_block": batch.posted_block,
                "posted_tx": batch.posted_tx,
                "signatures": len(batch.signatures),
                "is_direct": batch.direct is not None,
            }


def outcome_table(history: History, table: OutcomeTable, run_id: RunId) -> pa.Table:
    """Return a run's outcomes as a table, without an object per row."""
    import pyarrow as pa

    rows = np.flatnonzero(table.is_of(run_id))
    records, batch = table.records_N[rows], table.batch_N[rows]
    addresses = {n: w.address for n, w in history.ledger.worker_by_id.items()}
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
    columns["verdict"] = _named(records["verdict"], {v: v.name.lower() for v in Verdict})
    columns["reason"] = _named(records["reason"], {r: r.name.lower() for r in Reason})
    columns["standing_verdict"] = _named(
        table.verdict_N[rows], {v: v.name.lower() for v in Verdict}
    )
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _named(values: Any, names: dict[Any, str]) -> pa.Array:
    import pyarrow as pa

    labels = [names.get(number, f"unknown_{number}") for number in range(256)]
    return pa.array(labels, pa.string()).take(pa.array(values.astype(np.int64)))


def write_table(table: pa.Table, name: str, folder: Path, form: str) -> Path:
    """Write a table and return its file, which appears whole or not at all."""
    suffix = {"json": "jsonl"}.get(form, form)
    path = folder / f"{name}.{suffix}"
    partial = folder / f".{path.name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _WRITERS[form](table, partial)
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def _write_csv(table: pa.Table, path: Path) -> None:
    from pyarrow import csv

    csv.write_csv(table, path)


def _write_parquet(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, path, compression="zstd")


def _write_json(table: pa.Table, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for part in table.to_batches(max_chunksize=ROWS_AT_ONCE):
            file.writelines(json.dumps(row) + "\n" for row in part.to_pylist())


_WRITERS = {"csv": _write_csv, "parquet": _write_parquet, "json": _write_json}
