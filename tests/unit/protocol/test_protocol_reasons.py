"""Reasons and checks in words: none is missing, none contradicts the protocol."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize("reason", [r for r in Reason if r is not Reason.NONE])
def test_the_failed_check_is_that_of_the_reasons_tens_digit(reason: Reason) -> None:
    marks = [row.split()[1] for row in checks_of(Verdict.REJECTED, reason)]
    failed = reason // 10
    assert marks == ["passed"] * (failed - 1) + ["FAILED"] + ["-"] * (7 - failed)
    assert len(CHECKS) == 7


@given(st.integers(0, 255))
def test_any_reason_on_chain_can_be_worded(number: int) -> None:
    reason = lenient_reason(number)
    assert words_of(reason).meaning
    assert len(checks_of(Verdict.REJECTED, reason)) == 7
