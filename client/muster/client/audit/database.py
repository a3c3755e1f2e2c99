"""An orchestrator's SQLite database held against the chain, of which it should be a projection.

Opened read-only, and read as a stranger's file: what does not parse is a contradiction, not an
error. Batches that the database does not know are not: it may be younger than the chain.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from muster.chain import BatchView
from muster.client.audit.contradictions import Check, Contradiction, Kind, summarise
from muster.client.audit.ledger import Ledger
from muster.client.audit.work import recovered
from muster.protocol.eip712 import Domain, digest
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import RunId
from muster.protocol.merkle import merkle_root
from muster.protocol.messages import Outcomes, Submission

_ROWS = (
    "select position, file_hash, submission from submissions where batch_root = ? order by position"
)
_BATCH = "select count, units, is_judged from batches where root = ?"
_OUTCOMES = "select validator, records, signature from outcomes where batch_id = ?"


def check_database(path: Path, ledger: Ledger, run_id: RunId, domain: Domain) -> Check:
    """Return whether a database says what the chain says; `domain` is the ledger's. Raises
    ConfigError when it is none.
    """
    try:
        with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as database:
            known = 0
            found: list[Contradiction] = []
            for batch in ledger.batches.values():
                row = database.execute(_BATCH, (batch.root,)).fetchone()
                if batch.run_id == run_id and row is not None:
                    known += 1
                    found += _of_batch(database, batch, row, domain)
    except sqlite3.Error as error:
        raise ConfigError(
            f"{path} is not an orchestrator's database: {error}",
            hint="--database FILE: the orchestrator.sqlite3 of a run",
        ) from error
    return summarise("the database is a projection of the chain", found, f"{known} batches")


def _of_batch(
    database: sqlite3.Connection, batch: BatchView, row: tuple[int, int, int], domain: Domain
) -> Iterator[Contradiction]:
    count, units, is_judged = row
    if (count, units) != (batch.count, batch.units):
        what = f"{count} submissions of {units} units, on chain {batch.count} of {batch.units}"
        yield _altered(batch, what)
    if is_judged and batch.records is None:
        yield _altered(batch, "it is judged, on chain it is not")
    rows = database.execute(_ROWS, (batch.root,)).fetchall()
    yield from _of_submissions(batch, rows)
    for validator, records, signature in database.execute(_OUTCOMES, (batch.batch_id,)):
        # Who was outvoted signed other records than those on chain, and may.
        message = Outcomes(batch.batch_id, batch.root, keccak(bytes(records)))
        signer = recovered(digest(domain, message.struct_hash()), bytes(signature))
        if signer != validator:
            yield _altered(batch, f"{validator} did not sign the outcomes kept as its own")


def _of_submissions(
    batch: BatchView, rows: list[tuple[int, bytes, str]]
) -> Iterator[Contradiction]:
    submissions = []
    for position, file_hash, text in rows:
        try:
            submission = Submission.from_json(json.loads(text))
        except (EncodingError, ValueError, TypeError, RecursionError) as error:
            yield _altered(batch, f"the submission is malformed: {error}", position)
            return
        if submission.file_hash != file_hash:
            what = f"the file is {hex0x(bytes(file_hash))}, its submission says another"
            yield _altered(batch, what, position)
        submissions.append(submission)
    if not submissions or merkle_root([each.leaf() for each in submissions]) != batch.root:
        what = f"the {len(submissions)} submissions kept are not those that were committed"
        yield _altered(batch, what)
    records = batch.records or ()
    for position, (submission, record) in enumerate(zip(submissions, records, strict=False)):
        if submission.file_hash != record.file_hash:
            what = (
                f"the file is {hex0x(submission.file_hash)}, judged was {hex0x(record.file_hash)}"
            )
            yield _altered(batch, what, position)


def _altered(batch: BatchView, what: str, position: int | None = None) -> Contradiction:
    return Contradiction(
        Kind.DATABASE_ALTERED,
        what,
        tx=batch.tx_hash,
        block=batch.block_number,
        batch_id=batch.batch_id,
        position=position,
    )
