"""One rollout through the orchestrator's own steps, over HTTP, with a fake chain."""

from orchestrator_bench import Bench

from muster.chain import WorkerStatus
from muster.protocol.messages import Reason, Verdict


async def test_rollout_is_leased_committed_judged_when_all_are_honest(bench: Bench) -> None:
    submission = await bench.upload()
    await bench.commit()
    async with bench.validator() as api:
        (batch_id,) = await api.called()
        batch = await api.batch(batch_id)
        assert [e.submission for e in batch.submissions] == [submission]
        assert await api.file(submission.file_hash) == b"a file"
        await bench.judge(batch_id, [submission])
        await bench.record()
        state = await api.submission_state(submission.file_hash)
        assert await api.called() == {}
    assert (state.state, state.verdict, state.reason) == ("judged", Verdict.ACCEPTED, Reason.NONE)


async def test_fraud_is_executed_and_finalised_when_the_window_is_over(bench: Bench) -> None:
    submission = await bench.upload()
    await bench.commit()
    await bench.judge(1, [submission], Verdict.FRAUD, Reason.WRONG_SEED)
    await bench.record()
    await bench.settle()
    assert bench.network.worker(0).status is WorkerStatus.BANNED
    await bench.settle()
    assert len(bench.network.chain.ledger.executed) == 1
    assert bench.network.chain.ledger.finalised == []
    bench.set_chain_time(bench.network.chain.time + 100)
    await bench.settle()
    await bench.settle()
    assert len(bench.network.chain.ledger.finalised) == 1
