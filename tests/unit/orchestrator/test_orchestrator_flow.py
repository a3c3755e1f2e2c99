"""One rollout through the orchestrator's own steps, over HTTP, with a fake chain."""

from __future__ import annotations

from orchestrator_bench import Bench

from muster.protocol.messages import Reason, Verdict


async def test_rollout_is_leased_committed_judged_when_all_are_honest(bench: Bench) -> None:
    submission = await bench.upload()
    await bench.commit()
    async with bench.validator(0) as first, bench.validator(1) as second:
        (batch_id,) = await first.committed_batches()
        batch = await first.batch(batch_id)
        assert [e.submission for e in batch.submissions] == [submission]
        assert await first.file(submission.file_hash) == b"a file"
        records = bench.network.judge(batch_id, batch.root, [submission])
        for number, api in enumerate((first, second)):
            signature = bench.network.sign_outcomes(number, batch_id, batch.root, records)
            await api.post_outcomes(batch_id, records, signature)
        await bench.record()
        state = await first.submission_state(submission.file_hash)
    assert (state.state, state.verdict, state.reason) == ("judged", Verdict.ACCEPTED, Reason.NONE)
