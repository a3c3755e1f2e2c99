from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from muster.orchestrator.outcomes.breaker import CorrelatedFailure, correlated_failure
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.messages import OutcomeRecord, Reason, Verdict
from muster.protocol.recipe import BreakerRecipe

LIMITS = BreakerRecipe()
Outcome = tuple[OutcomeRecord, Verdict]


def outcome(worker: int, reason: Reason = Reason.NONE, verdict: Verdict | None = None) -> Outcome:
    standing = verdict or (Verdict.FRAUD if reason else Verdict.ACCEPTED)
    record = OutcomeRecord(
        worker_id=worker,
        step=Step(1),
        index=0,
        policy_version=PolicyVersion(0),
        file_hash=keccak(b""),
        rollouts=1,
        units=1,
        verdict=standing,
        reason=reason,
    )
    return record, standing


def found(
    outcomes: Sequence[Outcome], limits: BreakerRecipe = LIMITS, proven: Sequence[int] = ()
) -> CorrelatedFailure | None:
    return correlated_failure(outcomes, limits, lambda n: 8 if n in proven else 0)


def crowd(failing: int, passing: int, reason: Reason = Reason.TOPLOC_MISMATCH) -> list[Outcome]:
    bad = [outcome(n, reason) for n in range(failing)]
    return bad + [outcome(1000 + n) for n in range(passing)]


def test_everybody_failing_alike_trips() -> None:
    failure = found(crowd(10, 0))
    assert failure == CorrelatedFailure(6, Reason.TOPLOC_MISMATCH, 1.0, tuple(range(10)), 10)


@pytest.mark.parametrize(("failing", "passing"), [(2, 3), (2, 0), (3, 3), (5, 5), (0, 9), (0, 0)])
def test_few_or_a_minority_does_not_trip(failing: int, passing: int) -> None:
    assert found(crowd(failing, passing)) is None


@pytest.mark.parametrize(("failing", "passing"), [(3, 2), (6, 5), (51, 50)])
def test_a_majority_of_three_or_more_trips(failing: int, passing: int) -> None:
    failure = found(crowd(failing, passing))
    assert failure is not None
    assert failure.share == pytest.approx(failing / (failing + passing))


def test_failures_of_different_checks_do_not_add_up() -> None:
    reasons = (Reason.WRONG_SEED, Reason.WRONG_REWARD, Reason.TOPLOC_MISMATCH)
    assert found([outcome(n, reasons[n % 3]) for n in range(6)]) is None


def test_different_reasons_of_one_check_do() -> None:
    reasons = (Reason.WRONG_SEED, Reason.WRONG_PROBLEM, Reason.WRONG_SEED)
    failure = found([outcome(n, reason) for n, reason in enumerate(reasons)])
    assert failure is not None
    assert (failure.check, failure.reason) == (3, Reason.WRONG_SEED)


def test_what_failed_earlier_says_nothing_about_a_later_check() -> None:
    early = [outcome(100 + n, Reason.WRONG_SEED, Verdict.REJECTED) for n in range(50)]
    failure = found(crowd(4, 0) + early)
    assert failure is not None
    assert failure.seen == 4


@pytest.mark.parametrize("verdict", [Verdict.REJECTED, Verdict.INCOMPLETE])
def test_what_costs_nothing_does_not_trip(verdict: Verdict) -> None:
    assert found([outcome(n, Reason.SAMPLER_MISMATCH, verdict) for n in range(50)]) is None


def test_overturned_frauds_do_not_count() -> None:
    record, _ = outcome(1, Reason.TOPLOC_MISMATCH)
    assert found([(record, Verdict.ACCEPTED)] * 9 + crowd(3, 3)) is None


@given(submissions=st.integers(1, 500))
def test_one_worker_with_many_submissions_does_not_trip(submissions: int) -> None:
    assert found([outcome(1, Reason.TOPLOC_MISMATCH)] * submissions) is None


@given(repeats=st.lists(st.integers(1, 30), min_size=6, max_size=6), order=st.randoms())
def test_only_wallets_count_in_whatever_order(repeats: list[int], order: object) -> None:
    once = crowd(4, 2)
    many = [each for each, times in zip(once, repeats, strict=True) for _ in range(times)]
    order.shuffle(many)  # type: ignore[attr-defined]
    assert found(many) == found(once)


@given(sybils=st.integers(1, 200), honest=st.integers(4, 40))
def test_newcomers_need_four_wallets_for_each_proven_worker(sybils: int, honest: int) -> None:
    proven = [1000 + n for n in range(honest)]
    failure = found(crowd(sybils, honest), proven=proven)
    assert (failure is not None) == (sybils >= 3 and sybils > 4 * honest)


def test_proven_workers_trip_among_newcomers() -> None:
    assert found(crowd(3, 10), proven=[0, 1, 2]) is not None
    assert found(crowd(3, 10)) is None


def test_occasional_failures_of_everybody_do_not_trip() -> None:
    mostly_fine = [outcome(n) for n in range(20) for _ in range(3)]
    assert found(mostly_fine + crowd(20, 0)) is None


@given(failing=st.integers(0, 60), passing=st.integers(0, 60), more=st.integers(1, 20))
def test_passing_workers_never_trip_it_and_failing_ones_never_untrip(
    failing: int, passing: int, more: int
) -> None:
    before = found(crowd(failing, passing)) is not None
    assert before or found(crowd(failing, passing + more)) is None
    assert not before or found(crowd(failing + more, passing)) is not None


def test_a_share_of_one_never_trips() -> None:
    assert found(crowd(50, 0), BreakerRecipe(max_share=1.0)) is None


@pytest.mark.parametrize(
    ("reason", "check"), [(Reason.NONE, 0), (Reason.WRONG_SEED, 3), (Reason.SAMPLER_MISMATCH, 7)]
)
def test_reasons_belong_to_their_check(reason: Reason, check: int) -> None:
    assert reason.check == check
