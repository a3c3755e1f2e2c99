"""The texts shown before anybody signs: possible losses, and how stake comes back."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.cases import ME, PEER, STRANGER, TERMS

from muster.chain import Member, RunTerms, StakeAccount, WorkerStatus
from muster.client.disputes.cases import bench_words, eligible_jurors
from muster.client.risks import exposure_of, of_juror, of_validator, of_worker
from muster.client.stake import LeavingAccount
from muster.protocol.errors import ConfigError, NotYet
from muster.protocol.ids import RunId

TOKEN = 10**18
RUN = RunId(3)
RUN_TERMS = RunTerms(10, 100_000, 250_000, 2)


# What can be lost


def staked(tokens: int) -> StakeAccount:
    return StakeAccount(tokens * TOKEN, 0, 0, 0)


def test_worker_is_told_the_shares_of_the_terms_and_that_one_run_takes_them() -> None:
    most, jury, node = of_worker(RUN, RUN_TERMS, staked(250))
    assert most.startswith("at most these 250 tokens, to this run only: 10 %")
    assert "25 % for an exact one" in most
    assert "a jury of the network can overturn that" in jury
    assert "two files for one slot of run 3" in node


def test_validator_and_juror_are_told_the_courts_shares() -> None:
    least = 500 * TOKEN
    one = staked(1)
    of_seat, of_place = of_validator(RUN, TERMS, one, least), of_juror(TERMS, one, least)
    assert "10 % for each batch of which a jury overturned" in of_seat[0]
    assert "2 % for each case that draws you" in of_place[0]
    assert of_seat[-1].startswith("with less than 500 tokens left the seat is lost: stake more")
    assert "with less than 500 tokens left the place on the bench is lost" in of_place[-1]
    halved = replace(TERMS, wrong_verdict_ppm=50_000, absence_ppm=2_500)
    assert "5 % for each batch" in of_validator(RUN, halved, one, least)[0]
    assert "0.25 % for each case" in of_juror(halved, one, least)[0]


def test_stake_that_unbonds_is_at_risk_too() -> None:
    both = StakeAccount(600 * TOKEN, 500 * TOKEN, 9, 0)
    for most, *_ in (
        of_worker(RUN, RUN_TERMS, both),
        of_validator(RUN, TERMS, both, TOKEN),
        of_juror(TERMS, both, TOKEN),
    ):
        assert most.startswith("at most these 1,100 tokens (500 of them unbond), ")


def test_every_party_of_a_run_has_its_line() -> None:
    assert [line.split(":")[0] for line in exposure_of(RUN, RUN_TERMS)] == [
        "worker",
        "validator",
        "owner",
        "anyone else",
    ]


def test_jurors_are_those_who_never_sat_own_or_work_there() -> None:
    bench = [ME, PEER, STRANGER]
    view: Any = SimpleNamespace(jurors=lambda: bench)
    run: Any = SimpleNamespace(seats={}, owner=ME)
    assert eligible_jurors(view, run) == [PEER, STRANGER]
    run.seats = {PEER: 1}
    assert eligible_jurors(view, run) == [STRANGER]
    assert eligible_jurors(view, run, STRANGER) == []


def test_empty_bench_says_what_follows() -> None:
    assert bench_words(3) == "3 of the network's bench could judge a dispute"
    assert "what the validators sign stands" in bench_words(0)


# How it comes back

MEMBER = Member(WorkerStatus.ACTIVE, 5, 0, 0, 0, 0, WorkerStatus.NONE)
STATE = LeavingAccount(
    account=ME,
    run_id=RUN,
    member=MEMBER,
    stake=StakeAccount(120 * TOKEN, 0, 0, 0),
    required_wei=100 * TOKEN,
    unbonding_s=600,
    is_validator=False,
    now=1_000_000,
)
GONE = replace(MEMBER, status=WorkerStatus.EXITING)


@pytest.mark.parametrize(
    ("state", "tokens", "exits", "says"),
    [
        (STATE, 120, True, "worker   leaves this run: no more tickets of it"),
        (STATE, 21, False, "worker   is jailed: it must hold 100 tokens"),
        (replace(STATE, is_validator=True), 120, True, "seat     is given up"),
        (replace(STATE, is_validator=True), 21, False, "seat     is lost: it must hold 100"),
        (STATE, 20, False, None),
        (replace(STATE, member=GONE, required_wei=0), 120, False, None),
    ],
)
def test_what_follows_from_taking_stake_out_is_said(
    state: LeavingAccount, tokens: int, exits: bool, says: str | None
) -> None:
    assert state.exits(tokens * TOKEN) is exits
    text = state.describe(tokens * TOKEN)
    assert f"unbonds  {tokens} of 120 tokens in run 3" in text
    assert "from 1970-01-12 13:56:40 UTC, in 10 min" in text
    assert says is None or says in text
    assert ("is jailed" in text or "leaves" in text or "seat" in text) is (says is not None)


def test_amount_is_everything_unless_told_and_never_more() -> None:
    assert STATE.amount(None) == 120 * TOKEN
    assert STATE.amount(5) == 5
    with pytest.raises(ConfigError, match="--amount is 121 tokens, only 120 are staked for run 3"):
        STATE.amount(121 * TOKEN)
    nothing = replace(STATE, stake=StakeAccount(0, 7, 5, 0))
    with pytest.raises(ConfigError, match="has no active stake in run 3"):
        nothing.amount(None)


@pytest.mark.parametrize(("withdrawable_at", "is_due"), [(1_000_000, True), (1_000_001, False)])
def test_unbonding_stake_is_withdrawn_on_its_second_and_not_before(
    withdrawable_at: int, is_due: bool
) -> None:
    state = replace(STATE, stake=StakeAccount(0, 7 * TOKEN, withdrawable_at, 2))
    assert state.is_due is is_due
    if is_due:
        state.require_due()
        return
    with pytest.raises(NotYet, match="7 tokens can be withdrawn from"):
        state.require_due()


def test_nothing_unbonding_is_never_due() -> None:
    assert not replace(STATE, stake=StakeAccount(7, 0, 0, 0)).is_due
