"""One worker, one submission, every slash: what the ledger says and what contradicts it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from muster.chain import BatchView, Place, find_outcome, find_worker
from muster.client.audit.calls import drawn_first
from muster.client.audit.contradictions import Contradiction, Kind
from muster.client.audit.history import History
from muster.client.audit.observed import parameter
from muster.client.audit.table import OutcomeTable, tabulate
from muster.client.audit.work import outcome_signers
from muster.protocol.encoding import hex0x
from muster.protocol.errors import ConfigError
from muster.protocol.ids import Hash32
from muster.protocol.jury import summons_of
from muster.protocol.merkle import merkle_proof
from muster.protocol.messages import Verdict


def worker_facts(history: History, worker: str) -> dict[str, Any]:
    """Return a worker's figures, outcomes, slashes and payments; raises ConfigError for nobody."""
    account = find_worker(history.ledger, worker)
    address = account.address
    report, table = history.report(), tabulate(history.ledger)
    rows = np.flatnonzero(table.column("worker_id") == account.worker_id).tolist()
    places = {(batch.batch_id, position) for batch, position in map(table.place, rows)}
    figures = [worker for worker in report.workers if worker.address == address]
    return {
        "worker": {"address": address, "worker_id": account.worker_id, "node": account.node},
        "memberships": [asdict(membership) for membership in figures],
        "outcomes": [_outcome(table, row) for row in rows],
        "slashes": [asdict(slash) for slash in report.slashes if slash.worker == address],
        "payments": [asdict(each) for each in report.payments if each.worker == address],
        "contradictions": [
            found.to_json()
            for found in report.contradictions
            if address in found.detail or (found.batch_id, found.position) in places
        ],
    }


def _outcome(table: OutcomeTable, row: int) -> dict[str, Any]:
    batch, position = table.place(row)
    record = table.record(row)
    return {
        "run_id": batch.run_id,
        "batch_id": batch.batch_id,
        "position": position,
        "step": record.step,
        "index": record.index,
        "policy_version": record.policy_version,
        "file_sha256": hex0x(record.file_hash),
        "units": record.units,
        "verdict": record.verdict.name.lower(),
        "reason": record.reason.name.lower(),
        "standing_verdict": Verdict(int(table.verdict_N[row])).name.lower(),
        "posted_tx": batch.posted_tx,
    }


def row_of(table: OutcomeTable, place: Place) -> int:
    """Return an outcome's row; raises ConfigError when it is not judged yet."""
    for number, batch in enumerate(table.batches):
        if batch.batch_id == place.batch.batch_id:
            return int(table.starts[number]) + place.position
    raise ConfigError(f"submission {place} is not judged yet", hint="muster explain says who is to")


def submission_facts(history: History, submission: str) -> dict[str, Any]:
    """Return everything that the chain proves about an outcome."""
    table, ledger = tabulate(history.ledger), history.ledger
    row = row_of(table, find_outcome(ledger, submission))
    batch, position = table.place(row)
    record = table.record(row)
    leaves = batch.leaves()
    leaf = leaves[position]
    case = ledger.cases.get(leaf) or ledger.cases.get(summons_of(batch.batch_id))
    worker = ledger.worker_by_id.get(record.worker_id)
    slash = next(
        (s for s in ledger.slashes if (s.batch_id, s.position) == (batch.batch_id, position)), None
    )
    return {
        **_outcome(table, row),
        "worker": None if worker is None else worker.address,
        "price_wei_per_unit": str(batch.price_per_unit),
        "committed": _moment(batch.committed_at, batch.block_number, batch.tx_hash),
        "posted": _moment(batch.posted_at, batch.posted_block, batch.posted_tx),
        **_called(history, batch),
        "signed_by": [signer for signer in outcome_signers(batch, history.domain) if signer],
        "leaf": hex0x(leaf),
        "outcomes_root": None if batch.outcomes_root is None else hex0x(batch.outcomes_root),
        "proof": [hex0x(node) for node in merkle_proof(leaves, position)],
        "case": None
        if case is None
        else {
            "opened_tx": case.opened_tx,
            "closed_tx": case.closed_tx,
            "is_overturned": case.overturned,
        },
        "slash_tx": None if slash is None else slash.tx_hash,
        "contradictions": [found.to_json() for found in _about(history, batch, position, leaf)],
    }


def _called(history: History, batch: BatchView) -> dict[str, Any]:
    """Return who was drawn to check a batch, and on what ground others signed instead."""
    if not batch.signers:
        return {"drawn_first": None, "signed_on_ground": "judged by jurors of the network"}
    deadline_s = parameter(history.deployment, history.observed, "outcome_deadline_s")
    if deadline_s is None:
        return {"drawn_first": None, "signed_on_ground": None}
    first, ground = drawn_first(history.ledger, batch, deadline_s)
    return {"drawn_first": first, "signed_on_ground": str(ground)}


def _moment(at_s: int | None, block: int | None, tx: str | None) -> dict[str, Any]:
    return {"at_s": at_s, "block": block, "tx": tx}


def _about(
    history: History, batch: BatchView, position: int, _leaf: Hash32
) -> Iterator[Contradiction]:
    for found in history.report().contradictions:
        if found.batch_id == batch.batch_id and found.position in (None, position):
            yield found


SLASHES = {
    Kind.SLASH_UNFOUNDED,
    Kind.SLASH_OTHER_RUN,
    Kind.SLASH_VERDICT,
    Kind.SLASH_SHARE,
    Kind.SLASH_REPORTER,
    Kind.SLASH_SPLIT,
    Kind.SLASH_FOLLOWED,
}


def slash_facts(history: History) -> dict[str, Any]:
    """Return every slash with what contradicts it."""
    report = history.report()
    wrong: Sequence[Contradiction] = [c for c in report.contradictions if c.kind in SLASHES]
    return {
        "slashes": [
            {**asdict(slash), "is_founded": not any(slash.tx == found.tx for found in wrong)}
            for slash in report.slashes
        ],
        "contradictions": [found.to_json() for found in wrong],
    }
