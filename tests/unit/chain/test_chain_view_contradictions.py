from __future__ import annotations

from typing import Any

import pytest
from chain_fakes import address
from chain_histories import (
    CHEATER,
    COMMITTED,
    CONFIG,
    FINALISED,
    LEAF,
    OFFENCE,
    OWNER,
    RECORDS,
    RUN,
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


def test_honest_history_has_no_contradiction() -> None:
    assert viewed(full()).contradictions == []


@pytest.mark.parametrize(
    ("contract", "name", "args", "problem"),
    [
        ("StakeVault", "Deposited", {"owner": WORKER, "amount": 1, "active": 5}, "active stake"),
        (
            "StakeVault",
            "UnbondRequested",
            {"owner": WORKER, "amount": 1, "unbonding": 2, "withdrawable_at": 1},
            "unbonding stake",
        ),
        ("StakeVault", "Withdrawn", {"owner": WORKER, "amount": 3}, "amount"),
        (
            "StakeVault",
            "Slashed",
            {
                "owner": CHEATER,
                "offence": OFFENCE,
                "from_active": 1,
                "from_unbonding": 0,
                "reporter": address(0),
            },
            "slashed twice",
        ),
        (
            "StakeVault",
            "SlashReleased",
            {"offence": OFFENCE, "burned": 401, "insured": 0, "rewarded": 0},
            "released before",
        ),
        (
            "StakeVault",
            "SlashRestored",
            {"owner": CHEATER, "offence": keccak(b"?"), "amount": 1},
            "unknown",
        ),
        (
            "WorkerRegistry",
            "WorkerRegistered",
            {"worker": address(70), "node": address(71), "worker_id": 9, "active_from": 1},
            "worker id",
        ),
        (
            "WorkerRegistry",
            "NodeRotated",
            {"worker": WORKER, "old_node": address(99), "new_node": address(98)},
            "old node",
        ),
        ("WorkerRegistry", "WorkerExiting", {"worker": address(99)}, "unknown"),
        (
            "WorkerRegistry",
            "WorkerAcquitted",
            {"worker": address(99), "offence": OFFENCE, "status": 1},
            "unknown",
        ),
        ("RunRegistry", "RunCreated", {"run_id": 5, "owner": OWNER, "config": CONFIG}, "run id"),
        (
            "RunRegistry",
            "CheckpointPublished",
            {"run_id": RUN, "version": 0, "manifest_root": keccak(b"x")},
            "does not follow",
        ),
        (
            "RunRegistry",
            "CheckpointPublished",
            {"run_id": 7, "version": 0, "manifest_root": keccak(b"x")},
            "unknown",
        ),
        (
            "RunRegistry",
            "BeaconRecorded",
            {"run_id": RUN, "version": 0, "beacon": keccak(b"x")},
            "beacon",
        ),
        (
            "RunRegistry",
            "ValidatorUnseated",
            {"run_id": RUN, "validator": OWNER},
            "was no validator",
        ),
        (
            "RunRegistry",
            "ValidatorSeated",
            {"run_id": RUN, "validator": VALIDATORS[0], "seat_bit": 1},
            "seated already",
        ),
        (
            "RunRegistry",
            "TrainerRotated",
            {"run_id": RUN, "old_trainer": OWNER, "new_trainer": OWNER},
            "old trainer",
        ),
        (
            "RunRegistry",
            "ChangeApplied",
            {"run_id": RUN, "terms": RunTerms(1, 1, 1, 1)},
            "the terms",
        ),
        (
            "ContributionLedger",
            "BatchCommitted",
            {"batch_id": 9, "run_id": 1, **COMMITTED},
            "batch id",
        ),
        (
            "ContributionLedger",
            "BatchCommitted",
            {"batch_id": 2, "run_id": 8, **COMMITTED},
            "run 8",
        ),
        (
            "ContributionLedger",
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
            "ContributionLedger",
            "FraudExecuted",
            {**FINALISED, "worker": CHEATER, "position": 1, "amount": 9},
            "slashed amount",
        ),
        (
            "ContributionLedger",
            "FraudFinalised",
            {**FINALISED, "offence": keccak(b"?")},
            "unknown",
        ),
        ("RewardEscrow", "RunFunded", {"run_id": 5, "from": OWNER, "amount": 1}, "unknown"),
        (
            "RewardEscrow",
            "RewardClaimed",
            {"run_id": 5, "worker": WORKER, "slots": 1, "units": 1, "amount": 1},
            "unknown",
        ),
        (
            "DisputeCourt",
            "VoteRevealed",
            {"leaf": keccak(b"?"), "juror": OWNER, "overturn": True, "result_hash": LEAF},
            "unknown",
        ),
    ],
)
def test_event_that_does_not_follow_is_noted(
    contract: str, name: str, args: dict[str, Any], problem: str
) -> None:
    history = full()
    history.add(contract, name, **args)
    view = viewed(history)
    assert len(view.contradictions) == 1
    assert problem in view.contradictions[0]
    assert history.events[-1].tx_hash in view.contradictions[0]


def test_juror_that_reveals_twice_is_noted() -> None:
    history = begun()
    post(history, 1, RECORDS)
    dispute(history, [False], overturned=False, verdict=4)
    history.add("DisputeCourt", "VoteRevealed", **revealed(address(60), True))
    assert "reveals twice" in viewed(history).contradictions[0]


def test_case_decided_against_its_votes_is_noted() -> None:
    history = begun()
    post(history, 1, RECORDS)
    dispute(history, [False, True], overturned=True, verdict=1)
    assert "overturned should be False" in viewed(history).contradictions[0]


def test_wrong_number_of_records_is_noted() -> None:
    history = begun()
    post(history, 1, RECORDS[:2])
    assert "records should be 3" in viewed(history).contradictions[0]
