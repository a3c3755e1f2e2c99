"""Files are deleted when nobody can need them, and not before."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from orchestrator_bench import Bench, judged, open_bench
from orchestrator_fakes import ACCEPTED

from muster.protocol.eip712 import address_of
from muster.protocol.messages import Submission, Verdict

KEEP_S = 1000
CHALLENGER = address_of(b"\x07" * 32)


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path, retention_s=KEEP_S) as opened:
        yield opened


async def wait_until_final(bench: Bench, *, less_s: int = 0) -> None:
    window_s = await bench.network.chain.ledger.challenge_window()
    posted_at = bench.network.view.batches[1].posted_at
    assert posted_at is not None
    bench.set_chain_time(posted_at + window_s + KEEP_S - less_s)


async def collect(bench: Bench) -> int:
    assert bench.services.retention is not None
    return await bench.services.retention.collect()


def outdate(bench: Bench) -> None:
    """Publish so many versions that work of version 0 is no longer trained on."""
    for version in range(1, 5):
        bench.network.publish(version)


async def is_there(bench: Bench, submission: Submission) -> bool:
    return await bench.services.files.find(submission.file_hash) is not None


async def test_file_goes_once_and_its_outcome_stays_known(kept: Bench) -> None:
    submission = await judged(kept, Verdict.REJECTED)
    await wait_until_final(kept, less_s=1)
    assert await collect(kept) == 0
    assert await is_there(kept, submission)
    await wait_until_final(kept)
    assert [await collect(kept), await collect(kept)] == [1, 0]
    assert not await is_there(kept, submission)
    async with kept.api() as api:
        assert (await api.submission_state(submission.file_hash)).state == "judged"


async def test_accepted_file_stays_while_a_step_may_train_on_it(kept: Bench) -> None:
    submission = await judged(kept, Verdict.ACCEPTED)
    await wait_until_final(kept)
    assert await collect(kept) == 0
    assert await is_there(kept, submission)
    outdate(kept)
    assert await collect(kept) == 1


async def test_file_without_an_outcome_stays(kept: Bench) -> None:
    submission = await kept.upload()
    await kept.commit()
    outdate(kept)
    kept.set_chain_time(kept.network.chain.time + 100 * KEEP_S)
    assert await collect(kept) == 0
    assert await is_there(kept, submission)


async def test_evidence_stays_while_its_case_is_open(kept: Bench) -> None:
    await judged(kept, Verdict.REJECTED)
    case = kept.network.open_case(1, 0, ACCEPTED)
    await wait_until_final(kept)
    assert await collect(kept) == 0
    kept.network.close_case(case)
    assert await collect(kept) == 1


async def test_evidence_of_fraud_stays_while_its_slash_is_in_escrow(kept: Bench) -> None:
    submission = await judged(kept, Verdict.FRAUD)
    await kept.settle()
    await wait_until_final(kept)
    assert await collect(kept) == 0
    assert await is_there(kept, submission)
    # The window is over: now it is finalised, and then its file may be deleted.
    await kept.settle()
    assert await collect(kept) == 1


async def test_everything_is_kept_unless_told_otherwise(bench: Bench) -> None:
    assert bench.services.retention is None


async def voided(bench: Bench, *, less_s: int = 0) -> int:
    """Let the appeal of batch 1 pass, and void it; returns when files may be deleted."""
    ledger = bench.network.chain.ledger
    batch = bench.network.view.batches[1]
    over_at = batch.due_at(await ledger.outcome_deadline()) + await ledger.appeal_time()
    bench.set_chain_time(over_at)
    await bench.settle()
    assert ledger.voided == [1]
    assert batch.is_void
    bench.set_chain_time(over_at + KEEP_S - less_s)
    return over_at + KEEP_S


async def test_file_of_a_void_batch_goes_when_nobody_can_call_judges_any_more(kept: Bench) -> None:
    submission = await kept.upload()
    await kept.commit()
    may_go_at = await voided(kept, less_s=1)
    assert await collect(kept) == 0
    assert await is_there(kept, submission)
    kept.set_chain_time(may_go_at)
    assert [await collect(kept), await collect(kept)] == [1, 0]
    assert not await is_there(kept, submission)


async def test_file_that_waits_for_judges_stays_though_its_first_batch_is_void(kept: Bench) -> None:
    submission = await kept.upload()
    await kept.commit()
    ledger, batch = kept.network.chain.ledger, kept.network.view.batches[1]
    kept.set_chain_time(batch.due_at(await ledger.outcome_deadline()))
    other = ledger.split_off(batch, kept.network.work(submission))
    await kept.follow()
    kept.network.summon(other)
    await voided(kept)
    kept.set_chain_time(kept.network.chain.time + 100 * KEEP_S)
    assert await collect(kept) == 0
    assert await is_there(kept, submission)
