"""The audit as files: its tables as CSV or Parquet.

Columns are stable: their order, names and types are those of TABLES, from whose fields
docs/reference/audit.md is made. Amounts in wei are decimal text, for they do not fit 64 bits;
hashes and addresses are `0x` hexadecimal; times are Unix seconds of the chain's clock. A value
that does not apply is null (empty in CSV).
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any, TypedDict, get_args, get_type_hints

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from muster.client.audit.history import ChainHistory
from muster.client.audit.ledger import Ledger
from muster.client.audit.outcome_table import OutcomeTable, tabulate
from muster.client.audit.report import AuditReport, PaymentReport, SlashReport, WorkerReport
from muster.lifecycle.files import whole_file
from muster.protocol.encoding import hex0x
from muster.protocol.ids import RunId
from muster.protocol.messages import Reason, Verdict


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
    rows = {
        "batches": _batches(history.ledger, run_id),
        "workers": map(asdict, report.workers),
        "slashes": map(asdict, report.slashes),
        "payments": map(asdict, report.payments),
        "checkpoints": (
            {"run_id": run.run_id, **asdict(checkpoint)}
            for run in report.runs
            for checkpoint in run.checkpoints
        ),
        "contradictions": (found.to_json() for found in report.contradictions),
    }
    tables = {"outcomes": outcome_table(history.ledger, tabulate(history.ledger), run_id)}
    for name, of_table in rows.items():
        tables[name] = pa.Table.from_pylist(list(of_table), schema=_schema(name))
    written = []
    for name, table in tables.items():
        path = folder / f"{name}.{form}"
        with whole_file(path) as partial:
            if form == "csv":
                csv.write_csv(table, partial)
            else:
                parquet.write_table(table, partial, compression="zstd")
        written.append(path)
    return written


def _schema(table: str) -> pa.Schema:
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
    names = {int(each): each.name.lower() for each in kind}
    labels = [names.get(number, f"unknown_{number}") for number in range(256)]
    return pa.array(labels, pa.string()).take(pa.array(values.astype(np.int64)))
