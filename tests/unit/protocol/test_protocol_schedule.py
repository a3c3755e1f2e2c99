"""Which validators are called for a batch, when more are, and whose outcomes suffice."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, Hash32, RunId, to_address
from muster.protocol.schedule import (
    REAUDIT_PPM,
    Calls,
    SignedOutcomes,
    Stage,
    Timing,
    batch_seed,
    called_by_age,
    draw_order,
    is_reaudited,
    order_of_batch,
    plan_calls,
    size_of,
    stage_by_age,
    timeout_of,
)

BEGIN = 1_000_000
DEADLINE_S = 800
T = timeout_of(DEADLINE_S)
TIMING = Timing(BEGIN, DEADLINE_S, T)
GOOD, BAD, OTHER = keccak(b"accepted"), keccak(b"rejected"), keccak(b"something else")
BENCH = [to_address(keccak(b"validator %d" % i)[12:]) for i in range(12)]


def seed(number: int = 1) -> Hash32:
    return batch_seed(keccak(b"block %d" % number), RunId(1), number, keccak(b"root"))


def said(
    validator: Address, records: Hash32 = GOOD, *, at: int = 0, accepts: bool | None = None
) -> SignedOutcomes:
    return SignedOutcomes(
        validator, records, records == GOOD if accepts is None else accepts, BEGIN + at
    )


def plan(
    quorum: int,
    validators: int,
    *statements: SignedOutcomes,
    at: int,
    absent: tuple[Address, ...] = (),
) -> Calls:
    return plan_calls(BENCH[:validators], quorum, TIMING, BEGIN + at, statements, absent=absent)


# The draw


def test_order_is_of_everybody_once() -> None:
    assert sorted(draw_order(seed(), BENCH)) == sorted(BENCH)


@given(st.permutations(BENCH))
def test_order_does_not_depend_on_how_validators_are_listed(listed: list[Address]) -> None:
    assert draw_order(seed(), listed) == draw_order(seed(), BENCH)


@given(st.sets(st.sampled_from(BENCH)), st.integers(0, 99))
def test_order_of_those_who_stay_is_that_of_all(gone: set[Address], number: int) -> None:
    stay = [v for v in BENCH if v not in gone]
    expected = [v for v in draw_order(seed(number), BENCH) if v not in gone]
    assert list(order_of_batch(seed(number), BENCH, stay)) == expected


def test_who_was_seated_after_the_commitment_comes_last() -> None:
    order = order_of_batch(seed(), BENCH[4:], BENCH)
    assert order == draw_order(seed(), BENCH[4:]) + tuple(BENCH[:4])


def test_everybody_is_first_equally_often() -> None:
    first = Counter(draw_order(seed(i), BENCH)[0] for i in range(2400))
    assert set(first) == set(BENCH)
    # 200 expected; a deviation of 5 standard deviations happens once in two million.
    assert all(abs(count - 200) < 70 for count in first.values())


@pytest.mark.parametrize("changed", ["beacon", "run", "batch", "root"])
def test_seed_depends_on_everything(changed: str) -> None:
    facts = {"beacon": keccak(b"b"), "run": RunId(1), "batch": 1, "root": keccak(b"r")}
    other = facts | {changed: keccak(b"x") if changed in ("beacon", "root") else 2}
    assert batch_seed(*facts.values()) != batch_seed(*other.values())  # type: ignore[arg-type]


def test_one_accepted_batch_in_twenty_is_audited_again() -> None:
    drawn = sum(is_reaudited(seed(i)) for i in range(20_000))
    assert abs(drawn - 1000) < 160
    assert REAUDIT_PPM == 50_000


@pytest.mark.parametrize(("share", "expected"), [(0, False), (1_000_000, True)])
def test_share_of_none_and_of_all(share: int, expected: bool) -> None:
    assert all(is_reaudited(seed(i), share) is expected for i in range(100))


# By age alone


@pytest.mark.parametrize(
    ("age", "called"),
    [(0, 2), (2 * T - 1, 2), (2 * T, 5), (4 * T - 1, 5), (4 * T, 12), (799, 12), (800, 0)],
)
def test_age_alone_calls_more_and_after_the_deadline_nobody(age: int, called: int) -> None:
    assert len(called_by_age(BENCH, 2, TIMING, BEGIN + age)) == called


def test_clock_before_the_commitment_calls_the_quorum() -> None:
    assert stage_by_age(TIMING, BEGIN - 5) is Stage.QUORUM


@pytest.mark.parametrize(
    ("stage", "quorum", "validators", "size"),
    [
        (Stage.QUORUM, 1, 7, 1),
        (Stage.ESCALATED, 1, 7, 3),
        (Stage.ALL, 1, 7, 7),
        (Stage.ESCALATED, 3, 20, 7),
        (Stage.ESCALATED, 2, 3, 3),
        (Stage.QUORUM, 3, 2, 2),
    ],
)
def test_stages_have_their_sizes(stage: Stage, quorum: int, validators: int, size: int) -> None:
    assert size_of(stage, quorum, validators) == size


def test_timeout_is_a_second_at_least() -> None:
    assert (timeout_of(1), timeout_of(800)) == (1, 100)


# All is well


def test_quorum_is_called_and_its_agreement_is_enough() -> None:
    calls = plan(2, 12, said(BENCH[0]), said(BENCH[1], at=5), at=5)
    assert calls == Calls(Stage.QUORUM, tuple(BENCH[:2]), (), GOOD)


def test_one_word_too_few_decides_nothing() -> None:
    assert plan(2, 12, said(BENCH[0]), at=5).decision is None


def test_words_of_those_not_called_do_not_count() -> None:
    calls = plan(2, 12, *(said(v) for v in BENCH[2:]), at=5)
    assert (calls.called, calls.decision) == (tuple(BENCH[:2]), None)


def test_words_of_strangers_do_not_count() -> None:
    stranger = to_address(b"\7" * 20)
    calls = plan(1, 3, said(stranger, BAD), at=5)
    assert (calls.stage, calls.decision) == (Stage.QUORUM, None)


def test_words_that_come_later_are_not_known_yet() -> None:
    assert plan(1, 3, said(BENCH[0], BAD, at=9), at=5).stage is Stage.QUORUM


# Silence


def test_silent_validator_is_replaced_after_its_timeout() -> None:
    before = plan(2, 12, said(BENCH[0]), at=T - 1)
    after = plan(2, 12, said(BENCH[0]), at=T)
    assert (before.called, before.silent) == (tuple(BENCH[:2]), ())
    assert (after.called, after.silent) == (tuple(BENCH[:3]), (BENCH[1],))
    decided = plan(2, 12, said(BENCH[0]), said(BENCH[2], at=T + 1), at=T + 1)
    assert decided.decision == GOOD


def test_silent_replacement_is_replaced_as_well() -> None:
    calls = plan(1, 12, at=2 * T - 1)
    assert calls.called == tuple(BENCH[:2])
    slow = plan_calls(BENCH, 1, replace(TIMING, timeout_s=10), BEGIN + 35, ())
    assert (slow.called, slow.silent) == (tuple(BENCH[:4]), tuple(BENCH[:3]))


def test_absent_validator_is_replaced_at_once() -> None:
    calls = plan(2, 12, at=0, absent=(BENCH[1],))
    assert (calls.called, calls.silent) == (tuple(BENCH[:3]), (BENCH[1],))


def test_absent_validator_that_spoke_is_not_replaced() -> None:
    calls = plan(2, 12, said(BENCH[1]), at=1, absent=(BENCH[1],))
    assert (calls.called, calls.silent) == (tuple(BENCH[:2]), ())


def test_who_speaks_late_still_counts_and_so_does_its_replacement() -> None:
    late = said(BENCH[1], at=T + 5)
    assert plan(2, 12, said(BENCH[0]), late, at=T + 5).decision == GOOD
    third = said(BENCH[2], at=T + 3)
    assert plan(2, 12, said(BENCH[0]), late, third, at=T + 5).called == tuple(BENCH[:3])


def test_everybody_absent_ends_with_everybody_called() -> None:
    calls = plan(2, 5, at=0, absent=tuple(BENCH))
    assert calls.called == calls.silent == tuple(BENCH[:5])


# Escalation


def test_any_other_outcome_than_accepted_calls_more() -> None:
    calls = plan(2, 12, said(BENCH[0], BAD), said(BENCH[1], BAD), at=5)
    assert (calls.stage, calls.called, calls.decision) == (Stage.ESCALATED, tuple(BENCH[:5]), None)


def test_reject_needs_most_of_the_escalated() -> None:
    three = [said(v, BAD) for v in BENCH[:3]]
    assert plan(2, 12, *three[:2], at=9).decision is None
    assert plan(2, 12, *three, at=9).decision == BAD


def test_two_different_acceptances_call_more() -> None:
    calls = plan(2, 12, said(BENCH[0]), said(BENCH[1], OTHER, accepts=True), at=5)
    assert (calls.stage, calls.decision) == (Stage.ESCALATED, None)


def test_wrong_minority_does_not_hold_things_up() -> None:
    liar = said(BENCH[0], BAD)
    calls = plan(2, 12, liar, *(said(v, at=3) for v in BENCH[1:4]), at=3)
    assert calls.decision == GOOD


def test_alarm_of_who_was_not_called_calls_more() -> None:
    calls = plan(2, 12, said(BENCH[0]), said(BENCH[1]), said(BENCH[9], BAD), at=5)
    assert (calls.stage, calls.called, calls.decision) == (Stage.ESCALATED, tuple(BENCH[:5]), None)
    heard = plan(2, 12, *(said(v) for v in BENCH[:3]), said(BENCH[9], BAD), at=5)
    assert heard.decision == GOOD


def test_small_bench_rejects_as_soon_as_no_other_word_could_change_it() -> None:
    assert plan(2, 3, said(BENCH[0], BAD), said(BENCH[1], BAD), at=5).decision == BAD
    assert plan(1, 1, said(BENCH[0], BAD), at=5).decision == BAD
    assert plan(2, 2, said(BENCH[0], BAD), said(BENCH[1], BAD), at=5).decision == BAD


def test_split_committee_calls_everybody_at_once() -> None:
    split = [said(v, r) for v, r in zip(BENCH, (GOOD, GOOD, BAD, BAD, OTHER), strict=False)]
    calls = plan(2, 12, *split, at=5)
    assert (calls.stage, calls.called, calls.decision) == (Stage.ALL, tuple(BENCH), None)


def test_slow_committee_calls_everybody_after_two_timeouts() -> None:
    alarm = said(BENCH[0], BAD, at=5), said(BENCH[1], at=10)
    assert plan(2, 12, *alarm, at=9).stage is Stage.QUORUM
    assert plan(2, 12, *alarm, at=2 * T + 9).stage is Stage.ESCALATED
    assert plan(2, 12, *alarm, at=2 * T + 10).stage is Stage.ALL


def test_everybody_decides_by_majority_or_in_the_end_by_the_largest_group() -> None:
    split = [said(v, r) for v, r in zip(BENCH, (GOOD, GOOD, BAD, BAD, OTHER), strict=False)]
    most = [said(v, BAD, at=6) for v in BENCH[5:10]]
    assert plan(2, 12, *split, *most[:4], at=9).decision is None
    assert plan(2, 12, *split, *most, at=9).decision == BAD
    assert plan(2, 12, *split, *most[:1], at=2 * T - 1).decision is None
    assert plan(2, 12, *split, *most[:1], at=2 * T + 5).decision == BAD


def test_tie_of_all_goes_to_who_was_called_first() -> None:
    tied = [said(BENCH[0], BAD), said(BENCH[1]), said(BENCH[2]), said(BENCH[3], BAD)]
    assert plan(2, 4, *tied, at=5).decision == BAD


def test_disagreeing_quorum_of_two_settles_nothing() -> None:
    both = (said(BENCH[0], BAD), said(BENCH[1]))
    assert all(plan(2, 2, *both, at=at).decision is None for at in range(0, DEADLINE_S, 50))


def test_shortly_before_the_deadline_any_quorum_is_enough() -> None:
    words = [said(BENCH[0], BAD), said(BENCH[10]), said(BENCH[11])]
    last = DEADLINE_S - T
    assert plan(2, 12, *words, at=last).decision == GOOD
    assert TIMING.last_call_at == BEGIN + last < TIMING.due_at


def test_impatient_orchestrator_escalates_sooner() -> None:
    quick = replace(TIMING, timeout_s=10)
    words = [said(BENCH[0], BAD, at=5), said(BENCH[1], at=10)]
    calls = plan_calls(BENCH, 2, quick, BEGIN + 30, words)
    assert calls.stage is Stage.ALL


def test_alarm_waits_for_who_takes_the_place_of_a_silent_one() -> None:
    alarm, replacement = said(BENCH[0], BAD), said(BENCH[2], at=T + 5)
    assert plan(2, 12, alarm, at=T + 1).called == tuple(BENCH[:3])
    assert plan(2, 12, alarm, replacement, at=T + 4).stage is Stage.QUORUM
    assert plan(2, 12, alarm, replacement, at=T + 5).stage is Stage.ESCALATED
    # A batch that is old enough escalates even if all are silent.
    assert plan(2, 12, alarm, at=2 * T).stage is Stage.ESCALATED


def test_alarm_of_a_bench_too_small_to_replace_the_silent_one_is_heard() -> None:
    quick = replace(TIMING, timeout_s=10)
    words = [said(BENCH[0], BAD), said(BENCH[2], BAD, at=15)]
    assert plan_calls(BENCH[:3], 2, quick, BEGIN + 15, words).decision == BAD


@given(
    st.permutations(BENCH),
    st.lists(st.sampled_from([GOOD, BAD, OTHER]), min_size=12, max_size=12),
    st.integers(1, 5),
    st.integers(0, T - 1),
)
def test_calls_tell_nobody_who_has_yet_to_speak_what_others_said(
    spoke: list[Address], records: list[Hash32], quorum: int, at: int
) -> None:
    lazy = BENCH[quorum - 1]
    others = [v for v in spoke if v != lazy]
    honest = plan(quorum, 12, *(said(v, at=at) for v in others), at=at)
    words = [said(v, r, at=at) for v, r in zip(others, records, strict=False)]
    assert plan(quorum, 12, *words, at=at).called == honest.called == tuple(BENCH[:quorum])


# Any outcomes

words = st.builds(
    lambda place, record, at: said(BENCH[place], (GOOD, BAD, OTHER)[record], at=at),
    st.integers(0, 11),
    st.sampled_from([0, 0, 0, 1, 2]),
    st.integers(0, DEADLINE_S),
)
statements = st.lists(words, max_size=12, unique_by=lambda s: s.validator)


@given(statements, st.randoms(use_true_random=False), st.integers(0, DEADLINE_S))
def test_plan_does_not_depend_on_how_statements_are_listed(
    given_words: list[SignedOutcomes], random: object, at: int
) -> None:
    shuffled = sorted(given_words, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert plan(2, 12, *given_words, at=at) == plan(2, 12, *shuffled, at=at)


@given(statements, st.integers(1, 5), st.integers(1, 12))
def test_calls_only_ever_grow_and_are_the_first_of_the_order(
    given_words: list[SignedOutcomes], quorum: int, validators: int
) -> None:
    plans = [plan(quorum, validators, *given_words, at=at) for at in range(0, DEADLINE_S, 37)]
    assert all(p.called == tuple(BENCH[: len(p.called)]) for p in plans)
    assert all(len(a.called) <= len(b.called) and a.stage <= b.stage for a, b in pairwise(plans))


@given(statements, st.integers(1, 5), st.integers(0, DEADLINE_S - 1))
def test_chain_alone_never_calls_who_the_rules_do_not(
    given_words: list[SignedOutcomes], quorum: int, at: int
) -> None:
    alone = called_by_age(BENCH, quorum, TIMING, BEGIN + at)
    assert set(alone) <= set(plan(quorum, 12, *given_words, at=at).called)


@given(statements, st.integers(1, 5), st.integers(0, DEADLINE_S))
def test_decision_is_what_a_quorum_said(
    given_words: list[SignedOutcomes], quorum: int, at: int
) -> None:
    calls = plan(quorum, 12, *given_words, at=at)
    known = [s for s in given_words if s.at <= BEGIN + at]
    if calls.decision is not None:
        backers = [s.validator for s in known if s.records_hash == calls.decision]
        assert len(backers) >= quorum
        if at < DEADLINE_S - T:
            assert len(set(backers) & set(calls.called)) >= quorum


@given(
    st.lists(st.sampled_from(BENCH), max_size=5, unique=True),
    st.lists(st.integers(0, T - 1), min_size=12, max_size=12),
)
def test_honest_majority_has_its_way_whatever_a_minority_says(
    liars: list[Address], times: list[int]
) -> None:
    everybody = [
        said(v, BAD if v in liars else GOOD, at=at) for v, at in zip(BENCH, times, strict=True)
    ]
    decided = plan(6, 12, *everybody, at=T - 1).decision
    assert decided == GOOD


@given(statements)
def test_quorum_that_was_heard_is_posted_before_the_deadline(
    given_words: list[SignedOutcomes],
) -> None:
    last = DEADLINE_S - T
    heard = Counter(s.records_hash for s in given_words if s.at <= BEGIN + last)
    decided = plan(2, 12, *given_words, at=last).decision
    assert (decided is not None) == any(count >= 2 for count in heard.values())
