"""A verdict recomputed on this machine, from a submission's file and what the chain pins.

The same pure checks as a validator's, with the facts of the block that committed the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from muster.client.facts import HistoryView, ticket_terms
from muster.client.measured import Statistic, measure
from muster.client.validator.checking import Proof
from muster.client.validator.checks import Claim, check_claim, check_file, unreadable
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.judging import Judgement, Rules, examine, outcome_record, unread
from muster.client.validator.slots import KnownBatch, SlotIndex, slots_of_records
from muster.protocol.encoding import file_hash
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import Address, RunId
from muster.protocol.messages import OutcomeRecord
from muster.protocol.rollouts import MAX_FILE_BYTES, Rollout

if TYPE_CHECKING:
    from muster.api import BatchEntry
    from muster.chain import BatchView
    from muster.inference import InferenceEngine
    from muster.protocol.eip712 import Domain


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What this machine makes of a submission."""

    record: OutcomeRecord
    """The outcome it would sign."""
    detail: str
    """Where and with which values it is not acceptable; empty when it is."""
    statistics: list[Statistic]
    """What checks 6 and 7 measured, if it came to them."""
    fingerprints: Mapping[Address, bytes] = field(default_factory=dict)
    """What the validators asked about must have shown as proof of checking."""
    preferring: int | None = None
    """Samples in groups whose task rewards differ: no other can be trained on. None of a file that
    was not read."""
    proofs: Mapping[Address, Proof] = field(default_factory=dict)
    """What those validators did show, where somebody has it."""


def read_submission(path: Path, expected: bytes) -> bytes:
    """Return a submission's file; raises ConfigError when it is another."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if file_hash(data) != expected:
        raise ConfigError(
            f"{path} is not the submission's file: its hash is 0x{file_hash(data).hex()}",
            hint=f"the file that was committed has the hash 0x{expected.hex()}",
        )
    return data


def claim_at(
    view: HistoryView,
    batch: BatchView,
    entries: Sequence[BatchEntry],
    position: int,
    domain: Domain,
    slots: SlotIndex | None = None,
) -> Claim:
    """Return a submission as it stood in its batch, with the chain's facts of that block.

    `slots` are those that the run's batches fill; computed unless given.
    """
    submission = entries[position].submission
    before = [e.submission for e in entries[:position]]
    is_repeated = any(
        (e.worker, e.step, e.index) == (submission.worker, submission.step, submission.index)
        for e in before
    )
    return _claim(view, batch, entries[position], domain, slots, is_repeated=is_repeated)


def claim_of(
    view: HistoryView, batch: BatchView, entry: BatchEntry, position: int, domain: Domain
) -> Claim:
    """Return one submission of a batch as it stood there; what was before it is on chain."""
    submission = entry.submission
    standing = view.standing(batch.run_id, submission.worker, before=batch.block_number)
    slot = (standing.worker_id if standing else 0, submission.step, submission.index)
    before = slots_of_records((batch.records or ())[:position])
    return _claim(view, batch, entry, domain, None, is_repeated=slot in before)


def _claim(
    view: HistoryView,
    batch: BatchView,
    entry: BatchEntry,
    domain: Domain,
    slots: SlotIndex | None,
    *,
    is_repeated: bool,
) -> Claim:
    submission = entry.submission
    standing = view.standing(batch.run_id, submission.worker, before=batch.block_number)
    slots = slots or slots_of(view, batch.run_id)
    worker_id = standing.worker_id if standing else 0
    slot = (worker_id, submission.step, submission.index)
    is_active = standing is not None and standing.is_active(batch.block_number)
    return Claim(
        submission=submission,
        signature=entry.signature,
        ticket=entry.ticket,
        ticket_signature=entry.ticket_signature,
        committed_at=batch.committed_at,
        terms=ticket_terms(
            view,
            batch.run_id,
            domain,
            submission.policy_version,
            submission.worker,
            batch.orchestrator,
        ),
        worker_id=worker_id,
        node=standing.node if standing and is_active else None,
        is_slot_used=slots.is_used(slot, before=batch.batch_id) or is_repeated,
    )


def slots_of(view: HistoryView, run_id: RunId) -> SlotIndex:
    """Return the slots that a run's judged batches fill."""
    slots = SlotIndex()
    slots.refresh(
        KnownBatch(batch.batch_id, batch.root, slots_of_records(batch.records))
        for batch in view.batches.values()
        if batch.run_id == run_id and batch.records is not None
    )
    return slots


async def recompute(
    claim: Claim,
    data: bytes,
    rules: Rules,
    engine: InferenceEngine,
    decoder: FileDecoder,
    seats: Sequence[Address] = (),
) -> Recomputed:
    """Return the outcome of a claim; the ticket's policy is loaded.

    Of the validators in `seats`, also what their fingerprints must be.
    """
    rows, judgement = await _judge(claim, data, rules, engine, decoder, seats)
    return Recomputed(
        record=outcome_record(claim, judgement),
        detail=judgement.finding.detail if judgement.finding else "",
        statistics=measure(judgement.replays, rules.calibration),
        fingerprints=judgement.fingerprints,
        preferring=None if rows is None else _preferring(rows),
    )


def _preferring(rows: Sequence[Rollout]) -> int:
    """Return the samples in groups whose task rewards differ."""
    rewards: dict[int, list[float]] = {}
    for row in rows:
        rewards.setdefault(row.group, []).append(row.task_reward)
    return sum(len(group) for group in rewards.values() if len(set(group)) > 1)


async def _judge(
    claim: Claim,
    data: bytes,
    rules: Rules,
    engine: InferenceEngine,
    decoder: FileDecoder,
    seats: Sequence[Address],
) -> tuple[list[Rollout] | None, Judgement]:
    """Return the file's rows, None where it was not read, and what the checks say."""
    if finding := check_claim(claim) or check_file(data):
        return None, unread(claim, finding)
    sampling = rules.recipe.sampling
    max_rows = sampling.problems_per_submission * sampling.samples_per_problem
    try:
        rows = await decoder.decode(data, max_rows=max_rows)
    except EncodingError as error:
        return None, unread(claim, unreadable(str(error)))
    return rows, await asyncio.to_thread(examine, claim, rows, rules, engine, seats)
