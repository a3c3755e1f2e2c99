"""A verdict recomputed on this machine, from a submission's file and the run's pinned documents.

Uses the same pure checks as a validator, with the facts of the block that committed the batch.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from muster.api import BatchEntry
from muster.chain import BatchView
from muster.client.chain_facts import HistoryView
from muster.client.validator.batches import (
    SlotIndex,
    claim_in,
    slots_of_entries,
    slots_of_records,
)
from muster.client.validator.checking_proofs import Proof
from muster.client.validator.checks import ClaimedWork, check_claim, check_file, conduct_of
from muster.client.validator.decoding import FileDecoder
from muster.client.validator.examiner import read_rows
from muster.client.validator.judging import (
    Judgement,
    Rules,
    outcome_record,
    unread,
    without_prefill,
)
from muster.client.validator.replay import Statistic, measure, replay_rows
from muster.client.validator.soundness import examine_surely, own_trouble
from muster.inference import InferenceEngine
from muster.inference.engine import set_aside_in
from muster.protocol.eip712 import Domain
from muster.protocol.encoding import file_hash
from muster.protocol.errors import ConfigError, PolicyBroken
from muster.protocol.ids import Address, PolicyVersion, RunId
from muster.protocol.messages import OutcomeRecord
from muster.protocol.rollouts import MAX_FILE_BYTES, Bounds, Rollout
from muster.protocol.set_aside import NOTHING, SetAside
from muster.settings import read_file
from muster.shardcast.delta_layout import require_finite
from muster.toploc.sequential_test import Conduct

SILENCE_S = 600.0
"""Seconds after which a silent engine with a stranger's policy is started again: a CPU may take
minutes for the samples between two signs of life.
"""

InThread = Callable[..., Awaitable[Any]]
"""Returns the result of a function, which it calls with the other arguments in a thread."""


@dataclass(frozen=True, slots=True)
class Rerun:
    """This machine's verdict on a submission."""

    record: OutcomeRecord
    """The outcome it would sign."""
    detail: str
    """Where and with which values it fails; empty when it passes."""
    statistics: list[Statistic]
    """Measurements of checks 6 and 7, if they were reached."""
    fingerprints: Mapping[Address, bytes] = field(default_factory=dict)
    """Expected fingerprints by validator."""
    preferring: int | None = None
    """Samples in groups whose task rewards differ; only these can be trained on. None if the file
    was not read.
    """
    proofs: Mapping[Address, Proof] = field(default_factory=dict)
    """Result of each validator's own proof of checking, if it is available."""


def read_submission(path: Path, expected: bytes) -> bytes:
    """Return a submission's file; raises ConfigError when its hash differs."""
    data = read_file(path, MAX_FILE_BYTES)
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
) -> ClaimedWork:
    """Return a submission as it stood in its batch, with the chain's facts of that block.

    `slots` are those that the run's batches fill; computed if not given.
    """
    entry = entries[position]
    own = [e for e in entries[:position] if e.submission.worker == entry.submission.worker]
    earlier = slots_of_entries(view, batch, own, domain)
    return claim_in(view, batch, entry, domain, slots or slots_of(view, batch.run_id), earlier)


def claim_of(
    view: HistoryView, batch: BatchView, entry: BatchEntry, position: int, domain: Domain
) -> ClaimedWork:
    """Return one submission of a judged batch as validators saw it."""
    earlier = slots_of_records((batch.records or ())[:position])
    return claim_in(view, batch, entry, domain, slots_of(view, batch.run_id), earlier)


def slots_of(view: HistoryView, run_id: RunId) -> SlotIndex:
    """Return the slots that a run's judged batches fill."""
    slots = SlotIndex()
    for batch in view.batches.values():
        if batch.run_id == run_id and batch.records is not None:
            slots.add(batch.first_id, slots_of_records(batch.records))
    return slots


async def hold(engine: InferenceEngine, folder: Path, version: PolicyVersion) -> None:
    """Load a policy unless the engine holds this version, of the same run. Raises PolicyBroken when
    its weights are not finite, StorageError and EngineError.
    """
    if engine.policy_version != version:
        with own_trouble():
            await asyncio.to_thread(require_finite, folder, version)
            await asyncio.to_thread(engine.load_policy, folder, version)


async def recompute(
    claim: ClaimedWork,
    data: bytes,
    rules: Rules,
    engine: InferenceEngine,
    decoder: FileDecoder,
    seats: Sequence[Address] = (),
    *,
    folder: Path | None = None,
    run: InThread = asyncio.to_thread,
) -> Rerun:
    """Return the outcome of a claim. The ticket's policy must be loaded, or its verified files lie
    in `folder`; if its weights are not finite, its work is rejected, as validators do. Raises
    EngineError when this machine has too little memory, or the policy does not load.

    The result also holds the fingerprints that the validators in `seats` must have shown. `run`
    examines in a thread, which an answer may hang.
    """
    if folder is not None:
        try:
            await hold(engine, folder, claim.submission.policy_version)
        except PolicyBroken as fault:
            return await recompute_broken(claim, data, rules, decoder, folder, fault)
    rows, judgement = await _judge(claim, data, rules, engine, decoder, seats, run)
    return _as_rerun(claim, rules, judgement, rows)


async def recompute_broken(
    claim: ClaimedWork,
    data: bytes,
    rules: Rules,
    decoder: FileDecoder,
    folder: Path,
    fault: PolicyBroken,
) -> Rerun:
    """Return the outcome of a claim whose policy, with its verified files in `folder`, has weights
    that are not finite.
    """
    found = await _read(claim, data, rules, decoder, partial(set_aside_in, folder))
    if not isinstance(found, Judgement):
        found = unread(claim, without_prefill(fault))
    return _as_rerun(claim, rules, found)


def _as_rerun(
    claim: ClaimedWork, rules: Rules, judgement: Judgement, rows: list[Rollout] | None = None
) -> Rerun:
    return Rerun(
        record=outcome_record(claim, judgement),
        detail=judgement.finding.detail if judgement.finding else "",
        statistics=measure(judgement.replays, rules.calibration),
        fingerprints=judgement.fingerprints,
        preferring=None if rows is None else _preferring(rows),
    )


async def measure_conduct(
    data: bytes, seed: bytes, rules: Rules, engine: InferenceEngine, decoder: FileDecoder
) -> Conduct:
    """Return the figures of an accepted submission, of a batch with this seed, for the sequential
    test of its worker; its policy must be loaded. Raises EncodingError for a file without rows.
    """
    with own_trouble():
        rows = await decoder.decode(data, Bounds.of(rules.recipe))
        replays = await asyncio.to_thread(replay_rows, rows, engine, rules.recipe, seed=seed)
    return conduct_of(replays, rules.calibration)


def _preferring(rows: Sequence[Rollout]) -> int:
    """Return the samples in groups whose task rewards differ."""
    rewards: dict[int, list[float]] = {}
    for row in rows:
        rewards.setdefault(row.group, []).append(row.task_reward)
    return sum(len(group) for group in rewards.values() if len(set(group)) > 1)


async def _judge(
    claim: ClaimedWork,
    data: bytes,
    rules: Rules,
    engine: InferenceEngine,
    decoder: FileDecoder,
    seats: Sequence[Address],
    run: InThread,
) -> tuple[list[Rollout] | None, Judgement]:
    """Return the file's rows, None if it was not read, and the judgement."""
    rows = await _read(claim, data, rules, decoder, lambda: engine.set_aside)
    if isinstance(rows, Judgement):
        return None, rows
    with own_trouble():
        judged = await run(examine_surely, claim, rows, rules, engine, seats)
    return rows, judged


async def _read(
    claim: ClaimedWork,
    data: bytes,
    rules: Rules,
    decoder: FileDecoder,
    listed: Callable[[], SetAside],
) -> list[Rollout] | Judgement:
    """Return the file's rows, or the judgement of a check that comes before the policy; `listed`
    gives the policy's list, which is needed where the recipe skips problems.
    """
    if finding := check_claim(claim) or check_file(data):
        return unread(claim, finding)
    with own_trouble():
        of_policy = listed() if rules.recipe.skips_problems else NOTHING
        return await read_rows(claim, data, rules, decoder, of_policy)
