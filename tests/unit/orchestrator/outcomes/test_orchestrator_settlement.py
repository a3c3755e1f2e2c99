from dataclasses import replace
from pathlib import Path

import pytest
from dashboard_stage import History
from orchestrator_bench import Bench, judged, open_bench
from orchestrator_fakes import ACCEPTED, FRAUD, RUN, Network, slash_of, slot_tag

from muster.chain import Offence, SlashState
from muster.chain.structs import SlashSubject
from muster.protocol.encoding import keccak
from muster.protocol.errors import ChainUnreachable, ContractRevert
from muster.protocol.ids import RunId
from muster.protocol.merkle import merkle_root, verify_merkle_proof
from muster.protocol.messages import Reason, Verdict


async def test_fraud_is_executed_with_a_proof_that_holds(bench: Bench) -> None:
    submissions = [await bench.upload(n, b"%d" % n) for n in range(3)]
    await bench.commit()
    await bench.judge(1, submissions, Verdict.FRAUD, Reason.WRONG_SEED)
    await bench.record()
    await bench.settle()
    records = bench.network.view.batches[1].records
    assert records is not None
    root = merkle_root([r.leaf(1, i) for i, r in enumerate(records)])
    executed = bench.network.chain.ledger.executed
    assert [(p.batch.batch_id, p.position) for p in executed] == [(1, 0), (1, 1), (1, 2)]
    for proof in executed:
        assert verify_merkle_proof(
            records[proof.position].leaf(1, proof.position), proof.proof, root
        )


@pytest.mark.parametrize("error", [ContractRevert("LedgerNotFraud"), ChainUnreachable("no answer")])
async def test_execution_is_tried_again_when_it_fails(bench: Bench, error: Exception) -> None:
    await judged(bench, Verdict.FRAUD)
    bench.network.chain.ledger.fail_next = error
    await bench.settle()
    assert bench.network.chain.ledger.executed == []
    await bench.settle()
    assert len(bench.network.chain.ledger.executed) == 1


def pause(bench: Bench, lasts: int) -> int:
    until = bench.network.chain.time + 1 + lasts
    bench.network.apply(
        "RunRegistry", "SlashingPaused",
        run_id=RUN, by=bench.services.projection.run.owner, cause=0, reason=60,
        evidence_hash=keccak(b"evidence"), until=until,
    )  # fmt: skip
    return until


async def test_escrow_waits_for_the_window_that_a_pause_prolonged(bench: Bench) -> None:
    await judged(bench, Verdict.FRAUD)
    await bench.settle()
    until = pause(bench, 10)
    window = await bench.network.chain.ledger.challenge_window()
    bench.set_chain_time(until + window - 1)
    await bench.settle()
    assert bench.network.chain.ledger.finalised == []
    bench.set_chain_time(until + window)
    await bench.settle()
    assert len(bench.network.chain.ledger.finalised) == 1


async def test_fraud_that_the_court_found_is_executed(bench: Bench) -> None:
    await judged(bench, Verdict.ACCEPTED)
    case = bench.network.open_case(1, 0, FRAUD)
    await bench.settle()
    assert bench.network.chain.ledger.executed == []
    bench.network.close_case(case, FRAUD)
    await bench.settle()
    assert len(bench.network.chain.ledger.executed) == 1


async def test_fraud_of_a_case_that_nobody_proved_is_not_executed(bench: Bench) -> None:
    await judged(bench, Verdict.ACCEPTED)
    leaf = bench.network.open_case(1, 0, FRAUD)
    case = bench.network.view.cases[leaf]
    (claim,) = case.claims
    other = replace(claim.submission, rollouts=claim.submission.rollouts + 1)
    case.claims[0] = replace(claim, submission=other)
    bench.network.close_case(leaf, FRAUD)
    await bench.settle()
    assert bench.network.chain.ledger.executed == []


@pytest.mark.parametrize(("late_s", "executed"), [(49, 1), (50, 0)])
async def test_fraud_that_was_proven_too_late_is_not_executed(
    bench: Bench, late_s: int, executed: int
) -> None:
    await judged(bench, Verdict.ACCEPTED)
    leaf = bench.network.open_case(1, 0, FRAUD)
    case = bench.network.view.cases[leaf]
    (claim,) = case.claims
    case.claims[0] = replace(claim, claimed_at=case.opened_at + late_s)
    bench.network.close_case(leaf, FRAUD)
    await bench.settle()
    assert len(bench.network.chain.ledger.executed) == executed


async def test_fraud_that_a_jury_finds_where_another_was_given_back_is_executed(
    bench: Bench,
) -> None:
    submission = await bench.upload()
    await bench.commit()
    await bench.judge(1, [submission], Verdict.FRAUD, Reason.TOPLOC_MISMATCH)
    await bench.record()
    await bench.settle()
    bench.network.close_case(bench.network.open_case(1, 0, FRAUD), FRAUD)
    await bench.settle()
    assert len(bench.network.chain.ledger.executed) == 2
    offences = [slash.offence for slash in bench.network.view.slashes]
    assert offences == [Offence.FRAUD, Offence.EXACT_FRAUD]
    assert {slash.tag for slash in bench.network.view.slashes} == {slot_tag(submission)}


async def test_escrow_is_not_released_while_a_case_is_open(bench: Bench) -> None:
    await judged(bench, Verdict.FRAUD)
    await bench.settle()
    case = bench.network.open_case(1, 0, ACCEPTED)
    bench.set_chain_time(bench.network.chain.time + 1000)
    await bench.settle()
    assert bench.network.chain.ledger.finalised == []
    bench.network.close_case(case, FRAUD)
    await bench.settle()
    await bench.settle()
    assert len(bench.network.chain.ledger.finalised) == 1


async def test_frauds_of_a_written_history_are_finalised(bench: Bench) -> None:
    """A stage that starts with a history settles it, as a process in service does."""
    history = History(bench.network, per_batch=1)
    history.register(20)
    history.work(600, steps=2)
    bench.services.projection.rebuild()
    assert bench.services.settlement.to_execute() == []
    slashes = len(bench.network.view.slashes)
    bench.set_chain_time(bench.network.chain.time + 1000)
    await bench.follow()
    await bench.settle()
    assert slashes > 0
    assert len(bench.network.chain.ledger.finalised) == slashes
    assert {slash.state for slash in bench.network.view.slashes} == {SlashState.RELEASED}


async def test_slashes_that_are_no_outcomes_are_left_alone(bench: Bench) -> None:
    worker = bench.network.worker(0).address
    double = SlashSubject(RUN, worker, Offence.DOUBLE_SUBMISSION, 1 << 32, 0, 0)
    bench.network.apply("StakeVault", "Slashed", **slash_of(double, 1))
    bench.set_chain_time(bench.network.chain.time + 1000)
    await bench.settle()
    assert bench.network.chain.ledger.finalised == []
    assert (await bench.services.status.build()).slashes[0].reason == "DOUBLE_SUBMISSION"


async def test_fraud_is_executed_although_another_run_slashed_for_the_same_slot(
    bench: Bench,
) -> None:
    submission = await judged(bench, Verdict.FRAUD)
    elsewhere = SlashSubject(
        RunId(2), submission.worker, Offence.EXACT_FRAUD, slot_tag(submission), 9, 0
    )
    bench.network.apply("StakeVault", "Slashed", **slash_of(elsewhere, 1))
    await bench.settle()
    assert len(bench.network.chain.ledger.executed) == 1
    assert [slash.run_id for slash in bench.services.projection.slashes] == [RUN]


async def test_fraud_of_a_slot_that_cost_stake_already_is_not_executed(bench: Bench) -> None:
    submission = await judged(bench, Verdict.FRAUD)
    before = SlashSubject(RUN, submission.worker, Offence.EXACT_FRAUD, slot_tag(submission), 9, 0)
    bench.network.apply("StakeVault", "Slashed", **slash_of(before, 1))
    await bench.settle()
    assert bench.network.chain.ledger.executed == []


VOID_FROM = 1000 + 100
"""Seconds from the commitment until outcomes are due, and until appeals end."""


async def unjudged(bench: Bench) -> int:
    await bench.upload()
    await bench.commit()
    return bench.network.view.batches[1].committed_at


async def test_batch_that_nobody_judged_becomes_void_after_the_time_for_appeals(
    bench: Bench,
) -> None:
    committed_at = await unjudged(bench)
    bench.set_chain_time(committed_at + VOID_FROM - 1)
    await bench.settle()
    assert bench.network.chain.ledger.voided == []
    bench.set_chain_time(committed_at + VOID_FROM)
    await bench.settle()
    await bench.settle()
    assert bench.network.chain.ledger.voided == [1]
    assert bench.services.projection.unsettled == []


async def test_batch_that_was_judged_never_becomes_void(bench: Bench) -> None:
    await judged(bench, Verdict.ACCEPTED)
    bench.set_chain_time(bench.network.view.batches[1].committed_at + 10 * VOID_FROM)
    await bench.settle()
    assert bench.network.chain.ledger.voided == []


async def test_batch_before_judges_of_the_network_is_void_only_once_they_saw_nothing(
    bench: Bench,
) -> None:
    committed_at = await unjudged(bench)
    case = bench.network.summon(1)
    bench.set_chain_time(committed_at + VOID_FROM)
    await bench.settle()
    assert bench.network.chain.ledger.voided == []
    bench.network.close_case(case)
    await bench.settle()
    assert bench.network.chain.ledger.voided == [1]


async def test_void_batch_is_not_committed_again_after_a_restart(tmp_path: Path) -> None:
    network = Network()
    async with open_bench(tmp_path, network) as bench:
        bench.set_chain_time(await unjudged(bench) + VOID_FROM)
        await bench.settle()
    async with open_bench(tmp_path, network) as bench:
        assert await bench.services.batching.next() is None
        assert len(network.chain.ledger.committed) == 1
