"""An orchestrator's SQLite database held against the chain, of which it should be a projection.

Opened read-only, and read as a stranger's file: what does not parse is a contradiction, not an
error. What is compared:

1. whose it is: run, chain and ledger
2. batches: every one that its orchestrator committed is there, with the figures of the chain
3. submissions: each column with the signed claim, the claims with the batch's root, the signatures
   with the worker's nodes and the orchestrator
4. outcomes: every validator that signed those on chain is there, with its signature on them
5. tickets that were filled have their submission

Tables and columns that the chain says nothing about are notes, as are batches that were committed
after everything that the database holds: it may be an older copy.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.chain import BatchView, WorkerView
from muster.client.audit.contradictions import Check, Contradiction, Kind, at_commitment, summarise
from muster.client.audit.ledger import Ledger
from muster.client.audit.work import signer_of
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import Address, RunId
from muster.protocol.merkle import merkle_root
from muster.protocol.messages import Outcomes, Submission, Ticket

_ROWS = (
    'select position, file_hash, worker, step, "index", units, submission, signature, ticket, '
    "ticket_signature from submissions where batch_root = ? order by position"
)
_BATCH = "select count, units, is_judged from batches where root = ?"
_OUTCOMES = "select validator, records, signature from outcomes where batch_id = ?"
_UNMATCHED = (
    'select l.worker, l.step, l."index" from leases l left join submissions s on s.worker = '
    'l.worker and s.step = l.step and s."index" = l."index" '
    "where l.is_filled and s.sequence is null"
)
_NEWEST = (
    "select max(at) from (select max(received_at) as at from submissions "
    "union all select max(received_at) from outcomes)"
)
_TABLES = "select name from sqlite_master where type = 'table' and name not like 'sqlite_%'"
COMPARED = frozenset({"identity", "batches", "submissions", "outcomes", "schema_version"})
"""Tables whose rows are held against the chain; the last says how the others are laid out."""


def check_database(path: Path, ledger: Ledger, run_id: RunId, domain: Domain) -> Check:
    """Return whether a database says what the chain says; `domain` is the ledger's. Raises
    ConfigError when it is none.
    """
    try:
        with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as database:
            database.row_factory = sqlite3.Row
            found = DatabaseComparison(database, ledger, run_id, domain)
            summary = f"{len(found.known)} batches with their submissions and outcomes"
            return summarise(
                "the database is a projection of the chain",
                found.contradictions(),
                summary,
                notes=found.notes(),
            )
    except sqlite3.Error as error:
        raise ConfigError(
            f"{path} is not an orchestrator's database: {error}",
            hint="--database FILE: the orchestrator.sqlite3 of a run",
        ) from error


class DatabaseComparison:
    """Compares one database with one chain."""

    def __init__(
        self, database: sqlite3.Connection, ledger: Ledger, run_id: RunId, domain: Domain
    ) -> None:
        self._database, self._ledger, self._domain = database, ledger, domain
        self._run_id = run_id
        self._batches = [b for b in ledger.batches.values() if b.run_id == run_id]
        self.known = [b for b in self._batches if self._row_of(b) is not None]
        """The run's batches that the database has."""
        newest = database.execute(_NEWEST).fetchone()[0]
        self._newest_at = newest if isinstance(newest, (int, float)) else 0

    def contradictions(self) -> Iterator[Contradiction]:
        """Yield everything that the chain says otherwise."""
        yield from self._of_identity()
        for batch in self._missing():
            if batch.committed_at <= self._newest_at:
                yield _altered(batch, "the database has later things, and not this batch")
        for batch in self.known:
            yield from self._of_batch(batch)
        roots = {batch.root for batch in self._ledger.batches.values()}
        for (root,) in self._database.execute("select root from batches where is_judged"):
            if root not in roots:
                what = f"batch {hex0x(_blob(root))} is judged here, and is not on chain"
                yield Contradiction(Kind.DATABASE_ALTERED, what)
        for worker, step, index in self._database.execute(_UNMATCHED):
            what = f"the submission of {worker}, step {step}, index {index} was received, and is "
            yield Contradiction(Kind.DATABASE_ALTERED, f"{what}not here")

    def notes(self) -> Iterator[str]:
        """Yield what was not compared."""
        tables = {name for (name,) in self._database.execute(_TABLES)}
        if rest := sorted(tables - COMPARED):
            yield f"not compared, not on chain: the tables {', '.join(rest)}"
        yield "not compared, not on chain: when and how large submissions came, and their order"
        roots = {batch.root for batch in self._ledger.batches.values()}
        rows = self._database.execute("select batch_root from submissions").fetchall()
        if waiting := sum(root not in roots for (root,) in rows):
            yield f"not compared: {waiting} submissions that are in no batch on chain yet"
        for batch in self._missing():
            if batch.committed_at > self._newest_at:
                yield f"not compared: batch {batch.batch_id} is younger than the database"

    def _row_of(self, batch: BatchView) -> Any:
        return self._database.execute(_BATCH, (batch.root,)).fetchone()

    def _missing(self) -> Iterator[BatchView]:
        """Yield batches that the database should have: those of the orchestrators it is of."""
        known = {batch.batch_id for batch in self.known}
        owners = {batch.orchestrator for batch in self.known}
        owners = owners or {self._ledger.runs[self._run_id].config.orchestrator}
        for batch in self._batches:
            is_own = batch.direct is None and batch.orchestrator in owners
            if is_own and batch.batch_id not in known:
                yield batch

    def _of_identity(self) -> Iterator[Contradiction]:
        rows = self._database.execute("select run_id, chain_id, ledger from identity").fetchall()
        wanted = (self._run_id, self._domain.chain_id, self._domain.verifying_contract)
        if (said := [tuple(row) for row in rows]) != [wanted]:
            what = f"it says that it is of (run, chain, ledger) {said}, on chain {[wanted]}"
            yield Contradiction(Kind.DATABASE_ALTERED, what)

    def _of_batch(self, batch: BatchView) -> Iterator[Contradiction]:
        count, units, is_judged = self._row_of(batch)
        if (count, units) != (batch.count, batch.units):
            what = f"{count} submissions of {units} units, on chain {batch.count} of {batch.units}"
            yield _altered(batch, what)
        if is_judged and batch.records is None:
            yield _altered(batch, "it is judged, on chain it is not")
        yield from self._of_submissions(batch, self._database.execute(_ROWS, (batch.root,)))
        yield from self._of_outcomes(batch)

    def _of_submissions(
        self, batch: BatchView, rows: Iterable[sqlite3.Row]
    ) -> Iterator[Contradiction]:
        submissions = []
        for row in rows:
            try:
                submission = Submission.from_json(json.loads(row["submission"]))
                ticket = Ticket.from_json(json.loads(row["ticket"]))
            except (EncodingError, ValueError, TypeError, RecursionError) as error:
                what = f"the submission or its ticket is malformed: {error}"
                yield _altered(batch, what, row["position"])
                return
            for what in self._of_row(batch, row, submission, ticket):
                yield _altered(batch, what, row["position"])
            submissions.append(submission)
        if not submissions or merkle_root([each.leaf() for each in submissions]) != batch.root:
            what = f"the {len(submissions)} submissions kept are not those that were committed"
            yield _altered(batch, what)
        records = batch.records or ()
        for position, (submission, record) in enumerate(zip(submissions, records, strict=False)):
            if submission.file_hash != record.file_hash:
                files = f"{hex0x(submission.file_hash)}, judged was {hex0x(record.file_hash)}"
                yield _altered(batch, f"the file is {files}", position)

    def _of_row(
        self, batch: BatchView, row: sqlite3.Row, submission: Submission, ticket: Ticket
    ) -> Iterator[str]:
        """Yield where a row, its signed claim and its signed ticket differ."""
        if submission.file_hash != row["file_hash"]:
            yield f"the file is {hex0x(_blob(row['file_hash']))}, its submission says another"
        columns = (row["worker"], row["step"], row["index"], row["units"])
        claimed = (submission.worker, submission.step, submission.index, submission.units)
        if columns != claimed:
            yield f"(worker, step, index, units) are {columns}, its submission says {claimed}"
        of = (ticket.run_id, ticket.worker, ticket.step, ticket.index, ticket.policy_version)
        slot = (batch.run_id, *claimed[:3], submission.policy_version)
        if of != slot:
            yield f"its ticket is for (run, worker, step, index, policy) {of}, it fills {slot}"
        node = signer_of(self._domain, submission, _blob(row["signature"]))
        worker = self._ledger.workers.get(submission.worker)
        if node is None or node not in _nodes(worker):
            yield f"its signature is by {node}, who is no node of {submission.worker}"
        signer = signer_of(self._domain, ticket, _blob(row["ticket_signature"]))
        if signer != batch.orchestrator:
            yield f"its ticket is signed by {signer}, the orchestrator is {batch.orchestrator}"

    def _of_outcomes(self, batch: BatchView) -> Iterator[Contradiction]:
        rows = self._database.execute(_OUTCOMES, (batch.batch_id,)).fetchall()
        for validator, records, signature in rows:
            # An outvoted validator signed other records than those on chain, and may.
            message = Outcomes(batch.batch_id, batch.root, keccak(_blob(records)))
            if signer_of(self._domain, message, _blob(signature)) != validator:
                yield _altered(batch, f"{validator} did not sign the outcomes kept as its own")
        kept = {validator for validator, *_ in rows}
        for who, bit in self._ledger.runs[batch.run_id].seats.items():
            if batch.signers & bit and who not in kept:
                yield _altered(batch, f"{who} signed the outcomes on chain, and none are kept")


def _blob(value: object) -> bytes:
    """Return a column's bytes; none of a value of another type, which a stranger may have put."""
    return value if isinstance(value, bytes) else b""


def _nodes(worker: WorkerView | None) -> set[Address]:
    return set() if worker is None else {node for _, node in worker.nodes}


def _altered(batch: BatchView, what: str, position: int | None = None) -> Contradiction:
    return replace(at_commitment(batch, Kind.DATABASE_ALTERED, what), position=position)
