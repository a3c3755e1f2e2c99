import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import ACCEPTED, RUN, Network

from muster.chain import PauseCause
from muster.protocol.eip712 import address_of
from muster.protocol.encoding import hex0x, keccak
from muster.protocol.errors import ChainUnreachable, ContractRevert
from muster.protocol.messages import Reason, Submission, Verdict
from muster.protocol.recipe import BreakerRecipe

WINDOW_S = 500
LIMITS = BreakerRecipe(min_workers=3, window_s=WINDOW_S)
TOPLOC, SAMPLER = Reason.TOPLOC_MISMATCH, Reason.SAMPLER_MISMATCH


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path, Network(breaker=LIMITS)) as opened:
        yield opened


async def committed(bench: Bench, workers: int = 3, round_: int = 0) -> list[Submission]:
    submissions = [await bench.upload(n, b"%d %d" % (round_, n)) for n in range(workers)]
    await bench.commit()
    return submissions


async def judged(
    bench: Bench, *frauds: Reason, round_: int = 0, post: bool = True
) -> list[Submission]:
    """A batch of one submission from each of three workers; `frauds` are the first reasons."""
    submissions = await committed(bench, round_=round_)
    batch_id = max(bench.network.view.batches)
    records = []
    for place, submission in enumerate(submissions):
        reason = frauds[place] if place < len(frauds) else Reason.NONE
        verdict = Verdict.FRAUD if reason else Verdict.ACCEPTED
        records.append(bench.network.judge([submission], verdict, reason))
    joined = b"".join(records)
    root = bench.network.view.batches[batch_id].root
    for number in bench.order(batch_id)[:2]:
        async with bench.validator(number) as api:
            signature = bench.network.sign_outcomes(number, batch_id, root, joined)
            await api.post_outcomes(batch_id, joined, signature)
    if post:
        await bench.record()
    return submissions


def pauses(bench: Bench) -> list[tuple[PauseCause, int]]:
    return [(cause, reason) for cause, reason, _ in bench.network.chain.runs.pauses]


def executed(bench: Bench) -> list[tuple[int, int]]:
    return [(p.batch.batch_id, p.position) for p in bench.network.chain.ledger.executed]


def pass_time(bench: Bench, seconds: int) -> None:
    bench.set_chain_time(bench.network.chain.time + seconds)


async def test_many_that_fail_alike_pause_slashing_before_anybody_is_slashed(bench: Bench) -> None:
    await judged(bench, TOPLOC, TOPLOC, TOPLOC)
    await bench.settle()
    assert executed(bench) == []
    await bench.guard()
    assert pauses(bench) == [(PauseCause.CORRELATED_FAILURES, 60)]
    assert bench.services.projection.run.is_slashing_paused(bench.network.chain.time)
    await bench.settle()
    assert executed(bench) == []


async def test_what_was_handed_in_counts_before_it_is_posted(bench: Bench) -> None:
    await judged(bench, TOPLOC, TOPLOC, TOPLOC, post=False)
    await bench.guard()
    assert pauses(bench) == [(PauseCause.CORRELATED_FAILURES, 60)]


@pytest.mark.parametrize("frauds", [(TOPLOC, TOPLOC), (TOPLOC, SAMPLER, Reason.WRONG_SEED), ()])
async def test_few_or_different_failures_are_slashed_at_once(
    bench: Bench, frauds: tuple[Reason, ...]
) -> None:
    await judged(bench, *frauds)
    await bench.guard()
    await bench.settle()
    assert (pauses(bench), len(executed(bench))) == ([], len(frauds))


async def test_votes_of_accounts_without_a_seat_do_not_count(bench: Bench) -> None:
    await judged(bench, TOPLOC, TOPLOC, TOPLOC, post=False)
    keys = bench.network.keys.validators
    for validator in [address_of(keys[number]) for number in bench.order(1)[:2]]:
        bench.network.apply("RunRegistry", "ValidatorUnseated", run_id=RUN, validator=validator)
    await bench.guard()
    assert pauses(bench) == []


async def test_evidence_is_what_the_chain_has_the_hash_of_and_anybody_gets_it(bench: Bench) -> None:
    submissions = await judged(bench, TOPLOC, TOPLOC, TOPLOC)
    await bench.guard()
    (found,) = bench.services.projection.run.pauses
    async with bench.http() as client:
        answer = await client.get(f"/v1/documents/{hex0x(found.evidence_hash)}")
    assert keccak(answer.content) == found.evidence_hash
    said = json.loads(answer.content)
    assert (said["check"], said["reason"], said["share_ppm"]) == (6, "TOPLOC_MISMATCH", 10**6)
    assert said["workers_failing"] == [1, 2, 3]
    assert {row[3] for row in said["frauds_posted"]} == {
        hex0x(each.file_hash) for each in submissions
    }


async def test_pause_is_called_once_and_again_only_for_new_failures(bench: Bench) -> None:
    await judged(bench, TOPLOC, TOPLOC, TOPLOC)
    for _ in range(3):
        await bench.guard()
    pass_time(bench, 31)
    await bench.guard()
    pass_time(bench, 250)
    await bench.guard()
    assert len(pauses(bench)) == 1
    await judged(bench, TOPLOC, TOPLOC, TOPLOC, round_=1)
    await bench.guard()
    assert len(pauses(bench)) == 2


@pytest.mark.parametrize(
    "error", [ContractRevert("RunPauseTooSoon"), ChainUnreachable("no answer")]
)
async def test_pause_is_tried_again_when_it_fails_and_nothing_is_executed(
    bench: Bench, error: Exception
) -> None:
    await judged(bench, TOPLOC, TOPLOC, TOPLOC)
    bench.network.chain.ledger.fail_next = error
    await bench.guard()
    assert pauses(bench) == []
    await bench.settle()
    assert executed(bench) == []
    await bench.guard()
    assert len(pauses(bench)) == 1


async def test_doubtful_frauds_wait_for_the_prolonged_window_then_are_slashed(bench: Bench) -> None:
    await judged(bench, TOPLOC, TOPLOC, TOPLOC)
    await bench.guard()
    until = bench.services.projection.run.slashing_paused_until
    window = await bench.network.chain.ledger.challenge_window()
    bench.set_chain_time(until + window - 1)
    await bench.settle()
    assert executed(bench) == []
    bench.set_chain_time(until + window)
    await bench.settle()
    assert executed(bench) == [(1, 0), (1, 1), (1, 2)]


async def test_frauds_of_another_check_are_slashed_when_the_pause_is_over(bench: Bench) -> None:
    await judged(bench, Reason.WRONG_SEED)
    bench.network.apply(
        "RunRegistry", "SlashingPaused",
        run_id=RUN, by=bench.network.view.runs[RUN].validators[0], cause=1, reason=60,
        evidence_hash=keccak(b"it fails its own"), until=bench.network.chain.time + 40,
    )  # fmt: skip
    await bench.settle()
    assert executed(bench) == []
    pass_time(bench, 41)
    await bench.settle()
    assert executed(bench) == [(1, 0)]


async def test_stake_on_its_way_out_is_slashed_as_soon_as_the_chain_allows(bench: Bench) -> None:
    await judged(bench, TOPLOC, TOPLOC, TOPLOC)
    await bench.guard()
    cheater = bench.network.worker(1)
    bench.network.apply(
        "StakeVault", "UnbondRequested",
        run_id=RUN, owner=cheater.address, amount=1, unbonding=1, withdrawable_at=1 << 40,
    )  # fmt: skip
    await bench.settle()
    assert executed(bench) == []
    bench.set_chain_time(bench.services.projection.run.slashing_paused_until)
    await bench.settle()
    assert executed(bench) == [(1, 1)]


async def test_overturned_frauds_are_never_slashed_and_no_failures_any_more(bench: Bench) -> None:
    await judged(bench, TOPLOC, TOPLOC, TOPLOC)
    await bench.guard()
    for place in (0, 1):
        bench.network.close_case(bench.network.open_case(1, place, ACCEPTED), ACCEPTED)
    pass_time(bench, 1000)
    await bench.settle()
    assert executed(bench) == [(1, 2)]


async def test_failures_leave_the_window(bench: Bench) -> None:
    await judged(bench, TOPLOC, TOPLOC, TOPLOC)
    assert await bench.services.breaker.look() is not None
    pass_time(bench, WINDOW_S + 1)
    assert await bench.services.breaker.look() is None


async def test_proven_workers_outweigh_a_crowd_of_newcomers(tmp_path: Path) -> None:
    limits = LIMITS.model_copy(update={"min_workers": 2, "proven_after": 1})
    async with open_bench(tmp_path, Network(breaker=limits)) as bench:
        # Only the third worker has earned anything before the window; then the two others fail.
        submission = await bench.upload(2, b"early")
        await bench.commit()
        await bench.judge(1, [submission])
        await bench.record()
        pass_time(bench, WINDOW_S + 1)
        await judged(bench, TOPLOC, TOPLOC, round_=1)
        assert await bench.services.breaker.look() is None


async def test_status_page_and_metrics_show_the_pause(bench: Bench) -> None:
    await judged(bench, TOPLOC, TOPLOC, TOPLOC)
    assert (await bench.services.status.build()).slashing_paused_until is None
    await bench.guard()
    status = await bench.services.status.build()
    assert status.slashing_paused_until == bench.services.projection.run.slashing_paused_until
    assert status.slashing_paused_for == "CorrelatedFailures: toploc_mismatch"
    async with bench.http() as client:
        page, metrics = (await client.get("/")).text, (await client.get("/metrics")).text
    assert "Slashing is paused" in page
    assert bench.services.projection.run.pauses[0].tx_hash in page
    assert "muster_orchestrator_correlated_failure 6.0" in metrics
    assert "muster_orchestrator_slashing_paused_seconds 0.0" not in metrics
