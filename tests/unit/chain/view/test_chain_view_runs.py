import pytest
from chain_fakes import History, address
from chain_histories import (
    CONFIG,
    ORCHESTRATOR,
    OWNER,
    RECORDS,
    RUN,
    TRAINER,
    VALIDATORS,
    WORKER,
    begun,
    commit,
    create_run,
    full,
    post,
    publish,
    slash,
    viewed,
)
from hypothesis import given, strategies as st

from muster.chain import Offence, PauseCause, PauseView, RunTerms
from muster.chain.structs import SlashSubject
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion


def test_run_holds_its_configuration_and_money() -> None:
    run = viewed(full()).runs[RUN]
    assert (run.owner, run.config, run.validators) == (OWNER, CONFIG, list(VALIDATORS))
    assert (run.funded_wei, run.paid_wei, run.paused) == (5000, 1000, False)
    assert (run.available_wei, run.reserved_wei) == (2000, 2000)


def test_beacon_is_the_hash_of_the_publishing_block(history: History) -> None:
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
    create_run(history)
    assert viewed(history).runs[RUN].latest_version is None


def test_pause_is_followed(history: History) -> None:
    for paused in (True, False):
        history.add("SubmissionsPaused", run_id=RUN, paused=paused)
        assert viewed(history).runs[RUN].paused is paused


def pause(history: History, by: str = VALIDATORS[1], lasts: int = 5) -> None:
    history.add(
        "SlashingPaused",
        run_id=RUN,
        by=by,
        cause=1,
        reason=60,
        evidence_hash=keccak(b"evidence"),
        until=1001 + history.block + lasts,
    )


@pytest.mark.parametrize("by", [OWNER, ORCHESTRATOR, *VALIDATORS])
def test_pause_of_slashing_is_known_with_who_and_why(history: History, by: str) -> None:
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


def test_a_pause_that_nobody_may_call_is_a_contradiction(history: History) -> None:
    pause(history, WORKER)
    (problem,) = viewed(history).contradictions
    assert f"{WORKER} may not pause slashing" in problem


def test_a_pause_in_a_pause_is_a_contradiction(history: History) -> None:
    pause(history, lasts=10**6)
    pause(history)
    (problem,) = viewed(history).contradictions
    assert "slashing is paused until" in problem


def test_a_fraud_executed_in_a_pause_is_a_contradiction(history: History) -> None:
    post(history, 1, RECORDS)
    pause(history, lasts=10**6)
    slash(history)
    (problem,) = viewed(history).contradictions
    assert "FraudExecuted" in problem
    assert "slashing is paused until" in problem


def test_replaced_validator_keeps_its_seat_and_signs_no_more(history: History) -> None:
    history.add("ValidatorUnseated", run_id=RUN, validator=VALIDATORS[1])
    of_fourth = {"run_id": RUN, "validator": address(40)}
    history.add("ValidatorInvited", same_block=True, **of_fourth, invited=True)
    seated = {**of_fourth, "seat_bit": 8, "terms": 1}
    history.add("ValidatorSeated", same_block=True, **seated)
    post(history, 1, RECORDS)
    view = viewed(history)
    now = (VALIDATORS[0], VALIDATORS[2], address(40))
    assert (tuple(view.runs[RUN].validators), view.batches[1].validators) == (now, now)
    assert view.runs[RUN].seats == {VALIDATORS[0]: 1, VALIDATORS[1]: 2, VALIDATORS[2]: 4, now[2]: 8}
    assert view.contradictions == []


def test_whoever_was_invited_may_be_seated_until_the_owner_changes_its_mind() -> None:
    history, fourth = begun(), {"run_id": RUN, "validator": address(40)}
    history.add("ValidatorInvited", **fourth, invited=True)
    assert viewed(history).runs[RUN].invited == {*VALIDATORS, address(40)}
    history.add("ValidatorInvited", **fourth, invited=False)
    assert viewed(history).runs[RUN].invited == set(VALIDATORS)
    history.add("ValidatorSeated", **fourth, seat_bit=8, terms=1)
    (problem,) = viewed(history).contradictions
    assert "was not invited" in problem


def test_keys_and_terms_of_a_run_follow_its_events() -> None:
    history, terms = begun(), RunTerms(20, 1, 2, 3)
    trainer = {"old_trainer": TRAINER, "new_trainer": address(41)}
    history.add("TrainerRotated", run_id=RUN, **trainer)
    keys = {"old_orchestrator": ORCHESTRATOR, "new_orchestrator": address(42)}
    history.add("OrchestratorRotated", run_id=RUN, **keys)
    history.add("ChangeProposed", run_id=RUN, terms=terms, effective_at=99)
    assert viewed(history).runs[RUN].proposed == (terms, 99)
    history.add("ChangeApplied", run_id=RUN, number=2, terms=terms)
    history.add("RunClosed", run_id=RUN)
    view = viewed(history)
    run = view.runs[RUN]
    assert (run.config.trainer, run.config.orchestrator) == (address(41), address(42))
    assert (run.config.terms, run.proposed, run.closed_at > 0) == (terms, None, True)
    assert (run.terms, run.terms_number) == ([CONFIG.terms, terms], 2)
    assert view.contradictions == []


def test_batch_names_the_orchestrator_of_its_time(history: History) -> None:
    keys = {"old_orchestrator": ORCHESTRATOR, "new_orchestrator": address(42)}
    history.add("OrchestratorRotated", run_id=RUN, **keys)
    commit(history, 2, 3)
    batches = viewed(history).batches
    assert {n: batch.orchestrator for n, batch in batches.items()} == {
        1: ORCHESTRATOR,
        2: address(42),
    }


def test_announced_terms_may_be_withdrawn(history: History) -> None:
    terms = RunTerms(20, 1, 2, 3)
    history.add("ChangeProposed", run_id=RUN, terms=terms, effective_at=99)
    history.add("ChangeCancelled", run_id=RUN)
    assert viewed(history).runs[RUN].proposed is None


def test_owner_of_a_closed_run_takes_back_what_is_left() -> None:
    history = full()
    history.add("RewardRecovered", run_id=RUN, slots=2, amount=500)
    run = viewed(history).runs[RUN]
    assert (run.available_wei, run.reserved_wei) == (2500, 1500)
    history.add("RunReclaimed", run_id=RUN, owner=OWNER, amount=2500)
    run = viewed(history).runs[RUN]
    assert (run.available_wei, run.reserved_wei, run.reclaimed_wei) == (0, 1500, 2500)
    history.add("RunReclaimed", run_id=RUN, owner=OWNER, amount=1500)
    run = viewed(history).runs[RUN]
    assert (run.available_wei, run.reserved_wei, run.reclaimed_wei) == (0, 0, 4000)


def test_validators_offence_is_of_the_run_and_no_outcome() -> None:
    history, validator = begun(), VALIDATORS[0]
    stake = {"run_id": RUN, "owner": validator}
    history.add("Deposited", **stake, amount=10, active=10)
    wrong = SlashSubject(RUN, validator, Offence.WRONG_VERDICT, 1, 0, 0)
    taken = {"escrow_id": keccak(b"wrong"), "from_active": 1, "from_unbonding": 0}
    history.add("Slashed", **stake, verdict=wrong, **taken)
    (slashed,) = viewed(history).slashes
    assert (slashed.owner, slashed.offence) == (validator, Offence.WRONG_VERDICT)
    assert (slashed.tag, slashed.batch_id, slashed.position) == (1, None, None)
