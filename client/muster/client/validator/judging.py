"""From a claim to its outcome record: the checks in order, the first finding decides.

Pure but for the engine's arithmetic; runs off the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from muster.client.assignment import Assignment, derive
from muster.client.validator.checks import (
    Claim,
    Finding,
    ModelShape,
    check_assignment,
    check_endings,
    check_form,
    check_grades,
    check_proofs,
    check_replies,
    check_sampling,
    check_turns,
)
from muster.client.validator.replay import Replay, replay_rows
from muster.client.validator.sketch import Sketch
from muster.inference import InferenceEngine
from muster.inference.dialogue import Claimed, Followed, follow
from muster.protocol.errors import EngineError, MusterError, ProofError
from muster.protocol.ids import Address
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Verdict
from muster.protocol.recipe import Recipe, SamplingRecipe
from muster.protocol.rollouts import Rollout, count_units
from muster.tasks import TaskSet, runs_completions
from muster.toploc import Calibration

logger = logging.getLogger(__name__)

MAX_UINT16 = (1 << 16) - 1
MAX_UINT32 = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Rules:
    """What a run's pinned documents say."""

    recipe: Recipe
    """Sampling, proof and training parameters."""
    task_set: TaskSet
    """The problems."""
    calibration: Calibration
    """The limits of checks 6 and 7."""


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """What a validator concludes about one claim."""

    finding: Finding | None
    """Why it is not accepted, or None."""
    units: int
    """As recomputed, or as claimed when the file was not read."""
    replays: tuple[Replay, ...] = ()
    """The measurements behind checks 6 and 7, when it came to them."""
    fingerprints: Mapping[Address, bytes] = field(default_factory=dict)
    """What each validator's fingerprints of the hidden states are, if it came to those."""


def unread(claim: Claim, finding: Finding) -> Judgement:
    """Return the judgement on a claim whose file gave no rows."""
    return Judgement(finding, claim.submission.units)


def examine(
    claim: Claim,
    rows: Sequence[Rollout],
    rules: Rules,
    engine: InferenceEngine,
    seats: Sequence[Address] = (),
) -> Judgement:
    """Return the judgement on a claim that passed check 1, with the ticket's policy loaded, and
    what the fingerprints of the validators in `seats` must be.
    """
    sampling = rules.recipe.sampling
    shape = ModelShape(engine.hidden_size, engine.vocab_size, engine.eos_token_ids)
    units = count_units(rows, sampling.max_new_tokens)
    if finding := check_form(rows, claim.submission, rules.recipe, shape):
        return Judgement(finding, units)
    assert claim.ticket is not None  # check 1
    assignment = derive(claim.ticket, sampling, rules.task_set, engine.encode)
    runs_text = any(runs_completions(group.problem.task_type) for group in assignment.groups)
    completions = partial(_check_completions, rows, claim.submission, assignment, sampling, engine)
    finding = check_assignment(rows, assignment)
    if not finding:
        # Where what a completion says is run, it must be the policy's first: strangers' programs
        # would cost a validator any time at no stake.
        finding = check_turns(rows, engine.eos_token_ids) if runs_text else completions()
    if finding:
        return Judgement(finding, units)
    sketch = Sketch(claim, seats, [len(row.completion_tokens) for row in rows])
    try:
        replays = replay_rows(rows, engine, rules.recipe, sketch.take)
    except (ProofError, EngineError) as error:
        # NaN, or a sample longer than the model can take: nothing that a proof could match.
        logger.error("prefill failed", extra={"error": str(error)})
        return Judgement(_without_prefill(error), units)
    finding = check_proofs(replays, rules.calibration) or check_sampling(replays, rules.calibration)
    if runs_text and not finding:
        finding = completions()
    return Judgement(finding, units, tuple(replays), sketch.fingerprints())


def _check_completions(
    rows: Sequence[Rollout],
    submission: Submission,
    assignment: Assignment,
    sampling: SamplingRecipe,
    engine: InferenceEngine,
) -> Finding | None:
    """Follow every completion turn by turn, then check replies, grades and endings."""
    limit = sampling.max_new_tokens
    claimed = [
        Claimed(assignment.groups[row.group].problem, row.completion_tokens, row.replies)
        for row in rows
    ]
    followed = follow(engine, claimed, limit)
    finding = check_replies(followed, lambda i: follow(engine, [claimed[i]], limit)[0])
    if finding:
        return finding
    decided = [found for found in followed if isinstance(found, Followed)]  # all of them
    texts, units = [found.answer for found in decided], count_units(rows, limit)
    return check_grades(rows, submission, assignment, texts, units) or check_endings(
        rows, decided, sampling, engine.eos_token_ids
    )


def _without_prefill(error: MusterError) -> Finding:
    return Finding(Verdict.REJECTED, Reason.TOPLOC_MISMATCH, f"cannot be prefilled: {error}")


def outcome_record(claim: Claim, judgement: Judgement) -> OutcomeRecord:
    """Return the record of a judgement; what does not fit its field is capped."""
    finding = judgement.finding
    submission = claim.submission
    return OutcomeRecord(
        worker_id=claim.worker_id,
        step=submission.step,
        index=submission.index,
        policy_version=submission.policy_version,
        file_hash=submission.file_hash,
        rollouts=min(submission.rollouts, MAX_UINT16),
        units=min(judgement.units, MAX_UINT32),
        verdict=finding.verdict if finding else Verdict.ACCEPTED,
        reason=finding.reason if finding else Reason.NONE,
    )


def within_declared(records: Sequence[OutcomeRecord], units: int) -> list[OutcomeRecord]:
    """Return a batch's outcomes as the ledger takes them: with no more units than it declared.

    Records that exceed what was committed, and set aside to be paid, could not be posted, and the
    validators would be punished for their absence. The whole batch is refused instead.
    """
    if sum(record.units for record in records) <= units:
        return list(records)
    verdict, reason = Verdict.REJECTED, Reason.BATCH_MISDECLARED
    return [replace(record, verdict=verdict, reason=reason, units=0) for record in records]
