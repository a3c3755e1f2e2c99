"""Disputes on the command line: what is said before a challenge, refused with a hint, listed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from client_world import make_submission, make_ticket
from muster.client.case_proofs import as_claimed, leaf_of, prove_outcome
from muster.client.overdue import submissions_of
from test_client_jury import (
    LEAF,
    ME,
    OPENED_AT,
    PEER,
    STRANGER,
    TERMS,
    make_case,
    make_view_batch,
)

from muster.chain import Fault, Standing
from muster.client.cases import (
    Penalty,
    describe_cases,
    ending_of,
    make_row,
    next_of,
    offence_of,
    penalties_of,
    phase_of,
)
from muster.client.dispute import Offer, opposite_of
from muster.client.settling import explained
from muster.protocol.encoding import keccak
from muster.protocol.errors import ConfigError, ContractRevert
from muster.protocol.messages import Reason, Verdict, overdue_leaf

TOKEN = 10**18
SUBMISSION = make_submission(make_ticket(), [])
RECORD = replace(as_claimed(SUBMISSION, 5), verdict=Verdict.REJECTED, reason=Reason.LATE)
OFFER = Offer(
    standing=Standing(RECORD, LEAF, keccak(b"offence"), RECORD.verdict, 1_000_000, False),
    claimed=Verdict.ACCEPTED,
    terms=replace(TERMS, challenge_bond=10 * TOKEN),
    balance_wei=10 * TOKEN,
    allowance_wei=0,
    gas_wei=10**15,
)
VIEW: Any = SimpleNamespace(
    workers={SUBMISSION.worker: SimpleNamespace(worker_id=5)},
    batches={1: SimpleNamespace(run_id=7)},
    cases={},
)


def test_offer_says_what_it_costs_and_until_when() -> None:
    text = OFFER.describe()
    assert "10 of 10 tokens" in text
    assert "until 1970-01-12 13:46:40 UTC" in text
    assert "rejected (LATE)" in text
    assert "2 min at most" in text
    OFFER.require(now=999_999)


@pytest.mark.parametrize(
    ("changes", "now", "message"),
    [
        ({"claimed": Verdict.REJECTED}, 0, "recorded as rejected already"),
        ({}, 1_000_000, "window closed at 1970-01-12"),
        ({"balance_wei": 10 * TOKEN - 1}, 0, "the bond is 10 tokens, the wallet holds 9.99"),
    ],
)
def test_offer_that_cannot_be_made_says_why_and_what_to_do(
    changes: dict[str, Any], now: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        replace(OFFER, **changes).require(now)
    assert caught.value.hint


def test_posted_outcome_is_proven_from_the_chain_alone() -> None:
    batch = make_view_batch([LEAF], [RECORD])
    assert leaf_of(batch, 0) == RECORD.leaf(1, 0)
    assert prove_outcome(VIEW, batch, 0).record == RECORD.to_bytes()


async def test_overdue_batch_needs_its_submissions() -> None:
    batch = make_view_batch([SUBMISSION.leaf()])
    with pytest.raises(ConfigError, match="not on chain") as caught:
        await submissions_of(batch, None)
    assert "--orchestrator" in str(caught.value.hint)
    batch.direct = SUBMISSION
    shown = await submissions_of(batch, None)
    assert leaf_of(batch, 0, shown) == overdue_leaf(1, SUBMISSION.leaf())
    proof = prove_outcome(VIEW, batch, 0, shown)
    assert proof.record == as_claimed(SUBMISSION, 5).to_bytes()


async def test_refusal_of_the_court_says_what_to_do_next() -> None:
    async def refuse() -> None:
        raise ContractRevert("CourtPhaseOpen", (LEAF, 5))

    with pytest.raises(ContractRevert) as caught:
        await explained(refuse())
    assert caught.value.hint == "the jury has time left: muster dispute list shows until when"


COMMITTED = {"jurors": (ME, PEER), "commitments": {ME: LEAF, PEER: LEAF}}


@pytest.mark.parametrize(
    ("changes", "seconds", "expected"),
    [
        ({}, 0, ("drawing", OPENED_AT + 80)),
        ({}, 80, ("no jury", OPENED_AT + 120)),
        ({"jurors": (ME,)}, 79, ("committing", OPENED_AT + 80)),
        ({"jurors": (ME,)}, 80, ("revealing", OPENED_AT + 120)),
        (COMMITTED, 1, ("revealing", OPENED_AT + 120)),
        (COMMITTED | {"votes": {ME: True, PEER: True}}, 1, ("to close", None)),
        ({}, 120, ("to close", None)),
        ({"closed": True, "overturned": True}, 1, ("overturned", None)),
        ({"closed": True}, 1, ("upheld", None)),
    ],
)
def test_phase_ends_when_the_court_says(
    changes: dict[str, Any], seconds: int, expected: tuple[str, int | None]
) -> None:
    assert phase_of(make_case(**changes), TERMS, OPENED_AT + seconds) == expected


def test_cases_are_listed_by_run_for_programs_and_people() -> None:
    VIEW.cases = {LEAF: make_case(**COMMITTED | {"votes": {ME: True}})}
    assert describe_cases(VIEW, 8, TERMS, OPENED_AT) == []  # type: ignore[arg-type]
    [case] = describe_cases(VIEW, 7, TERMS, OPENED_AT)  # type: ignore[arg-type]
    assert case == {
        "case": f"0x{LEAF.hex()}",
        "batch": 1,
        "position": 0,
        "challenger": STRANGER,
        "recorded": "rejected",
        "claimed": "accepted",
        "phase": "revealing",
        "jurors": [ME, PEER],
        "committed": 2,
        "votes_to_overturn": 1,
        "votes_to_uphold": 0,
        "deadline": OPENED_AT + 120,
        "ending": None,
        "next": "waiting for 1 juror to reveal what they voted, "
        "until 1970-01-01 01:25:20 UTC at the latest",
        "to_slash": [],
    }
    row = "  ".join(make_row(case)).split()
    assert (row[0], row[2:7]) == ("1:0", ["rejected", "accepted", "revealing", "2/2", "1:0"])


# What is left to do


def closed_world(**changes: Any) -> tuple[Any, Any]:
    case = make_case(jurors=(ME, PEER), votes={ME: True}, closed=True, **changes)
    seats = {ME: 1, PEER: 2, STRANGER: 4}
    view = SimpleNamespace(
        batches={1: SimpleNamespace(run_id=7, signers=0b100)},
        runs={7: SimpleNamespace(seats=seats)},
        slashes=[],
    )
    return view, case


def test_overturned_case_lets_anybody_slash_signers_and_absent_jurors_once() -> None:
    view, case = closed_world(overturned=True)
    signer, absent = penalties_of(view, case)
    assert signer == Penalty(Fault.WRONG_VERDICT, STRANGER)
    assert absent == Penalty(Fault.ABSENT_JUROR, PEER)
    view.slashes = [SimpleNamespace(offence=offence_of(signer, case.leaf))]
    assert penalties_of(view, case) == [absent]


def test_upheld_case_spares_its_signers() -> None:
    view, case = closed_world()
    assert penalties_of(view, case) == [Penalty(Fault.ABSENT_JUROR, PEER)]


def test_open_case_lets_nobody_be_slashed() -> None:
    view, _ = closed_world()
    assert penalties_of(view, make_case(jurors=(ME,))) == []


@pytest.mark.parametrize(
    ("changes", "seconds", "says"),
    [
        ({}, 0, "a block decides who sits on the jury, until"),
        ({"jurors": (ME,)}, 1, "waiting for 1 juror to check the work again and commit, until"),
        ({}, 121, "muster dispute settle 1:0 --keystore FILE"),
        ({"closed": True}, 1, "nothing: the case is over"),
    ],
)
def test_next_step_names_who_acts_or_the_command(
    changes: dict[str, Any], seconds: int, says: str
) -> None:
    assert says in next_of(make_case(**changes), TERMS, OPENED_AT + seconds)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"overturned": True, "verdict": 1, "bond_returned_wei": 10 * TOKEN}, "10 tokens went"),
        ({"verdict": 3, "bond_returned_wei": 0}, "the challenger's bond was burned"),
    ],
)
def test_ending_says_what_became_of_the_bond(changes: dict[str, Any], says: str) -> None:
    assert says in ending_of(make_case(closed=True, **changes))


@pytest.mark.parametrize(
    ("recorded", "claimed"),
    [(Verdict.ACCEPTED, Verdict.REJECTED), (Verdict.FRAUD, Verdict.ACCEPTED)],
)
def test_challenge_claims_the_opposite_unless_told(recorded: Verdict, claimed: Verdict) -> None:
    assert opposite_of(recorded) is claimed
