from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from chain_fakes import History, address
from hypothesis import given
from hypothesis import strategies as st

from muster.chain import (
    Batch,
    ChainView,
    Fault,
    PauseCause,
    PauseView,
    RunConfig,
    RunTerms,
    SlashState,
    WorkerStatus,
)
from muster.chain.view_parts import lenient_reason, parse_records
from muster.protocol.encoding import keccak
from muster.protocol.errors import EncodingError
from muster.protocol.ids import PolicyVersion, RunId, Step
from muster.protocol.merkle import merkle_root, verify_merkle_proof
from muster.protocol.messages import (
    OutcomeRecord,
    Reason,
    Submission,
    Verdict,
    pack_records,
)

OWNER, TRAINER, ORCHESTRATOR = address(1), address(2), address(3)
WORKER, CHEATER, NODE, OTHER_NODE = address(10), address(11), address(20), address(21)
VALIDATORS = (address(30), address(31), address(32))
RUN = RunId(1)
CONFIG = RunConfig(
    TRAINER,
    ORCHESTRATOR,
    *(keccak(bytes([i])) for i in range(4)),
    terms=RunTerms(price_per_unit=10, fraud_ppm=100_000, exact_fraud_ppm=500_000, quorum=2),
    validators=VALIDATORS,
)


COMMITTED = {
    "root": keccak(b"x"),
    "count": 1,
    "units": 1,
    "price_per_unit": 1,
    "committed_at": 1,
}
"""What a commitment says beside its batch and run."""


def outcome(
    worker_id: int, index: int, verdict: Verdict = Verdict.ACCEPTED, units: int = 100
) -> OutcomeRecord:
    reason = Reason.NONE if verdict is Verdict.ACCEPTED else Reason.WRONG_SEED
    return OutcomeRecord(
        worker_id=worker_id,
        step=Step(1),
        index=index,
        policy_version=PolicyVersion(0),
        file_hash=keccak(bytes([worker_id, index])),
        rollouts=8,
        units=units,
        verdict=verdict,
        reason=reason,
    )


RECORDS = [outcome(1, 0), outcome(2, 0, Verdict.FRAUD), outcome(1, 1, Verdict.REJECTED)]
OFFENCE, LEAF = RECORDS[1].offence(RUN), RECORDS[1].leaf(1, 1)
FINALISED = {"batch_id": 1, "offence": OFFENCE, "leaf": LEAF}


def register(history: History, worker: str, worker_id: int, node: str, stake: int) -> None:
    history.add(
        "WorkerRegistry",
        "WorkerRegistered",
        worker=worker,
        node=node,
        worker_id=worker_id,
        active_from=history.block + 2,
    )
    history.add(
        "StakeVault", "Deposited", same_block=True, owner=worker, amount=stake, active=stake
    )


def post(history: History, batch_id: int, records: list[OutcomeRecord]) -> None:
    history.add(
        "ContributionLedger",
        "OutcomesPosted",
        batch_id=batch_id,
        run_id=RUN,
        outcomes_root=keccak(b"outcomes"),
        posted_at=history.block + 1,
        signers=0b11,
        records=pack_records(records),
        signatures=b"a" * 65 + b"b" * 65,
    )


def commit(history: History, batch_id: int, count: int) -> None:
    history.add(
        "ContributionLedger",
        "BatchCommitted",
        batch_id=batch_id,
        run_id=RUN,
        root=keccak(b"batch"),
        count=count,
        units=300,
        price_per_unit=10,
        committed_at=history.block + 1,
    )
    history.add("RewardEscrow", "RewardReserved", same_block=True, run_id=RUN, amount=3000)


def begun() -> History:
    """Two workers, a run with version 0, one committed batch."""
    history = History()
    register(history, WORKER, 1, NODE, 1000)
    register(history, CHEATER, 2, OTHER_NODE, 801)
    history.add("RunRegistry", "RunCreated", run_id=RUN, owner=OWNER, config=CONFIG)
    for seat, validator in enumerate(VALIDATORS):
        seated = {"run_id": RUN, "validator": validator, "seat_bit": 1 << seat}
        history.add("RunRegistry", "ValidatorSeated", same_block=True, **seated)
    history.add("RewardEscrow", "RunFunded", run_id=RUN, **{"from": OWNER}, amount=5000)
    publish(history, 0)
    commit(history, 1, 3)
    return history


def publish(history: History, version: int) -> None:
    history.add(
        "RunRegistry",
        "CheckpointPublished",
        run_id=RUN,
        version=version,
        manifest_root=keccak(b"root%d" % version),
    )


def slash(history: History) -> None:
    history.add("WorkerRegistry", "WorkerBanned", worker=CHEATER, offence=OFFENCE)
    history.add(
        "StakeVault",
        "Slashed",
        same_block=True,
        owner=CHEATER,
        offence=OFFENCE,
        from_active=401,
        from_unbonding=0,
        reporter=address(0),
    )
    history.add(
        "ContributionLedger",
        "FraudExecuted",
        same_block=True,
        batch_id=1,
        worker=CHEATER,
        offence=OFFENCE,
        leaf=LEAF,
        position=1,
        amount=401,
    )


def full() -> History:
    """The whole life of a batch: judged, slashed, final, paid."""
    history = begun()
    post(history, 1, RECORDS)
    slash(history)
    history.add("StakeVault", "SlashReleased", offence=OFFENCE, burned=301, insured=100, rewarded=0)
    history.add("ContributionLedger", "FraudFinalised", same_block=True, **FINALISED)
    history.add(
        "RewardEscrow",
        "RewardClaimed",
        run_id=RUN,
        worker=WORKER,
        slots=1,
        units=100,
        amount=1000,
    )
    return history


def viewed(history: History) -> ChainView:
    view = ChainView()
    for event in history.events:
        view.apply(event)
    return view


def state(view: ChainView) -> dict[str, Any]:
    return copy.deepcopy(vars(view))


# ----------------------------------------------------------------------- workers


def test_worker_is_found_by_address_number_and_node() -> None:
    view = viewed(begun())
    worker = view.workers[WORKER]
    assert view.worker_by_id[1] is worker
    assert view.worker_by_node[NODE] is worker
    assert (worker.status, worker.active_from, worker.registered_block) == ("Active", 3, 1)
    assert (worker.active_wei, worker.unbonding_wei, worker.slashed_wei) == (1000, 0, 0)


def test_worker_is_active_from_its_block_on() -> None:
    worker = viewed(begun()).workers[WORKER]
    assert [worker.is_active(block) for block in (2, 3, 4)] == [False, True, True]


def test_rotated_node_replaces_the_old_one() -> None:
    history = begun()
    fresh = address(22)
    history.add("WorkerRegistry", "NodeRotated", worker=WORKER, old_node=NODE, new_node=fresh)
    view = viewed(history)
    assert NODE not in view.worker_by_node
    assert view.worker_by_node[fresh].address == WORKER
    worker = view.workers[WORKER]
    rotated = history.block
    assert [worker.node_at(b) for b in (0, 1, rotated - 1, rotated)] == [None, NODE, NODE, fresh]


def test_statuses_are_remembered_with_their_blocks() -> None:
    history = begun()
    history.add("WorkerRegistry", "WorkerJailed", worker=WORKER, offence=bytes(32), until=99)
    jailed = history.block
    history.add("WorkerRegistry", "WorkerUnjailed", worker=WORKER, active_from=50)
    history.add("WorkerRegistry", "WorkerExiting", worker=WORKER)
    worker = viewed(history).workers[WORKER]
    assert (worker.status, worker.jailed_until, worker.active_from) == ("Exiting", 99, 50)
    assert worker.first_active_from == 3
    expected = ["None", "Active", "Jailed", "Active", "Exiting"]
    assert [worker.status_at(b) for b in (0, 1, jailed, jailed + 1, jailed + 2)] == expected


def test_convictions_are_counted_and_acquittals_tell_the_status() -> None:
    history = begun()
    history.add("WorkerRegistry", "WorkerJailed", worker=CHEATER, offence=OFFENCE, until=9)
    history.add("WorkerRegistry", "WorkerBanned", worker=CHEATER, offence=keccak(b"second"))
    cheater = viewed(history).workers[CHEATER]
    assert (cheater.status, cheater.convictions) == (WorkerStatus.BANNED, 2)
    acquitted = {"worker": CHEATER, "offence": OFFENCE, "status": 2}
    history.add("WorkerRegistry", "WorkerAcquitted", **acquitted)
    cheater = viewed(history).workers[CHEATER]
    assert (cheater.status, cheater.convictions) == (WorkerStatus.JAILED, 1)


def test_jail_for_low_stake_is_no_conviction_and_spares_who_leaves() -> None:
    history = begun()
    history.add("WorkerRegistry", "WorkerExiting", worker=WORKER)
    history.add("WorkerRegistry", "WorkerJailed", worker=WORKER, offence=bytes(32), until=9)
    worker = viewed(history).workers[WORKER]
    assert (worker.status, worker.convictions, worker.jailed_until) == ("Exiting", 0, 9)
    history.add("WorkerRegistry", "WorkerRejoined", worker=WORKER, active_from=40)
    worker = viewed(history).workers[WORKER]
    assert (worker.status, worker.active_from) == ("Active", 40)


def test_held_stake_is_known() -> None:
    history = begun()
    history.add("StakeVault", "StakeHeld", owner=WORKER, held_until=70, open_cases=2)
    stake = viewed(history).stakes[WORKER]
    assert (stake.held_until, stake.open_cases) == (70, 2)


# ------------------------------------------------------------------------- stake


def test_stake_of_accounts_that_are_no_workers_is_kept() -> None:
    history = begun()
    history.add("StakeVault", "Deposited", owner=VALIDATORS[0], amount=7, active=7)
    assert viewed(history).stakes[VALIDATORS[0]].active_wei == 7


def test_unbonding_stake_moves_and_leaves() -> None:
    history = begun()
    history.add(
        "StakeVault",
        "UnbondRequested",
        owner=WORKER,
        amount=300,
        unbonding=300,
        withdrawable_at=5000,
    )
    stake = viewed(history).stakes[WORKER]
    assert (stake.active_wei, stake.unbonding_wei, stake.withdrawable_at) == (700, 300, 5000)
    history.add("StakeVault", "Withdrawn", owner=WORKER, amount=300)
    view = viewed(history)
    assert (view.stakes[WORKER].unbonding_wei, view.stakes[WORKER].withdrawable_at) == (0, 0)
    assert view.contradictions == []


def test_slash_is_linked_to_its_outcome() -> None:
    history = begun()
    post(history, 1, RECORDS)
    slash(history)
    view = viewed(history)
    (found,) = view.slashes
    assert (found.owner, found.batch_id, found.position) == (CHEATER, 1, 1)
    assert (found.leaf, found.priors) == (LEAF, 0)
    assert (found.amount_wei, found.stake_before, found.taken) == (401, (801, 0), (401, 0))
    assert found.state is SlashState.ESCROWED
    assert view.workers[CHEATER].active_wei == 400
    assert view.workers[CHEATER].slashed_wei == 401


def test_released_slash_keeps_its_split() -> None:
    (found,) = viewed(full()).slashes
    assert (found.state, found.split) == (SlashState.RELEASED, (301, 100, 0))
    assert found.settled_tx is not None


def test_restored_slash_gives_the_stake_back() -> None:
    history = begun()
    post(history, 1, RECORDS)
    slash(history)
    history.add("StakeVault", "SlashRestored", owner=CHEATER, offence=OFFENCE, amount=401)
    view = viewed(history)
    assert view.slashes[0].state is SlashState.RESTORED
    assert view.workers[CHEATER].active_wei == 801
    assert view.workers[CHEATER].slashed_wei == 0
    assert view.contradictions == []


# -------------------------------------------------------------------------- runs


def test_run_holds_its_configuration_and_money() -> None:
    run = viewed(full()).runs[RUN]
    assert (run.owner, run.config, run.validators) == (OWNER, CONFIG, list(VALIDATORS))
    assert (run.funded_wei, run.paid_wei, run.paused) == (5000, 1000, False)
    assert (run.available_wei, run.reserved_wei) == (2000, 2000)


def test_beacon_is_the_hash_of_the_publishing_block() -> None:
    history = begun()
    publish(history, 4)
    published = history.events[-1]
    run = viewed(history).runs[RUN]
    assert run.latest_version == 4
    checkpoint = run.checkpoints[PolicyVersion(4)]
    assert checkpoint.beacon == published.block_hash
    assert checkpoint.timestamp == published.block_timestamp
    assert checkpoint.tx_hash == published.tx_hash


def test_run_without_checkpoint_has_no_version() -> None:
    history = History()
    history.add("RunRegistry", "RunCreated", run_id=RUN, owner=OWNER, config=CONFIG)
    for seat, validator in enumerate(VALIDATORS):
        seated = {"run_id": RUN, "validator": validator, "seat_bit": 1 << seat}
        history.add("RunRegistry", "ValidatorSeated", same_block=True, **seated)
    assert viewed(history).runs[RUN].latest_version is None


def test_pause_is_followed() -> None:
    history = begun()
    for paused in (True, False):
        history.add("RunRegistry", "SubmissionsPaused", run_id=RUN, paused=paused)
        assert viewed(history).runs[RUN].paused is paused


def pause(history: History, by: str = VALIDATORS[1], lasts: int = 5) -> None:
    history.add(
        "RunRegistry",
        "SlashingPaused",
        run_id=RUN,
        by=by,
        cause=1,
        reason=60,
        evidence_hash=keccak(b"evidence"),
        until=1001 + history.block + lasts,
    )


@pytest.mark.parametrize("by", [OWNER, ORCHESTRATOR, *VALIDATORS])
def test_pause_of_slashing_is_known_with_who_and_why(by: str) -> None:
    history = begun()
    pause(history, by)
    view = viewed(history)
    run, event = view.runs[RUN], history.events[-1]
    (found,) = run.pauses
    assert (found.by, found.cause, found.reason) == (by, PauseCause.KNOWN_GOOD_ITEM, 60)
    assert (found.evidence_hash, found.tx_hash) == (keccak(b"evidence"), event.tx_hash)
    began = event.block_timestamp
    assert (found.began_at, found.until) == (began, began + 5) == (began, run.slashing_paused_until)
    assert [run.is_slashing_paused(began + s) for s in (0, 4, 5)] == [True, True, False]
    assert view.contradictions == []


def test_run_without_pauses_never_stopped_slashing() -> None:
    run = viewed(begun()).runs[RUN]
    assert (run.pauses, run.slashing_paused_until) == ([], 0)
    assert not run.is_slashing_paused(0)


@given(posted=st.integers(0, 60), window=st.integers(1, 20))
def test_frauds_close_a_window_after_the_pause_that_met_theirs(posted: int, window: int) -> None:
    run = viewed(begun()).runs[RUN]
    run.pauses = [
        PauseView(OWNER, PauseCause.OTHER, 0, keccak(b""), began, began + 7, "")
        for began in (10, 10 + 7 + window)
    ]
    ends = [
        pause.until
        for pause in run.pauses
        if set(range(posted, posted + window)) & set(range(pause.began_at, pause.until))
    ]
    expected = (ends[-1] if ends else posted) + window
    assert run.fraud_closes_at(posted, window) == expected


def test_a_pause_that_nobody_may_call_is_a_contradiction() -> None:
    history = begun()
    pause(history, WORKER)
    (problem,) = viewed(history).contradictions
    assert f"{WORKER} may not pause slashing" in problem


def test_a_pause_in_a_pause_is_a_contradiction() -> None:
    history = begun()
    pause(history, lasts=10**6)
    pause(history)
    (problem,) = viewed(history).contradictions
    assert "slashing is paused until" in problem


def test_a_fraud_executed_in_a_pause_is_a_contradiction() -> None:
    history = begun()
    post(history, 1, RECORDS)
    pause(history, lasts=10**6)
    slash(history)
    (problem,) = viewed(history).contradictions
    assert "FraudExecuted" in problem
    assert "slashing is paused until" in problem


def test_replaced_validator_keeps_its_seat_and_signs_no_more() -> None:
    history = begun()
    history.add("RunRegistry", "ValidatorUnseated", run_id=RUN, validator=VALIDATORS[1])
    seated = {"run_id": RUN, "validator": address(40), "seat_bit": 8}
    history.add("RunRegistry", "ValidatorSeated", same_block=True, **seated)
    post(history, 1, RECORDS)
    view = viewed(history)
    now = (VALIDATORS[0], VALIDATORS[2], address(40))
    assert (tuple(view.runs[RUN].validators), view.batches[1].validators) == (now, now)
    assert view.runs[RUN].seats == {VALIDATORS[0]: 1, VALIDATORS[1]: 2, VALIDATORS[2]: 4, now[2]: 8}


def test_keys_and_terms_of_a_run_follow_its_events() -> None:
    history, terms = begun(), RunTerms(20, 1, 2, 3)
    trainer = {"old_trainer": TRAINER, "new_trainer": address(41)}
    history.add("RunRegistry", "TrainerRotated", run_id=RUN, **trainer)
    keys = {"old_orchestrator": ORCHESTRATOR, "new_orchestrator": address(42)}
    history.add("RunRegistry", "OrchestratorRotated", run_id=RUN, **keys)
    history.add("RunRegistry", "ChangeProposed", run_id=RUN, terms=terms, effective_at=99)
    assert viewed(history).runs[RUN].proposed == (terms, 99)
    history.add("RunRegistry", "ChangeApplied", run_id=RUN, terms=terms)
    history.add("RunRegistry", "RunClosed", run_id=RUN)
    view = viewed(history)
    run = view.runs[RUN]
    assert (run.config.trainer, run.config.orchestrator) == (address(41), address(42))
    assert (run.config.terms, run.proposed, run.closed_at > 0) == (terms, None, True)
    assert view.contradictions == []


def test_batch_names_the_orchestrator_of_its_time() -> None:
    history = begun()
    keys = {"old_orchestrator": ORCHESTRATOR, "new_orchestrator": address(42)}
    history.add("RunRegistry", "OrchestratorRotated", run_id=RUN, **keys)
    commit(history, 2, 3)
    batches = viewed(history).batches
    assert {n: batch.orchestrator for n, batch in batches.items()} == {
        1: ORCHESTRATOR,
        2: address(42),
    }


def test_announced_terms_may_be_withdrawn() -> None:
    history = begun()
    terms = RunTerms(20, 1, 2, 3)
    history.add("RunRegistry", "ChangeProposed", run_id=RUN, terms=terms, effective_at=99)
    history.add("RunRegistry", "ChangeCancelled", run_id=RUN)
    assert viewed(history).runs[RUN].proposed is None


def test_owner_of_a_closed_run_takes_back_what_is_left() -> None:
    history = full()
    history.add("RewardEscrow", "RewardRecovered", run_id=RUN, slots=2, amount=500)
    run = viewed(history).runs[RUN]
    assert (run.available_wei, run.reserved_wei) == (2500, 1500)
    history.add("RewardEscrow", "RunReclaimed", run_id=RUN, owner=OWNER, amount=2500)
    run = viewed(history).runs[RUN]
    assert (run.available_wei, run.reserved_wei, run.reclaimed_wei) == (0, 1500, 2500)
    history.add("RewardEscrow", "RunReclaimed", run_id=RUN, owner=OWNER, amount=1500)
    run = viewed(history).runs[RUN]
    assert (run.available_wei, run.reserved_wei, run.reclaimed_wei) == (0, 0, 4000)


def test_punished_validator_is_told_with_its_fault() -> None:
    history = begun()
    history.add("StakeVault", "Deposited", owner=VALIDATORS[0], amount=10, active=10)
    taken = {"from_active": 1, "from_unbonding": 0, "reporter": address(0)}
    history.add("StakeVault", "Slashed", owner=VALIDATORS[0], offence=LEAF, **taken)
    fault = {"fault": 2, "subject": bytes(32), "amount": 1}
    history.add("FaultCourt", "ValidatorPunished", validator=VALIDATORS[0], offence=LEAF, **fault)
    (slash,) = viewed(history).slashes
    assert (slash.owner, slash.fault) == (VALIDATORS[0], Fault.MISSED_DEADLINE)


# ----------------------------------------------------------------------- batches


def test_batch_has_no_outcomes_until_posted() -> None:
    batch = viewed(begun()).batches[1]
    assert (batch.run_id, batch.count, batch.units) == (RUN, 3, 300)
    assert (batch.records, batch.posted_at, batch.posted_tx) == (None, None, None)


def test_posted_batch_holds_everything_an_auditor_needs() -> None:
    history = begun()
    post(history, 1, RECORDS)
    batch = viewed(history).batches[1]
    assert batch.records == RECORDS
    assert batch.records_hash == keccak(pack_records(RECORDS))
    assert batch.signatures == [b"a" * 65, b"b" * 65]
    assert batch.outcomes_root == keccak(b"outcomes")
    event = history.events[-1]
    assert (batch.posted_at, batch.posted_tx) == (event.args["posted_at"], event.tx_hash)
    header = Batch(1, RUN, keccak(b"outcomes"), 3, 300, 10, batch.committed_at, batch.posted_at, 3)
    assert batch.header() == header


def test_outcomes_are_proven_one_by_one_and_together() -> None:
    history = begun()
    post(history, 1, RECORDS)
    batch = viewed(history).batches[1]
    root = merkle_root(batch.leaves())
    for position, record in enumerate(RECORDS):
        proof = batch.prove(position)
        assert (proof.batch, proof.record) == (batch.header(), record.to_bytes())
        assert verify_merkle_proof(record.leaf(1, position), proof.proof, root)
    claim = batch.claim([0, 2])
    assert claim.records == RECORDS[0].to_bytes() + RECORDS[2].to_bytes()
    assert list(claim.siblings) == [batch.leaves()[1]]


def test_direct_submission_is_kept_with_its_signature() -> None:
    history = begun()
    submission = Submission(RUN, WORKER, Step(1), 9, PolicyVersion(0), keccak(b"f"), 8, 10)
    commit(history, 2, 1)
    history.add(
        "ContributionLedger",
        "DirectlySubmitted",
        same_block=True,
        batch_id=2,
        worker=WORKER,
        submission=submission,
        node_signature=b"s",
    )
    batch = viewed(history).batches[2]
    assert (batch.direct, batch.direct_signature) == (submission, b"s")


def test_training_stream_is_in_order_of_posting() -> None:
    history = begun()
    commit(history, 2, 2)
    post(history, 2, [outcome(1, 5), outcome(1, 6)])
    post(history, 1, RECORDS)
    stream = viewed(history).training_stream(RUN)
    assert [(i.batch_id, i.position) for i in stream] == [(2, 0), (2, 1), (1, 0)]
    assert [i.position_in_stream for i in stream] == [0, 1, 2]
    assert stream[2].record == RECORDS[0]


def test_training_stream_of_an_unknown_run_is_empty() -> None:
    assert viewed(begun()).training_stream(RunId(9)) == []


def test_training_stream_is_the_callers_own() -> None:
    view = viewed(full())
    view.training_stream(RUN).clear()
    assert len(view.training_stream(RUN)) == 1


@pytest.mark.parametrize(
    ("slot", "used"),
    [
        ((1, 1, 0), True),
        ((2, 1, 0), True),
        ((1, 1, 1), True),
        ((1, 1, 2), False),
        ((1, 2, 0), False),
    ],
)
def test_slot_is_used_by_any_outcome(slot: tuple[int, int, int], used: bool) -> None:
    view = viewed(full())
    assert view.slot_used(RUN, *slot) is used
    assert not view.slot_used(RunId(2), *slot)


def test_reason_unknown_to_us_keeps_the_records_bytes() -> None:
    packed = bytearray(pack_records(RECORDS))
    packed[-1] = 99
    records = parse_records(bytes(packed))
    assert b"".join(record.to_bytes() for record in records) == bytes(packed)
    assert (records[2].reason, records[2].reason.name) == (99, "UNKNOWN_99")
    assert records[:2] == RECORDS[:2]


@pytest.mark.parametrize("reason", list(Reason))
def test_known_reasons_stay_themselves(reason: Reason) -> None:
    assert lenient_reason(int(reason)) is reason


@pytest.mark.parametrize("data", [b"", bytes(55), bytes(57)])
def test_partial_records_are_refused(data: bytes) -> None:
    with pytest.raises(EncodingError):
        parse_records(data)


# ------------------------------------------------------------------------- cases


def revealed(juror: str, overturn: bool) -> dict[str, Any]:
    return {
        "leaf": LEAF,
        "juror": juror,
        "overturn": overturn,
        "result_hash": keccak(b"recomputed"),
    }


def dispute(history: History, votes: list[bool], *, overturned: bool, verdict: int) -> None:
    history.add(
        "DisputeCourt",
        "CaseOpened",
        leaf=LEAF,
        batch_id=1,
        challenger=address(50),
        position=1,
        recorded_verdict=4,
        claimed_verdict=1,
        draw_block=history.block + 3,
    )
    jurors = [address(60 + i) for i in range(len(votes))]
    history.add("DisputeCourt", "JuryDrawn", leaf=LEAF, seats=7, jurors=jurors)
    for juror in jurors:
        secret = {"juror": juror, "commitment": keccak(juror.encode())}
        history.add("DisputeCourt", "VoteCommitted", leaf=LEAF, **secret)
    for juror, vote in zip(jurors, votes, strict=True):
        history.add("DisputeCourt", "VoteRevealed", **revealed(juror, vote))
    history.add(
        "DisputeCourt",
        "CaseClosed",
        leaf=LEAF,
        overturned=overturned,
        verdict=verdict,
        bond_returned=10,
    )


def test_overturned_case_changes_the_verdict_that_stands() -> None:
    history = begun()
    post(history, 1, RECORDS)
    dispute(history, [True, False, True], overturned=True, verdict=1)
    view = viewed(history)
    case = view.cases[LEAF]
    assert (case.closed, case.overturned, case.verdict) == (True, True, 1)
    assert list(case.votes.values()) == [True, False, True]
    assert view.standing_verdict(1, 1) is Verdict.ACCEPTED
    assert view.standing_verdict(1, 0) is Verdict.ACCEPTED
    assert view.contradictions == []


def test_upheld_case_leaves_the_verdict() -> None:
    history = begun()
    post(history, 1, RECORDS)
    dispute(history, [True, False], overturned=False, verdict=4)
    view = viewed(history)
    assert view.standing_verdict(1, 1) is Verdict.FRAUD
    assert view.contradictions == []


@pytest.mark.parametrize(("batch_id", "position"), [(9, 0), (1, 3), (1, -1)])
def test_no_verdict_stands_where_there_is_no_outcome(batch_id: int, position: int) -> None:
    assert viewed(full()).standing_verdict(batch_id, position) is None


# --------------------------------------------------------------------- contradictions


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


# ------------------------------------------------------------- order and rewinding


def test_event_is_taken_in_once() -> None:
    history = full()
    view = viewed(history)
    before = state(view)
    for event in history.events:
        view.apply(event)
    assert state(view) == before


def test_event_without_handler_changes_nothing() -> None:
    history = begun()
    before = viewed(history)
    history.add("ContributionLedger", "EIP712DomainChanged")
    after = viewed(history)
    assert after.batches == before.batches
    assert after.contradictions == []


@given(st.integers(0, 30))
def test_rewinding_and_applying_again_gives_the_same_view(block: int) -> None:
    history = full()
    view = viewed(history)
    view.rewind(block)
    assert all(event.block_number <= block for event in view._events)
    for event in history.events:
        if event.block_number > block:
            view.apply(event)
    assert state(view) == state(viewed(history))


@given(st.integers(0, 30))
def test_rewound_view_is_the_view_of_what_stands(block: int) -> None:
    history = full()
    view = viewed(history)
    view.rewind(block)
    standing = History([event for event in history.events if event.block_number <= block])
    assert state(view) == state(viewed(standing))


def test_other_branch_replaces_what_was_rewound() -> None:
    history = full()
    view = viewed(history)
    view.rewind(2)
    branch = History(history.events[:4], block=2, log_index=1)
    branch.add("StakeVault", "Deposited", owner=WORKER, amount=5, active=1005)
    view.apply(branch.events[-1])
    assert view.workers[WORKER].active_wei == 1005
    assert view.runs == {}


@given(st.integers(0, 2**32), st.integers(0, 100))
def test_view_takes_any_subset_in_any_order_without_raising(seed: int, share: int) -> None:
    """Even a reader that starts late or an endpoint that lies never stops a follower."""
    rng = random.Random(seed)
    events = [event for event in full().events if rng.randrange(100) < share]
    rng.shuffle(events)
    view, history = ChainView(), History()
    for event in events:
        view.apply(history.add(event.contract, event.name, **event.args))
    assert view.training_stream(RUN) is not None


def test_recent_blocks_are_those_with_events() -> None:
    history = full()
    blocks = viewed(history).recent_blocks()
    assert [b.number for b in blocks] == sorted({e.block_number for e in history.events})
    assert blocks[-1].hash == history.events[-1].block_hash


def test_recent_blocks_are_bounded() -> None:
    history = History()
    for i in range(300):
        history.add("StakeVault", "Deposited", owner=WORKER, amount=1, active=i + 1)
    blocks = viewed(history).recent_blocks()
    assert len(blocks) == 256
    assert blocks[-1].number == history.block


def test_empty_view_has_no_block() -> None:
    view = ChainView()
    assert (view.block_number, view.recent_blocks()) == (None, [])
    view.rewind(0)
    assert view.workers == {}


def test_offence_names_the_file_whatever_batch_it_is_in() -> None:
    assert RECORDS[1].leaf(1, 1) != RECORDS[1].leaf(2, 1)
    assert RECORDS[1].offence(RUN) == OFFENCE != RECORDS[1].offence(RunId(2))
