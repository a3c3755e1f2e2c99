"""The seven ordered checks of docs/protocol.md section 8, as pure functions over frozen inputs.

Each returns a FailedCheck or None, and the first failure decides. No input from a peer makes a
check raise: peers' data is parsed into frozen types before, and every function here is total over
those types. `muster.client.validator.judging.examine` calls them by their numbers, except for tasks
that reply to completions or run them: there 6 and 7 come before the replies of 3, before 4 and 5.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from muster.client.tickets import (
    Assignment,
    TicketGroup,
    TicketTerms,
    slot_and_policy,
    ticket_fault,
)
from muster.client.validator.replay import Replay, split_row_proofs
from muster.inference import InferenceEngine
from muster.inference.dialogue import Followed
from muster.protocol.eip712 import signer_of
from muster.protocol.errors import ProofError, ValidatorDisturbed
from muster.protocol.ids import Address
from muster.protocol.messages import COMMIT_GRACE_S, Reason, Submission, Ticket, Verdict
from muster.protocol.recipe import Recipe, SamplingRecipe
from muster.protocol.rollouts import MAX_FILE_BYTES, MAX_ROWS, Bounds, Rollout
from muster.tasks import Graded, Problem, Undecided, verify, verify_all
from muster.toploc import Calibration
from muster.toploc.sequential_test import MOST_FLIPS, Conduct, Flip, history_of

T = TypeVar("T")

CONFIRMATIONS = 2
"""How often a contradicting grade is computed again before it proves fraud."""


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """Why a submission is not accepted."""

    verdict: Verdict
    """The verdict that follows."""
    reason: Reason
    """Which check failed, and how."""
    detail: str
    """Explanation for people: what failed, where, with which values."""


@dataclass(frozen=True, slots=True)
class ClaimedWork:
    """A submission in a batch, with the facts on chain about it."""

    submission: Submission
    """What the worker claims."""
    signature: bytes
    """The node's signature, not verified yet."""
    ticket: Ticket | None
    """Its ticket; None when the orchestrator shows none."""
    ticket_signature: bytes | None
    """The orchestrator's signature, not verified yet."""
    committed_at: int
    """Unix seconds at which the batch was committed."""
    terms: TicketTerms
    """Requirements for the ticket."""
    worker_id: int
    """The worker's id; 0 if the account is no worker."""
    node: Address | None
    """The worker's node key when the batch was committed, if it was active then."""
    is_slot_used: bool
    """Whether an earlier submission fills the same slot."""
    batch_seed: bytes = b""
    """The batch's seed, which chooses the flips that count; empty where no history is judged."""


# 1. The claim: signatures, ticket, time, slot, file


def check_claim(claim: ClaimedWork) -> FailedCheck | None:
    """1. Signed by the node of an active worker, for a valid ticket, in time, slot unused."""
    rollouts = claim.submission.rollouts
    # First of all: whatever else is wrong with a forged submission, it fills nobody's slot.
    if not is_signed_by_node(claim):
        return _rejected(Reason.BAD_SIGNATURE, "not signed by the node of an active worker")
    if rollouts > MAX_ROWS:
        return _rejected(Reason.FILE_TOO_LARGE, f"claims {rollouts} rows, allowed are {MAX_ROWS}")
    if finding := _check_ticket(claim):
        return finding
    if claim.is_slot_used:
        return _rejected(Reason.SLOT_REUSED, "an earlier submission fills the slot")
    return None


def is_signed_by_node(claim: ClaimedWork) -> bool:
    """Return whether the worker's node signed the submission, and the worker was active."""
    signer = signer_of(claim.terms.domain, claim.submission, claim.signature)
    return signer is not None and signer == claim.node


def _check_ticket(claim: ClaimedWork) -> FailedCheck | None:
    ticket, signature = claim.ticket, claim.ticket_signature
    if ticket is None or signature is None:
        return _rejected(Reason.UNKNOWN_TICKET, "there is no ticket for the slot")
    if slot_and_policy(ticket) != slot_and_policy(claim.submission):
        return _rejected(Reason.UNKNOWN_TICKET, "the ticket is for another slot or policy")
    if fault := ticket_fault(ticket, signature, claim.terms):
        return _rejected(Reason.UNKNOWN_TICKET, f"the ticket is invalid: {fault}")
    late_s = claim.committed_at - ticket.deadline - COMMIT_GRACE_S
    if late_s > 0:
        return _rejected(Reason.LATE, f"committed {late_s} s too late")
    return None


def check_file(data: bytes | None) -> FailedCheck | None:
    """1. The committed file is available, and no larger than any file may be."""
    if data is None:
        return _rejected(Reason.FILE_UNAVAILABLE, "nobody has the committed file")
    return check_size(data, MAX_FILE_BYTES)


def check_size(data: bytes, most: int) -> FailedCheck | None:
    """1. The file has no more bytes than its recipe's files can have (`Bounds.file_bytes`)."""
    if len(data) > most:
        return _rejected(Reason.FILE_TOO_LARGE, f"{len(data)} bytes, allowed are {most}")
    return None


# 2. The form: schema, ranges, proofs


def unreadable(detail: str) -> FailedCheck:
    """2. Return the finding for a file that does not decode into rows."""
    return _rejected(Reason.SCHEMA, detail)


def check_form(
    rows: Sequence[Rollout], submission: Submission, recipe: Recipe, engine: InferenceEngine
) -> FailedCheck | None:
    """2. Rows in order and none far too long, token ids in range, proofs whole and canonical, no
    group missing.
    """
    sampling = recipe.sampling
    expected = sampling.problems_per_submission * sampling.samples_per_problem
    if len(rows) != submission.rollouts:
        return _rejected(
            Reason.SCHEMA, f"{len(rows)} rows, the submission states {submission.rollouts}"
        )
    if len(rows) > expected or len(rows) % sampling.samples_per_problem:
        return _rejected(Reason.SCHEMA, f"{len(rows)} rows, the recipe asks for {expected}")
    longest = Bounds.of(recipe).completion_tokens
    for number, row in enumerate(rows):
        # A file's headers bound the mean only: one row could hold the tokens of all.
        if len(row.completion_tokens) > longest:
            return _rejected(
                Reason.SCHEMA,
                f"row {number} has {len(row.completion_tokens)} tokens, allowed are {longest}",
            )
        if finding := _check_row(number, row, recipe, engine):
            return finding
    if len(rows) < expected:
        return FailedCheck(
            Verdict.INCOMPLETE,
            Reason.FILE_INCOMPLETE,
            f"the last {(expected - len(rows)) // sampling.samples_per_problem} groups are missing",
        )
    return None


def _check_row(
    number: int, row: Rollout, recipe: Recipe, engine: InferenceEngine
) -> FailedCheck | None:
    group, sample = divmod(number, recipe.sampling.samples_per_problem)
    if (row.group, row.sample) != (group, sample):
        return _rejected(Reason.SCHEMA, f"row {number} is group {row.group} sample {row.sample}")
    if max(max(row.prompt_tokens), max(row.completion_tokens)) >= engine.vocab_size:
        return _rejected(Reason.SCHEMA, f"row {number} has a token id beyond the vocabulary")
    try:
        split_row_proofs(row, recipe.proof, engine.hidden_size)
    except ProofError as error:
        is_count = error.reason == "count"
        reason = Reason.PROOF_COUNT if is_count else Reason.PROOF_ENCODING
        return _rejected(reason, f"row {number}: {error}")
    return None


# 3. The assignment: problems, prompts, lengths, seeds, policy


def check_assignment(rows: Sequence[Rollout], assignment: Assignment) -> FailedCheck | None:
    """3. Problems, prompts, target lengths, seeds and policy are the derived ones."""
    for number, row in enumerate(rows):
        group = assignment.groups[row.group]
        if finding := _check_derived(number, row, group):
            return finding
        if row.policy_version != assignment.policy_version:
            return _fraud(
                Reason.WRONG_POLICY,
                f"row {number} claims policy {row.policy_version}, not {assignment.policy_version}",
            )
    return None


def _check_derived(number: int, row: Rollout, group: TicketGroup) -> FailedCheck | None:
    if row.problem_id != group.problem.problem_id:
        return _fraud(Reason.WRONG_PROBLEM, f"row {number} is another problem than the derived one")
    if row.target_length != group.target_length:
        return _fraud(Reason.WRONG_PROBLEM, f"row {number} has another target length")
    if row.prompt_tokens != group.prompt_tokens:
        return _fraud(Reason.WRONG_PROBLEM, f"row {number} has another prompt")
    if row.sampling_seed != group.seeds[row.sample]:
        return _fraud(Reason.WRONG_SEED, f"row {number} has another sampling seed")
    return None


def check_turns(rows: Sequence[Rollout], limit: int, eos: frozenset[int]) -> FailedCheck | None:
    """3. Each claimed reply follows a turn's EOS, and no turn has another before its end.

    So a turn holds only tokens that checks 6 and 7 replay as the model's. The length of check 5 is
    tested first, to bound the prefill.
    """
    for number, row in enumerate(rows):
        if len(row.completion_tokens) > limit:
            return _fraud(
                Reason.WRONG_TERMINATION,
                f"row {number} ends wrongly after {len(row.completion_tokens)} tokens",
            )
        begins, ends = 0, [start for start, _ in row.replies]
        for end, goes_on in zip(ends, (after for _, after in row.replies), strict=True):
            first = next((i for i in range(begins, end) if row.completion_tokens[i] in eos), None)
            if first != end - 1:
                return _fraud(Reason.WRONG_REPLY, f"row {number}: no turn ends at token {end}")
            begins = goes_on
    return None


def check_replies(
    followed: Sequence[Followed | Undecided], again: Callable[[int], Followed | Undecided]
) -> FailedCheck | None:
    """3. The text between the model's turns equals the replies of the tasks' environments.

    A difference proves fraud only if every honest machine finds it: `again` replays a row's
    completion to confirm it.
    """
    for number, found in enumerate(followed):
        _calm(found)
        if isinstance(found, Undecided):
            return _rejected(
                Reason.WRONG_REPLY,
                f"row {number} has a reply that cannot be recomputed: {found.reason}",
            )
        fault, detail = found.fault, f"row {number}: {found.fault.detail if found.fault else ''}"
        if fault is None:
            continue
        if not (
            fault.is_repeatable and all(_calm(again(number)) == found for _ in range(CONFIRMATIONS))
        ):
            return _rejected(Reason.WRONG_REPLY, f"{detail}, but perhaps not everywhere")
        if fault.kind == "reply":
            return _fraud(Reason.WRONG_REPLY, detail)
    return None


# 4. The grades: rewards and units


def check_grades(
    rows: Sequence[Rollout],
    submission: Submission,
    assignment: Assignment,
    texts: Sequence[str],
    units: int,
) -> FailedCheck | None:
    """4. Rewards equal the verifier's, and units equal the sum over completions.

    Only a claim above a grade that is found each time proves fraud. A lower claim is rejected: it
    gains nothing, and an honest machine may have graded lower. So is an answer that cannot be
    graded. Raises ValidatorDisturbed when this machine is the cause.
    """
    answers = [
        (assignment.groups[row.group].problem, text) for row, text in zip(rows, texts, strict=True)
    ]
    rejected: FailedCheck | None = None
    for number, (row, grade) in enumerate(zip(rows, verify_all(answers), strict=True)):
        _calm(grade)
        if isinstance(grade, Undecided):
            detail = f"row {number} cannot be graded: {grade.reason}"
        elif row.task_reward == grade.score:
            continue
        else:
            detail = f"row {number} claims reward {row.task_reward}, the verifier says "
            detail += f"{grade.score}"
            if row.task_reward > grade.score:
                if _is_repeated(grade, *answers[number]):
                    return _fraud(Reason.WRONG_REWARD, detail)
                detail += ", but perhaps not everywhere"
        rejected = rejected or _rejected(Reason.WRONG_REWARD, detail)
    if submission.units != units:
        return _fraud(Reason.WRONG_UNITS, f"claims {submission.units} units, not {units}")
    return rejected


def _calm(found: T) -> T:
    """Return the result; raises ValidatorDisturbed when this machine could not compute it."""
    if isinstance(found, Undecided) and found.is_disturbance:
        raise ValidatorDisturbed(
            f"this validator cannot grade: {found.reason}",
            hint="it judges again once it has memory, processes and time for it",
        )
    return found


def _is_repeated(grade: Graded, problem: Problem, answer: str) -> bool:
    return grade.is_repeatable and all(
        isinstance(again := _calm(verify(problem, answer)), Graded)
        and again.is_repeatable
        and again.score == grade.score
        for _ in range(CONFIRMATIONS)
    )


# 5. The endings


def check_endings(
    rows: Sequence[Rollout],
    followed: Sequence[Followed],
    sampling: SamplingRecipe,
    eos: frozenset[int],
) -> FailedCheck | None:
    """5. Every completion ends with an EOS after which nothing follows, or at the limit.

    Without replies that is its first EOS; with an environment it was checked turn by turn.
    """
    limit = sampling.max_new_tokens
    for number, (row, found) in enumerate(zip(rows, followed, strict=True)):
        if found.fault is not None or not (row.replies or _is_one_turn(row, limit, eos)):
            return _fraud(
                Reason.WRONG_TERMINATION,
                f"row {number} ends wrongly after {len(row.completion_tokens)} tokens",
            )
    return None


def _is_one_turn(row: Rollout, limit: int, eos: frozenset[int]) -> bool:
    tokens = row.completion_tokens
    first = next((i for i, token in enumerate(tokens) if token in eos), None)
    return len(tokens) == limit if first is None else first == len(tokens) - 1 < limit


# 6 and 7. The statistics: one prefill, hidden states and sampling


def check_proofs(replays: Sequence[Replay], calibration: Calibration) -> FailedCheck | None:
    """6. Every chunk's hidden states match its proof."""
    passed = [passes_proofs(replay, calibration) for replay in replays]
    return _struck(Reason.TOPLOC_MISMATCH, passed, replays, calibration)


def check_sampling(replays: Sequence[Replay], calibration: Calibration) -> FailedCheck | None:
    """7. Every token is what verifiable sampling yields, within the calibrated margin, except for
    as many as honest rounding can cause.
    """
    passed = [passes_sampling(replay, calibration) for replay in replays]
    struck = _struck(Reason.SAMPLER_MISMATCH, passed, replays, calibration)
    return struck or _check_wide(replays, calibration)


def _check_wide(replays: Sequence[Replay], calibration: Calibration) -> FailedCheck | None:
    limits = calibration.sampler.wide
    if limits is None:
        return None
    counts = [calibration.wide_tokens(replay.margins, replay.ends) for replay in replays]
    wide, ends = (sum(column) for column in zip(*counts, strict=True))
    if wide <= limits.most and ends <= limits.most_ends:
        return None
    # Any one of them may be due to rounding, so together they do not prove fraud.
    return _rejected(
        Reason.SAMPLER_MISMATCH,
        f"{wide} tokens are further than {limits.margin:.3g} from the maximum, {ends} of them at "
        f"an end; allowed are {limits.most} and {limits.most_ends}",
    )


def passes_proofs(replay: Replay, calibration: Calibration) -> bool:
    """Return whether a sample passes check 6."""
    return all(calibration.chunk_passes(chunk) for chunk in replay.chunks)


def passes_sampling(replay: Replay, calibration: Calibration) -> bool:
    """Return whether a sample passes check 7."""
    return calibration.sampler_passes(replay.margins)


def count_strikes(replays: Sequence[Replay], calibration: Calibration) -> int:
    """Return the number of samples that fail check 6 or 7, each accident counted once.

    Samples with the same tokens have the same hidden states, so rounding affects all their proofs
    alike, and they count once in check 6. Their seeds differ, so in check 7 each failure counts.
    """
    by_sampling = [replay for replay in replays if not passes_sampling(replay, calibration)]
    by_proofs = {replay.tokens for replay in replays if not passes_proofs(replay, calibration)}
    return len(by_sampling) + len(by_proofs - {replay.tokens for replay in by_sampling})


def conduct_of(replays: Sequence[Replay], calibration: Calibration) -> Conduct:
    """Return the figures of a submission for the sequential test."""
    groups: dict[tuple[int, ...], list[tuple[int, Flip]]] = {}
    for replay in replays:
        keyed = zip(replay.flip_keys, replay.flips, strict=True)
        groups.setdefault(replay.tokens[0], []).extend(keyed)
    return Conduct(
        strain=calibration.submission_strain((r.chunks, r.margins) for r in replays),
        loss=calibration.loss(np.concatenate([r.margins for r in replays])),
        groups=tuple(
            tuple(flip for _, flip in sorted(keyed)[:MOST_FLIPS]) for keyed in groups.values()
        ),
    )


def check_history(
    conducts: Sequence[Conduct], calibration: Calibration, *, is_struck: bool
) -> FailedCheck | None:
    """7. The worker's submissions together, this one last, look like honest ones.

    The first alarm is a strike; a second alarm, from submissions after the strike only, proves
    fraud.
    """
    history = history_of(conducts, calibration.history)
    if not history.alarms(calibration.history):
        return None
    detail = f"{history.submissions} submissions, evidence e^{history.log_evidence:.1f}"
    return (_fraud if is_struck else _rejected)(Reason.SAMPLER_DRIFT, detail)


def _struck(
    reason: Reason, passed: Sequence[bool], replays: Sequence[Replay], calibration: Calibration
) -> FailedCheck | None:
    """Return the failure when samples did not pass check 6 or 7."""
    if all(passed):
        return None
    strikes = count_strikes(replays, calibration)
    detail = (
        f"{passed.count(False)} samples fail, row {passed.index(False)} first; {strikes} strikes"
    )
    return (_fraud if strikes >= calibration.fraud_strikes else _rejected)(reason, detail)


def _rejected(reason: Reason, detail: str) -> FailedCheck:
    return FailedCheck(Verdict.REJECTED, reason, detail)


def _fraud(reason: Reason, detail: str) -> FailedCheck:
    return FailedCheck(Verdict.FRAUD, reason, detail)
