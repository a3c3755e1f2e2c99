"""From a claim to its outcome record: the checks in order; the first failure decides.

Pure except for the engine; runs off the event loop.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import numpy as np

from muster.client.tickets import Assignment, derive, list_fault, most_prompt_tokens
from muster.client.validator.checks import (
    ClaimedWork,
    FailedCheck,
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
from muster.inference import InferenceEngine
from muster.inference.dialogue import Claimed, Followed, follow
from muster.inference.engine import Share
from muster.protocol.checking import block_seed, split_blocks
from muster.protocol.errors import MusterError, ProofError, SampleUnfit
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import OutcomeRecord, Reason, Submission, Verdict
from muster.protocol.recipe import Recipe
from muster.protocol.rollouts import Bounds, Rollout, count_units
from muster.protocol.set_aside import SetAside
from muster.tasks import TaskSet, runs_completions
from muster.toploc import Calibration
from muster.toploc.projections import fingerprint

logger = logging.getLogger(__name__)

MAX_UINT16 = (1 << 16) - 1
MAX_UINT32 = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Rules:
    """A run's pinned documents; raises TaskError when they cannot derive any ticket."""

    recipe: Recipe
    """Sampling, proof and training parameters."""
    task_set: TaskSet
    """The problems."""
    calibration: Calibration
    """The limits of checks 6 and 7."""

    def __post_init__(self) -> None:
        self.task_set.require_parts(self.recipe)


@dataclass(frozen=True, slots=True, eq=False)
class Judgement:
    """A validator's conclusion on one claim."""

    finding: FailedCheck | None
    """Why it is not accepted, or None."""
    units: int
    """Recomputed units, or claimed units when the file was not read."""
    replays: tuple[Replay, ...] = ()
    """The measurements of checks 6 and 7, if they were reached."""
    fingerprints: Mapping[Address, bytes] = field(default_factory=dict)
    """Expected fingerprints of each validator, if the prefill was reached."""
    is_nonsense: bool = False
    """Whether the prefill gave NaN or infinity, which with a sound engine is the file's fault."""
    earlier: tuple[tuple[int, int], ...] = ()
    """The worker's submissions, (batch, position), that were taken into account with this one."""


def say_list_fault(rules: Rules, engine: InferenceEngine) -> None:
    """Log why the loaded policy's list of set-aside problems is invalid, if it is."""
    fault = list_fault(rules.recipe, rules.task_set, engine.set_aside)
    if fault is not None:
        logger.warning(
            "a policy's list of problems set aside is refused: nothing is set aside",
            extra={"policy_version": engine.policy_version, "reason": str(fault)},
        )


def bounds_of(claim: ClaimedWork, rules: Rules, listed: SetAside) -> Bounds:
    """Return the size bounds of the file of a claim that passed check 1; `listed` is the list of
    its policy.
    """
    assert claim.ticket is not None  # check 1
    most = most_prompt_tokens(claim.ticket, rules.recipe, rules.task_set, listed)
    return Bounds.of(rules.recipe, prompt_tokens=most)


MISDECLARED = Judgement(
    FailedCheck(
        Verdict.REJECTED,
        Reason.BATCH_MISDECLARED,
        "its batch declares fewer units than its submissions claim",
    ),
    units=0,
)
"""The judgement on every submission of such a batch, since the ledger would not accept more
units."""


def unread(claim: ClaimedWork, finding: FailedCheck) -> Judgement:
    """Return the judgement on a claim whose file was not read."""
    return Judgement(finding, claim.submission.units)


def examine(
    claim: ClaimedWork,
    rows: Sequence[Rollout],
    rules: Rules,
    engine: InferenceEngine,
    seats: Sequence[Address] = (),
    *,
    proofs_first: bool = False,
) -> Judgement:
    """Return the judgement on a claim that passed check 1, with the ticket's policy loaded, and the
    expected fingerprints of the validators in `seats`. With `proofs_first`, checks 6 and 7 come
    before replies and grades for every task.

    Raises EngineError, MemoryError and similar errors when the machine fails, which judges nobody.
    """
    sampling = rules.recipe.sampling
    units = count_units(rows, sampling.max_new_tokens)
    if finding := check_form(rows, claim.submission, rules.recipe, engine):
        return Judgement(finding, units)
    assert claim.ticket is not None  # check 1
    assignment = derive(claim.ticket, rules.recipe, rules.task_set, engine)
    # A completion that is executed must first be proven to be the policy's: otherwise strangers'
    # programs could waste a validator's time at no risk.
    proofs_first = proofs_first or any(
        runs_completions(group.problem.task_type) for group in assignment.groups
    )
    completions = partial(
        _check_completions, rows, claim.submission, assignment, rules.recipe, engine
    )
    finding = check_assignment(rows, assignment)
    if not finding:
        limit, eos = sampling.max_new_tokens, engine.eos_token_ids
        finding = check_turns(rows, limit, eos) if proofs_first else completions()
    if finding:
        return Judgement(finding, units)
    blocks = _Blocks(claim, seats, [len(row.completion_tokens) for row in rows])
    try:
        replays = replay_rows(rows, engine, rules.recipe, blocks.shares(), seed=claim.batch_seed)
    except SampleUnfit as error:
        return Judgement(without_prefill(error), units)
    except ProofError as error:
        logger.error("prefill is no number", extra={"error": str(error)})
        return Judgement(without_prefill(error), units, is_nonsense=True)
    finding = check_proofs(replays, rules.calibration) or check_sampling(replays, rules.calibration)
    if proofs_first and not finding:
        finding = completions()
    is_nonsense = any(len(r.margins) and not np.isfinite(r.margins).any() for r in replays)
    fingerprints = blocks.fingerprints(replays, engine.hidden_size)
    return Judgement(finding, units, tuple(replays), fingerprints, is_nonsense)


def _check_completions(
    rows: Sequence[Rollout],
    submission: Submission,
    assignment: Assignment,
    recipe: Recipe,
    engine: InferenceEngine,
) -> FailedCheck | None:
    """Replay every completion turn by turn, then check replies, grades and endings."""
    limit = recipe.sampling.max_new_tokens
    claimed = [
        Claimed(assignment.groups[row.group].problem, row.completion_tokens, row.replies)
        for row in rows
    ]
    followed = follow(engine, claimed, recipe)
    finding = check_replies(followed, lambda i: follow(engine, [claimed[i]], recipe)[0])
    if finding:
        return finding
    decided = [found for found in followed if isinstance(found, Followed)]  # true for all of them
    texts, units = [found.answer for found in decided], count_units(rows, limit)
    return check_grades(rows, submission, assignment, texts, units) or check_endings(
        rows, decided, recipe.sampling, engine.eos_token_ids
    )


class _Blocks:
    """The blocks of a submission's rows, and the expected fingerprints of them.

    Without seats nothing is computed.
    """

    def __init__(
        self, claim: ClaimedWork, seats: Sequence[Address], lengths: Sequence[int]
    ) -> None:
        policy = claim.terms.policies.get(claim.submission.policy_version)
        self._seats = tuple(seats) if policy is not None else ()
        self._beacon = policy.beacon if policy is not None else b""
        self._leaf = claim.submission.leaf()
        self._lengths = lengths
        self._blocks = split_blocks(lengths)

    def shares(self) -> list[tuple[Share, ...]]:
        """Return every row's share of its block, for each seat."""
        return [
            tuple(Share(seed, first, tokens) for seed in seeds)
            for block, rows in enumerate(self._blocks)
            for tokens, seeds in [(self._tokens(rows), self._seeds(block))]
            for first in accumulate((self._lengths[row] for row in rows[:-1]), initial=0)
        ]

    def fingerprints(self, replays: Sequence[Replay], width: int) -> dict[Address, bytes]:
        """Return each seat's fingerprints of the whole submission, summed over its rows."""
        return {
            seat: b"".join(
                fingerprint(
                    np.sum([replays[row].projections[place] for row in rows], axis=0),
                    self._tokens(rows),
                    width,
                )
                for rows in self._blocks
            )
            for place, seat in enumerate(self._seats)
        }

    def _tokens(self, rows: range) -> int:
        return sum(self._lengths[row] for row in rows)

    def _seeds(self, block: int) -> list[Hash32]:
        return [
            block_seed(seat, self._beacon, self._leaf, block)  # type: ignore[arg-type]
            for seat in self._seats
        ]


def without_prefill(error: MusterError) -> FailedCheck:
    """Return the finding about work that the policy cannot recompute; it accuses nobody."""
    return FailedCheck(Verdict.REJECTED, Reason.TOPLOC_MISMATCH, f"cannot be prefilled: {error}")


def outcome_record(claim: ClaimedWork, judgement: Judgement) -> OutcomeRecord:
    """Return the record of a judgement. Its units never exceed the claimed ones, whose sum is the
    batch's, so no batch exceeds its declared units.
    """
    finding = judgement.finding
    submission = claim.submission
    return OutcomeRecord(
        worker_id=claim.worker_id,
        step=submission.step,
        index=submission.index,
        policy_version=submission.policy_version,
        file_hash=submission.file_hash,
        rollouts=min(submission.rollouts, MAX_UINT16),
        units=min(judgement.units, submission.units, MAX_UINT32),
        verdict=finding.verdict if finding else Verdict.ACCEPTED,
        reason=finding.reason if finding else Reason.NONE,
    )
