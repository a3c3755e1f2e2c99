"""Reasons and checks in words: none is missing, none contradicts the protocol."""

import pytest
from hypothesis import given, strategies as st

from muster.chain.conversion import lenient_reason
from muster.protocol.messages import Reason, Verdict
from muster.protocol.reasons import CHECKS, VERDICTS, checks_of, words_of


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_meaning_and_a_way_on(reason: Reason) -> None:
    assert reason.words.meaning
    assert reason.words.advice or reason is Reason.NONE


def test_every_verdict_has_its_consequence() -> None:
    assert set(VERDICTS) == set(Verdict)


def test_an_accepted_submission_passed_all_checks() -> None:
    assert [row.split()[1] for row in checks_of(Verdict.ACCEPTED, Reason.NONE)] == ["passed"] * 7


def marks(reason: Reason) -> str:
    lines = checks_of(Verdict.REJECTED, reason)
    assert len(lines) == len(CHECKS) == 7
    return " ".join(line.split()[1] for line in lines)


def test_the_failed_check_is_that_of_the_reasons_tens_digit() -> None:
    assert marks(Reason.LATE) == "FAILED - - - - - -"
    assert marks(Reason.SCHEMA) == "passed FAILED - - - - -"
    assert marks(Reason.WRONG_SEED) == "passed passed FAILED - - - -"
    assert marks(Reason.WRONG_UNITS) == "passed passed passed FAILED - - -"


def test_replies_grades_and_endings_count_as_passed_only_when_they_surely_ran() -> None:
    """For tasks that reply or run programs, the prefill is checked before these."""
    assert marks(Reason.WRONG_REWARD) == "passed passed passed FAILED - - -"
    assert marks(Reason.WRONG_TERMINATION) == "passed passed - - FAILED - -"
    assert marks(Reason.TOPLOC_MISMATCH) == "passed passed - - - FAILED -"
    assert marks(Reason.SAMPLER_MISMATCH) == "passed passed - - - passed FAILED"


def test_an_unknown_reason_says_nothing_of_any_check() -> None:
    assert marks(lenient_reason(255)) == "- - - - - - -"


@given(st.integers(0, 255))
def test_any_reason_on_chain_can_be_worded(number: int) -> None:
    reason = lenient_reason(number)
    assert words_of(reason).meaning
    assert len(checks_of(Verdict.REJECTED, reason)) == 7
