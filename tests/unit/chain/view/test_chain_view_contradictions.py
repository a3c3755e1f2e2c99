from typing import Any

import pytest
from chain_fakes import History, address
from chain_histories import (
    ACCEPTED,
    CHEATER,
    COMMITTED,
    CONFIG,
    ESCROW,
    FINALISED,
    FRAUD_FOUND,
    LEAF,
    NODE,
    OVERTURNED,
    OWNER,
    RECORDS,
    RELEASED,
    RUN,
    SLASHED,
    UPHELD,
    VALIDATORS,
    WORKER,
    begun,
    dispute,
    full,
    post,
    revealed,
    viewed,
)

from muster.chain import RunTerms
from muster.protocol.encoding import keccak
from muster.protocol.messages import pack_records

OF_WORKER = {"run_id": RUN, "owner": WORKER}
OF_CHEATER = {"run_id": RUN, "owner": CHEATER}


def test_honest_history_has_no_contradiction() -> None:
    assert viewed(full()).contradictions == []


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("Deposited", {**OF_WORKER, "amount": 1, "active": 5}, "active stake"),
        (
            "UnbondRequested",
            {**OF_WORKER, "amount": 1, "unbonding": 2, "withdrawable_at": 1},
            "unbonding stake",
        ),
        ("Withdrawn", {**OF_WORKER, "amount": 3}, "amount"),
        ("Slashed", SLASHED, "slashed twice"),
        ("SlashReleased", {**RELEASED, "burned": 302}, "what is split"),
        ("SlashReleased", {**RELEASED, "escrow_id": keccak(b"?")}, "unknown"),
        (
            "SlashRestored",
            {**OF_CHEATER, "escrow_id": ESCROW, "returned": 401, "followed": 0},
            "released before",
        ),
        (
            "SlashRestored",
            {**OF_CHEATER, "escrow_id": keccak(b"?"), "returned": 1, "followed": 0},
            "unknown",
        ),
        (
            "SlashFollowed",
            {"escrow_id": keccak(b"?"), "from_escrow_id": ESCROW, "amount": 1},
            "unknown",
        ),
        ("JurorJoined", {"juror": OWNER, "place": 1}, "the place"),
        ("JurorLeft", {"juror": OWNER, "place": 0}, "no place 0"),
        ("WorkerRegistered", {"worker": address(70), "worker_id": 9}, "worker id"),
        ("NodeUnbound", {"worker": WORKER, "node": address(99)}, "old node"),
        ("NodeBound", {"worker": address(99), "node": NODE}, "unknown"),
        (
            "WorkerJoined",
            {"run_id": RUN, "worker": WORKER, "terms": 2, "active_from": 9},
            "the run's terms",
        ),
        ("WorkerExiting", {"run_id": RUN, "worker": address(99)}, "unknown"),
        ("WorkerExiting", {"run_id": 2, "worker": WORKER}, "unknown"),
        (
            "WorkerAcquitted",
            {"run_id": RUN, "worker": address(99), "escrow_id": ESCROW, "status": 1},
            "unknown",
        ),
        ("RunCreated", {"run_id": 5, "owner": OWNER, "config": CONFIG}, "run id"),
        (
            "CheckpointPublished",
            {"run_id": RUN, "version": 0, "manifest_root": keccak(b"x")},
            "does not follow",
        ),
        (
            "CheckpointPublished",
            {"run_id": 7, "version": 0, "manifest_root": keccak(b"x")},
            "unknown",
        ),
        ("ValidatorUnseated", {"run_id": RUN, "validator": OWNER}, "was no validator"),
        (
            "ValidatorSeated",
            {"run_id": RUN, "validator": VALIDATORS[0], "seat_bit": 1, "terms": 1},
            "seated already",
        ),
        (
            "TrainerRotated",
            {"run_id": RUN, "old_trainer": OWNER, "new_trainer": OWNER},
            "old trainer",
        ),
        ("BatchCommitted", {"batch_id": 9, "run_id": 1, **COMMITTED}, "batch id"),
        ("BatchCommitted", {"batch_id": 2, "run_id": 8, **COMMITTED}, "run 8"),
        (
            "OutcomesPosted",
            {
                "batch_id": 1,
                "run_id": RUN,
                "outcomes_root": keccak(b"x"),
                "posted_at": 9,
                "signers": 3,
                "signatures": b"",
                "records": pack_records(RECORDS),
            },
            "outcomes already",
        ),
        (
            "FraudExecuted",
            {**FINALISED, "worker": CHEATER, "position": 1, "amount": 9},
            "slashed amount",
        ),
        ("FraudFinalised", {**FINALISED, "escrow_id": keccak(b"?")}, "unknown"),
        ("BatchVoided", {"batch_id": 1, "run_id": RUN}, "has outcomes"),
        ("BatchVoided", {"batch_id": 9, "run_id": RUN}, "unknown"),
        ("RunFunded", {"run_id": 5, "from": OWNER, "amount": 1}, "unknown"),
        (
            "RewardClaimed",
            {"run_id": 5, "worker": WORKER, "slots": 1, "units": 1, "amount": 1},
            "unknown",
        ),
        ("VoteRevealed", revealed(OWNER, ACCEPTED, keccak(b"?")), "unknown"),
        (
            "CaseOpened",
            {
                "case_id": LEAF,
                "batch_id": 1,
                "run_id": RUN,
                "number": 1,
                "position": 1,
                "worker": CHEATER,
                "recorded": FRAUD_FOUND,
                "draw_block": 9,
                "places": 3,
            },
            "places of the bench",
        ),
    ],
)
def test_event_that_does_not_follow_is_noted(name: str, args: dict[str, Any], problem: str) -> None:
    history = full()
    history.add(name, **args)
    view = viewed(history)
    assert len(view.contradictions) == 1
    assert problem in view.contradictions[0]
    assert history.events[-1].tx_hash in view.contradictions[0]


def test_terms_that_were_not_announced_are_noted() -> None:
    history, terms = begun(), RunTerms(20, 1, 2, 3)
    changed = {"run_id": RUN, "number": 2, "terms": terms}
    history.add("ChangeApplied", **changed)
    (problem,) = viewed(history).contradictions
    assert "the terms should be None" in problem


def test_number_of_terms_that_skips_one_is_noted() -> None:
    history, terms = begun(), RunTerms(20, 1, 2, 3)
    history.add("ChangeProposed", run_id=RUN, terms=terms, effective_at=99)
    history.add("ChangeApplied", run_id=RUN, number=3, terms=terms)
    (problem,) = viewed(history).contradictions
    assert "the number of terms should be 2" in problem


def judged(ruling: int, status: int, *votes: int) -> History:
    history = begun()
    post(history, 1, RECORDS)
    dispute(history, list(votes), status=status, ruling=ruling)
    return history


def test_juror_that_reveals_twice_is_noted() -> None:
    history = judged(FRAUD_FOUND, UPHELD, FRAUD_FOUND)
    history.add("VoteRevealed", **revealed(address(60), ACCEPTED))
    (problem,) = viewed(history).contradictions
    assert "reveals twice" in problem


def test_commitment_of_whoever_was_not_drawn_is_noted() -> None:
    history = judged(FRAUD_FOUND, UPHELD, FRAUD_FOUND)
    secret = {"case_id": LEAF, "juror": OWNER, "commitment": keccak(b"vote")}
    history.add("VoteCommitted", **secret)
    (problem,) = viewed(history).contradictions
    assert "is no juror" in problem


def test_case_decided_against_its_votes_is_noted() -> None:
    # After a tie the recorded ruling stands.
    history = judged(ACCEPTED, OVERTURNED, FRAUD_FOUND, ACCEPTED)
    (problem,) = viewed(history).contradictions
    assert f"what the jury voted should be {FRAUD_FOUND}" in problem


def test_bond_settled_with_another_claimant_is_noted() -> None:
    history = judged(FRAUD_FOUND, UPHELD, FRAUD_FOUND)
    settled = {"claimant": OWNER, "right": True, "returned": 10}
    history.add("ClaimSettled", case_id=LEAF, **settled)
    (problem,) = viewed(history).contradictions
    assert "the claimant" in problem


def test_fee_other_than_the_cases_is_noted() -> None:
    history = judged(FRAUD_FOUND, UPHELD, FRAUD_FOUND)
    collected = {"juror": address(60), "amount": 4}
    history.add("FeeCollected", case_id=LEAF, **collected)
    (problem,) = viewed(history).contradictions
    assert "the fee should be 3" in problem


def test_wrong_number_of_records_is_noted(history: History) -> None:
    post(history, 1, RECORDS[:2])
    assert "records should be 3" in viewed(history).contradictions[0]
