from __future__ import annotations

import pytest
from orchestrator_bench import Bench
from orchestrator_fakes import ACCEPTED, FRAUD, RUN, slash_of

from muster.chain import Offence
from muster.chain.structs import SlashSubject
from muster.protocol.encoding import keccak
from muster.protocol.errors import ChainUnreachable, ContractRevert
from muster.protocol.merkle import merkle_root, verify_merkle_proof
from muster.protocol.messages import Reason, Submission, Verdict


async def judged(bench: Bench, verdict: Verdict) -> Submission:
    submission = await bench.upload()
    await bench.commit()
    reason = Reason.NONE if verdict is Verdict.ACCEPTED else Reason.WRONG_SEED
    await bench.judge(1, [submission], verdict, reason)
    await bench.record()
    return submission


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


async def test_nothing_is_executed_when_nothing_is_fraud(bench: Bench) -> None:
    await judged(bench, Verdict.REJECTED)
    await bench.settle()
    assert bench.network.chain.ledger.executed == []


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


async def test_nothing_is_executed_in_a_pause_and_everything_after_it(bench: Bench) -> None:
    await judged(bench, Verdict.FRAUD)
    until = pause(bench, 10**6)
    await bench.settle()
    assert bench.network.chain.ledger.executed == []
    bench.set_chain_time(until)
    await bench.settle()
    assert len(bench.network.chain.ledger.executed) == 1


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


async def test_overturned_fraud_is_not_executed(bench: Bench) -> None:
    await judged(bench, Verdict.FRAUD)
    case = bench.network.open_case(1, 0, ACCEPTED)
    bench.network.close_case(case, ACCEPTED)
    await bench.settle()
    assert bench.network.chain.ledger.executed == []


async def test_fraud_that_the_court_found_is_executed(bench: Bench) -> None:
    await judged(bench, Verdict.ACCEPTED)
    case = bench.network.open_case(1, 0, FRAUD)
    await bench.settle()
    assert bench.network.chain.ledger.executed == []
    bench.network.close_case(case, FRAUD)
    await bench.settle()
    assert len(bench.network.chain.ledger.executed) == 1


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


async def test_slashes_that_are_no_outcomes_are_left_alone(bench: Bench) -> None:
    worker = bench.network.worker(0).address
    double = SlashSubject(RUN, worker, Offence.DOUBLE_SUBMISSION, 1 << 32, 0, 0)
    bench.network.apply("StakeVault", "Slashed", **slash_of(double, 1))
    bench.set_chain_time(bench.network.chain.time + 1000)
    await bench.settle()
    assert bench.network.chain.ledger.finalised == []
    assert (await bench.services.status.build()).slashes[0].reason == "DOUBLE_SUBMISSION"
