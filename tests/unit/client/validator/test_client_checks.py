"""The seven checks: an honest submission passes, a mutated twin fails for every named reason."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from worlds.client_world import (
    CALIBRATION,
    OTHER_KEY,
    RULES,
    VERSION,
    HashEngine,
    make_claim,
    make_rollouts,
    make_submission,
    make_ticket,
    sign_submission,
    sign_ticket,
)

from muster.client.validator.checks import (
    ClaimedWork,
    check_claim,
    check_file,
    check_sampling,
    conduct_of,
    count_strikes,
    unreadable,
)
from muster.client.validator.judging import Judgement, Rules, examine, outcome_record, unread
from muster.client.validator.replay import Replay, keys_of
from muster.lab.simulator.machines import EOS
from muster.protocol.errors import ValidatorDisturbed
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.messages import COMMIT_GRACE_S, Reason, Verdict
from muster.protocol.rollouts import MAX_FILE_BYTES, MAX_ROWS, Rollout
from muster.tasks import Graded, TaskSet, Undecided, exact_match, registry
from muster.toploc import ChunkResult, build_proofs
from muster.toploc.calibration import WideLimits
from muster.toploc.sequential_test import MOST_FLIPS, Conduct, Flip

TICKET = make_ticket()
ROWS = make_rollouts(TICKET)
HONEST = make_claim(make_submission(TICKET, ROWS), TICKET)


def judge(rows: list[Rollout], claim: ClaimedWork | None = None, rules: Rules = RULES) -> Judgement:
    claim = claim or make_claim(make_submission(TICKET, rows), TICKET)
    return examine(claim, rows, rules, HashEngine(VERSION))


def assert_found(judgement: Judgement, verdict: Verdict, reason: Reason) -> None:
    assert judgement.finding is not None
    assert (judgement.finding.verdict, judgement.finding.reason) == (verdict, reason)
    assert judgement.finding.detail


def changed(number: int, **changes: object) -> list[Rollout]:
    rows = list(ROWS)
    rows[number] = replace(rows[number], **changes)  # type: ignore[arg-type]
    return rows


# The honest submission


def test_honest_submission_is_accepted() -> None:
    assert check_claim(HONEST) is None
    assert check_file(b"any") is None
    judgement = judge(ROWS)
    assert judgement.finding is None
    assert len(judgement.replays) == len(ROWS)
    assert judgement.units == HONEST.submission.units


def test_record_of_an_honest_submission_states_it_as_it_is() -> None:
    record = outcome_record(HONEST, judge(ROWS))
    submission = HONEST.submission
    assert (record.verdict, record.reason) == (Verdict.ACCEPTED, Reason.NONE)
    assert (record.worker_id, record.step, record.index) == (5, submission.step, submission.index)
    assert (record.file_hash, record.rollouts) == (submission.file_hash, len(ROWS))
    assert record.units == submission.units


# 1


def moved(**changes: object) -> ClaimedWork:
    """Return a claim for another slot or policy, or of another size, than its ticket."""
    return make_claim(make_submission(TICKET, ROWS, **changes), TICKET)


LAST = TICKET.deadline + COMMIT_GRACE_S


@pytest.mark.parametrize("claim", [moved(rollouts=MAX_ROWS), replace(HONEST, committed_at=LAST)])
def test_claim_just_within_its_limits_passes(claim: ClaimedWork) -> None:
    assert check_claim(claim) is None


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (moved(rollouts=MAX_ROWS + 1), Reason.FILE_TOO_LARGE),
        (replace(HONEST, signature=sign_submission(HONEST.submission, OTHER_KEY)),
         Reason.BAD_SIGNATURE),
        (replace(HONEST, node=None, worker_id=0), Reason.BAD_SIGNATURE),
        (make_claim(HONEST.submission, None), Reason.UNKNOWN_TICKET),
        (replace(HONEST, ticket_signature=None), Reason.UNKNOWN_TICKET),
        (replace(HONEST, ticket_signature=sign_ticket(TICKET, OTHER_KEY)), Reason.UNKNOWN_TICKET),
        (moved(step=Step(5)), Reason.UNKNOWN_TICKET),
        (moved(index=1), Reason.UNKNOWN_TICKET),
        (moved(policy_version=PolicyVersion(2)), Reason.UNKNOWN_TICKET),
        (replace(HONEST, committed_at=LAST + 1), Reason.LATE),
        (replace(HONEST, is_slot_used=True), Reason.SLOT_REUSED),
    ],
    ids=["too many rows", "another key", "unknown or inactive worker", "no ticket",
         "unsigned ticket", "ticket of somebody else", "another step", "another index",
         "another policy", "late", "used slot"],
)  # fmt: skip
def test_claim_that_does_not_hold_is_rejected(claim: ClaimedWork, reason: Reason) -> None:
    finding = check_claim(claim)
    assert finding is not None
    assert (finding.verdict, finding.reason) == (Verdict.REJECTED, reason)


@given(st.binary(max_size=70))
def test_no_signature_bytes_raise_out_of_the_claims_check(signature: bytes) -> None:
    finding = check_claim(replace(HONEST, signature=signature))
    assert finding is not None
    assert finding.reason is Reason.BAD_SIGNATURE


def test_file_that_nobody_has_is_unavailable() -> None:
    finding = check_file(None)
    assert finding is not None
    assert (finding.verdict, finding.reason) == (Verdict.REJECTED, Reason.FILE_UNAVAILABLE)


def test_file_beyond_the_cap_is_too_large() -> None:
    assert check_file(bytes(MAX_FILE_BYTES)) is None
    finding = check_file(bytes(MAX_FILE_BYTES + 1))
    assert finding is not None
    assert (finding.verdict, finding.reason) == (Verdict.REJECTED, Reason.FILE_TOO_LARGE)


# 2


def test_unreadable_file_fails_the_schema_and_keeps_the_claimed_units() -> None:
    judgement = unread(HONEST, unreadable("not Parquet"))
    assert_found(judgement, Verdict.REJECTED, Reason.SCHEMA)
    assert outcome_record(HONEST, judgement).units == HONEST.submission.units


def test_claimed_units_of_an_unread_file_are_capped_to_their_field() -> None:
    claim = make_claim(make_submission(TICKET, ROWS, units=2**40, rollouts=70_000), TICKET)
    finding = check_claim(claim)
    assert finding is not None
    record = outcome_record(claim, unread(claim, finding))
    assert (record.units, record.rollouts) == (2**32 - 1, 2**16 - 1)


def test_file_with_another_number_of_rows_than_claimed_fails_the_schema() -> None:
    assert_found(judge(ROWS[:2], HONEST), Verdict.REJECTED, Reason.SCHEMA)


def test_file_with_too_many_rows_or_part_of_a_group_fails_the_schema() -> None:
    assert_found(judge([*ROWS, *ROWS[:2]]), Verdict.REJECTED, Reason.SCHEMA)
    assert_found(judge(ROWS[:3]), Verdict.REJECTED, Reason.SCHEMA)


@pytest.mark.parametrize(
    "rows",
    [
        [ROWS[1], ROWS[0], *ROWS[2:]],
        [*ROWS[2:], *ROWS[:2]],
        changed(2, group=2**31 - 1),
        changed(0, prompt_tokens=(EOS + 1,)),
        changed(3, completion_tokens=(2**31 - 1,)),
    ],
    ids=["samples swapped", "groups swapped", "far group", "prompt token", "completion token"],
)
def test_rows_out_of_order_or_range_fail_the_schema(rows: list[Rollout]) -> None:
    assert_found(judge(rows), Verdict.REJECTED, Reason.SCHEMA)


@pytest.mark.parametrize("proofs", [b"", ROWS[0].proofs * 3])
def test_missing_or_surplus_proofs_fail_the_proof_count(proofs: bytes) -> None:
    assert_found(judge(changed(0, proofs=proofs)), Verdict.REJECTED, Reason.PROOF_COUNT)


@pytest.mark.parametrize(
    "proofs", [b"\xff\xff" + ROWS[0].proofs[2:], b"\0\0" + ROWS[0].proofs[2:], ROWS[0].proofs[:-1]]
)
def test_proofs_that_are_not_canonical_fail_the_encoding(proofs: bytes) -> None:
    assert_found(judge(changed(0, proofs=proofs)), Verdict.REJECTED, Reason.PROOF_ENCODING)


def test_file_without_its_last_groups_is_incomplete() -> None:
    assert_found(judge(ROWS[:2]), Verdict.INCOMPLETE, Reason.FILE_INCOMPLETE)


# 3


@pytest.mark.parametrize(
    "change",
    [
        {"problem_id": "sort-digits-0000"},
        {"target_length": 5},
        {"prompt_tokens": (1, 2, 3)},
        {"prompt_tokens": (*ROWS[1].prompt_tokens, 0)},
    ],
)
def test_rows_about_something_else_have_the_wrong_problem(change: dict[str, object]) -> None:
    assert_found(judge(changed(1, **change)), Verdict.FRAUD, Reason.WRONG_PROBLEM)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (changed(1, sampling_seed=ROWS[0].sampling_seed), Reason.WRONG_SEED),
        (changed(3, policy_version=VERSION - 1), Reason.WRONG_POLICY),
    ],
    ids=["another seed", "another policy"],
)
def test_rows_that_were_sampled_otherwise_are_fraud(rows: list[Rollout], reason: Reason) -> None:
    assert_found(judge(rows), Verdict.FRAUD, reason)


# 4


@pytest.mark.parametrize("reward", [1.0, 0.5])
def test_forged_reward_is_fraud(reward: float) -> None:
    assert ROWS[2].task_reward == 0.0
    assert_found(judge(changed(2, task_reward=reward)), Verdict.FRAUD, Reason.WRONG_REWARD)


@pytest.mark.parametrize("reward", [0.0, 0.5])
def test_reward_below_the_grade_is_rejected_and_not_fraud(
    monkeypatch: pytest.MonkeyPatch, reward: float
) -> None:
    grader = replace(exact_match.VERIFIER, grade=lambda *_: Graded(1.0))
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": grader})
    rows = [replace(row, task_reward=1.0) for row in ROWS]
    assert judge(rows).finding is None
    rows[2] = replace(rows[2], task_reward=reward)
    assert_found(judge(rows), Verdict.REJECTED, Reason.WRONG_REWARD)


@pytest.mark.parametrize(("too_low", "too_high"), [(0, 2), (2, 0)])
def test_low_reward_does_not_hide_a_high_one(
    monkeypatch: pytest.MonkeyPatch, too_low: int, too_high: int
) -> None:
    grader = replace(exact_match.VERIFIER, grade=lambda *_: Graded(0.5))
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": grader})
    rows = [replace(row, task_reward=0.5) for row in ROWS]
    rows[too_low] = replace(rows[too_low], task_reward=0.0)
    rows[too_high] = replace(rows[too_high], task_reward=1.0)
    assert_found(judge(rows), Verdict.FRAUD, Reason.WRONG_REWARD)


def test_low_reward_does_not_hide_forged_units(monkeypatch: pytest.MonkeyPatch) -> None:
    grader = replace(exact_match.VERIFIER, grade=lambda *_: Graded(1.0))
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": grader})
    rows = [replace(row, task_reward=0.0) for row in ROWS]
    claim = make_claim(make_submission(TICKET, rows, units=HONEST.submission.units + 1), TICKET)
    assert_found(judge(rows, claim), Verdict.FRAUD, Reason.WRONG_UNITS)


def test_answer_that_cannot_be_graded_is_rejected_and_not_fraud() -> None:
    problems = [p.model_copy(update={"gold_standard_solution": None}) for p in RULES.task_set]
    rules = replace(RULES, task_set=TaskSet.of("no gold", "1", problems))
    assert_found(judge(ROWS, rules=rules), Verdict.REJECTED, Reason.WRONG_REWARD)


def test_reward_that_other_machines_may_compute_differently_is_no_fraud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A grade that a time limit decided, or nearly decided: see docs/tasks.md.
    grader = replace(exact_match.VERIFIER, grade=lambda *_: Graded(0.0, is_repeatable=False))
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": grader})
    rows = [replace(row, task_reward=0.0) for row in ROWS]
    assert judge(rows).finding is None
    rows[2] = replace(rows[2], task_reward=1.0)
    assert_found(judge(rows), Verdict.REJECTED, Reason.WRONG_REWARD)


def test_reward_that_is_not_found_twice_is_no_fraud(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.0] * len(ROWS) + [0.0, 1.0])
    grader = replace(exact_match.VERIFIER, grade=lambda *_: Graded(next(scores)))
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": grader})
    rows = [replace(row, task_reward=0.0) for row in ROWS]
    rows[0] = replace(rows[0], task_reward=1.0)
    assert_found(judge(rows), Verdict.REJECTED, Reason.WRONG_REWARD)


@pytest.mark.parametrize(
    "graded",
    [*([Graded(1.0)] * calm for calm in range(len(ROWS))), [Graded(0.0)] * len(ROWS)],
    ids=["row 0", "row 1", "row 2", "row 3", "the first confirmation"],
)
def test_machine_that_cannot_grade_judges_nobody(
    monkeypatch: pytest.MonkeyPatch, graded: list[Graded]
) -> None:
    found = iter([*graded, *[Undecided("no memory", is_disturbance=True)] * len(ROWS)])
    grader = replace(exact_match.VERIFIER, grade=lambda *_: next(found))
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {"exact_match": grader})
    with pytest.raises(ValidatorDisturbed, match="no memory"):
        judge([replace(row, task_reward=1.0) for row in ROWS])


@pytest.mark.parametrize("by", [-1, 1])
def test_forged_units_are_fraud_and_no_more_than_claimed_are_recorded(by: int) -> None:
    honest = HONEST.submission.units
    claim = make_claim(make_submission(TICKET, ROWS, units=honest + by), TICKET)
    judgement = judge(ROWS, claim)
    assert_found(judgement, Verdict.FRAUD, Reason.WRONG_UNITS)
    assert outcome_record(claim, judgement).units == min(honest, honest + by)


# 5


def resized(number: int, tokens: tuple[int, ...]) -> list[Rollout]:
    """Return the rows with other completion tokens, and proofs and reward that fit them."""
    engine = HashEngine(VERSION)
    row = ROWS[number]
    fitting = (ROWS[0].proofs * len(tokens))[: 18 * -(-len(tokens) // 4)]
    problem = next(p for p in RULES.task_set if p.problem_id == row.problem_id)
    reward = float(engine.decode(tokens) == problem.gold_standard_solution)
    return changed(number, completion_tokens=tokens, proofs=fitting, task_reward=reward)


MOST_TOKENS = 2 * RULES.recipe.sampling.max_new_tokens + 256


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param((1,), id="early stop"),
        pytest.param((1, 2, 3, 4, 5), id="one short"),
        pytest.param((EOS, 1), id="past EOS"),
        pytest.param((1, EOS, 2, 3, 4, 5), id="EOS inside"),
        pytest.param((1, EOS, EOS), id="EOS twice"),
        pytest.param((1,) * 7, id="past the limit"),
        pytest.param((1,) * 6 + (EOS,), id="EOS past the limit"),
        pytest.param((1,) * MOST_TOKENS, id="as long as check 2 allows"),
    ],
)
def test_completion_that_ends_wrongly_is_fraud(tokens: tuple[int, ...]) -> None:
    assert_found(judge(resized(0, tokens)), Verdict.FRAUD, Reason.WRONG_TERMINATION)


def test_row_that_is_far_too_long_fails_the_schema_before_it_is_graded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "installed_verifiers", lambda: {})
    rows = resized(0, (1,) * (MOST_TOKENS + 1))
    assert_found(judge(rows), Verdict.REJECTED, Reason.SCHEMA)


# 6 and 7


def transplanted(*numbers: int) -> list[Rollout]:
    """Return the rows with proofs of the same size that another policy made."""
    rows = list(ROWS)
    forger = HashEngine(PolicyVersion(99))
    for number in numbers:
        row = rows[number]
        computed = forger.recompute([(row.prompt_tokens, row.completion_tokens)])[0]
        proofs = build_proofs(computed.hidden_TH, chunk_tokens=4, topk=8)
        rows[number] = replace(row, proofs=b"".join(proofs))
    return rows


def resampled(*numbers: int) -> list[Rollout]:
    """Return the rows with the policy's own proofs over tokens that nobody sampled."""
    rows = list(ROWS)
    engine = HashEngine(VERSION)
    for number in numbers:
        row = rows[number]
        # Blanks are never the gold standard, so the reward is 0.
        tokens = (11, 11, 11, 11, 11, 11)
        computed = engine.recompute([(row.prompt_tokens, tokens)])[0]
        proofs = build_proofs(computed.hidden_TH, chunk_tokens=4, topk=8)
        rows[number] = replace(
            row, completion_tokens=tokens, proofs=b"".join(proofs), task_reward=0.0
        )
    return rows


@pytest.mark.parametrize(
    ("forge", "reason"),
    [(transplanted, Reason.TOPLOC_MISMATCH), (resampled, Reason.SAMPLER_MISMATCH)],
)
def test_strikes_below_the_limit_are_rejected_and_from_there_on_fraud(
    forge: Callable[..., list[Rollout]], reason: Reason
) -> None:
    assert CALIBRATION.fraud_strikes == 2
    assert_found(judge(forge(1)), Verdict.REJECTED, reason)
    assert_found(judge(forge(1, 2)), Verdict.FRAUD, reason)


def spoilt(chunk_fails: bool, margin: float, *tokens: int) -> Replay:
    mismatches = CALIBRATION.chunk.max_exponent_mismatches + 1 if chunk_fails else 0
    chunk = ChunkResult(mismatches, 0.0, 0.0, 0, points=8)
    margins = np.array([margin], np.float32)
    return Replay((chunk,), margins, np.zeros(1, bool), ((1, 2), tokens))


def test_samples_of_the_same_tokens_share_their_rounding_and_are_one_strike() -> None:
    alike = [spoilt(True, 0.0, 7, 8)] * 4
    assert count_strikes(alike, CALIBRATION) == 1
    assert count_strikes([*alike, spoilt(True, 0.0, 7, 9)], CALIBRATION) == 2


def test_samples_of_the_same_tokens_that_nobody_sampled_so_are_a_strike_each() -> None:
    wide = 2 * CALIBRATION.sampler.margin
    assert count_strikes([spoilt(False, wide, 7, 8)] * 4, CALIBRATION) == 4
    mixed = [spoilt(True, wide, 7, 8), spoilt(True, 0.0, 7, 8), spoilt(True, 0.0, 7, 9)]
    assert count_strikes(mixed, CALIBRATION) == 2


WIDE = WideLimits(margin=CALIBRATION.sampler.margin / 4, most=3, most_ends=1)
NARROWED = CALIBRATION.model_copy(
    update={"sampler": CALIBRATION.sampler.model_copy(update={"wide": WIDE})}
)


def further(share: float, *, is_end: bool) -> Replay:
    """Return a sample with one token that is a share of the margin below the maximum."""
    margins = np.array([0.0, share * CALIBRATION.sampler.margin], np.float32)
    return Replay((), margins, np.array([True, is_end]), ((1, 2), (3, 4)))


@pytest.mark.parametrize(
    ("replays", "passes"),
    [
        ([further(0.25, is_end=True)] * 4, True),
        ([further(0.3, is_end=False)] * 3, True),
        ([further(0.3, is_end=False)] * 4, False),
        ([further(0.3, is_end=True)], True),
        ([further(0.3, is_end=True)] * 2, False),
        ([further(0.3, is_end=False)] * 2 + [further(0.3, is_end=True)], True),
    ],
)
def test_few_tokens_of_a_submission_are_wide_and_fewer_at_ends(
    replays: list[Replay], passes: bool
) -> None:
    finding = check_sampling(replays, NARROWED)
    assert (finding is None) is passes
    if finding is not None:
        assert (finding.verdict, finding.reason) == (Verdict.REJECTED, Reason.SAMPLER_MISMATCH)
    # Each sample is inside the margin.
    assert check_sampling(replays, CALIBRATION) is None


def test_strikes_of_both_checks_add_up_under_the_first_reason() -> None:
    rows = transplanted(1)
    rows[3] = resampled(3)[3]
    assert_found(judge(rows), Verdict.FRAUD, Reason.TOPLOC_MISMATCH)


# Any bytes


tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8).map(tuple)
hostile_rows = st.builds(
    Rollout,
    problem_id=st.text(max_size=5),
    group=st.integers(0, 2**31 - 1),
    sample=st.integers(0, 2**31 - 1),
    sampling_seed=st.integers(0, 2**64 - 1),
    target_length=st.integers(-1, 2**31 - 1),
    policy_version=st.integers(0, 2**32 - 1),
    prompt_tokens=tokens,
    completion_tokens=tokens,
    proofs=st.binary(max_size=60),
    task_reward=st.floats(0, 1),
    replies=st.sampled_from([(), ((1, 2),)]),
)


@given(st.lists(hostile_rows, min_size=1, max_size=5))
def test_no_rows_raise_out_of_the_checks_or_pass(rows: list[Rollout]) -> None:
    assert judge(rows).finding is not None


@given(st.sampled_from(range(4)), hostile_rows, st.sampled_from(Rollout.__slots__))
def test_no_single_hostile_value_raises(number: int, hostile: Rollout, field: str) -> None:
    rows = changed(number, **{field: getattr(hostile, field)})
    judgement = judge(rows)
    assert (judgement.finding is None) == (rows == ROWS)


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_every_claim_has_a_record(rollouts: int, units: int) -> None:
    submission = make_submission(TICKET, ROWS, rollouts=rollouts, units=units)
    claim = make_claim(submission, TICKET)
    judgement = examine(claim, ROWS, RULES, HashEngine(VERSION))
    record = outcome_record(claim, judgement)
    assert type(record).from_bytes(record.to_bytes()) == record


def test_every_reason_has_its_twin_in_this_file() -> None:
    text = Path(__file__).read_text()
    # The reason for a whole batch is tested in test_client_validator_records.py, that for
    # completions of several turns in test_client_dialogue.py, that for many submissions in
    # test_client_conduct.py.
    elsewhere = {Reason.BATCH_MISDECLARED, Reason.WRONG_REPLY, Reason.SAMPLER_DRIFT}
    missing = {reason for reason in Reason if f"Reason.{reason.name}" not in text}
    assert missing - elsewhere == set()


def test_conduct_of_a_submission_is_what_its_samples_come_to() -> None:
    honest = conduct_of(judge(ROWS).replays, CALIBRATION)
    forged = judge(resampled(1, 2)).replays
    assert honest == Conduct(0.0, 0.0, ((), ()))
    assert conduct_of(forged, CALIBRATION).strain == pytest.approx(2 / len(forged))


def test_flips_say_what_was_chosen_instead_of_what_and_whether_it_ends() -> None:
    forged = judge(resampled(1)).replays[1]
    kept, sampled = forged.tokens[1], ROWS[1].completion_tokens
    first = next(i for i, token in enumerate(kept) if token != sampled[i])
    eos, at_first = HashEngine.vocab_size - 1, (kept[first], sampled[first])
    (flip, *_) = [each for each in forged.flips if (each.chosen, each.expected) == at_first]
    assert flip.to_end == (kept[first] == eos) - (sampled[first] == eos)
    (computed,) = HashEngine(VERSION).recompute([forged.tokens])
    is_likelier = computed.logits_TV[first, kept[first]] > computed.logits_TV[first, sampled[first]]
    assert flip.to_likelier == (1 if is_likelier else -1)


def test_a_batch_s_seed_chooses_the_flips_that_count_among_all_samples() -> None:
    """A worker that is honest in the first samples of a group hides nothing in the others."""
    numbers = range(2 * MOST_FLIPS)

    def row(number: int) -> Replay:
        # The row's number is the chosen token of its only flip.
        source = b"seed" + b"flips" + number.to_bytes(4, "big")
        key = int(keys_of(source, 1)[0])
        flips, keys = (Flip(number, 0, 0, 1),), (key,)
        return Replay((), np.zeros(1, np.float32), np.zeros(1, bool), ((1,), (2,)), flips, keys)

    (counted,) = conduct_of([row(n) for n in numbers], CALIBRATION).groups
    assert len(counted) == MOST_FLIPS
    late = sum(flip.chosen >= MOST_FLIPS for flip in counted)
    assert 0.4 * MOST_FLIPS < late < 0.6 * MOST_FLIPS


def test_keys_are_a_stream_of_the_seed_and_the_row() -> None:
    source = bytes(32) + b"flips" + (7).to_bytes(4, "big")
    stream = hashlib.shake_256(source).digest(24)
    assert keys_of(source, 3).tolist() == [
        int.from_bytes(stream[8 * place :][:8], "big") for place in range(3)
    ]


@pytest.mark.parametrize("seed", [bytes(32), b"\1" * 32])
def test_flips_of_a_claim_have_the_keys_of_its_batch(seed: bytes) -> None:
    rows = resampled(1)
    claim = make_claim(make_submission(TICKET, rows), TICKET, batch_seed=seed)
    (_, replay, *_) = judge(rows, claim).replays
    keys = keys_of(seed + b"flips" + (1).to_bytes(4, "big"), len(rows[1].completion_tokens))
    assert replay.flip_keys == tuple(sorted(replay.flip_keys))
    assert set(replay.flip_keys) <= set(keys.tolist())
    assert len(replay.flip_keys) == len(replay.flips) > 0
