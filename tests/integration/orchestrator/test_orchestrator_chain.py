"""The orchestrator against a real chain: commitments, outcomes, fraud, and a lost database."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from orchestrator_network import (
    VALIDATORS,
    WORKERS,
    Network,
    Process,
    eventually,
    open_network,
    running,
)

from muster.api import OrchestratorApi
from muster.chain import ChainView, EventReader, SlashState, WorkerStatus, apply_poll
from muster.protocol.eip712 import address_of
from muster.protocol.errors import ApiError, ConfigError
from muster.protocol.messages import Reason, Submission, Verdict


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    async with open_network(tmp_path) as opened:
        yield opened


async def test_submission_is_committed_judged_and_recorded(network: Network) -> None:
    async with running(network) as url:
        submission = await network.upload(url, 0, b"rows")
        await network.judge(url, submission)
        await network.until(url, submission, "judged")
        view = ChainView()
        apply_poll(view, await EventReader(network.chain).poll())
        batch = view.batches[1]
        assert (batch.count, batch.posted_at is not None) == (1, True)
        (stored,) = await network.chain.read("ContributionLedger", "commitmentOf", [1])
        assert stored == batch.header().commitment()


async def test_fraud_bans_the_worker_and_is_finalised_after_the_window(network: Network) -> None:
    async with running(network) as url:
        submission = await network.upload(url, 1, b"forged rows")
        await network.judge(url, submission, Verdict.FRAUD, Reason.WRONG_SEED)

        async def is_banned() -> bool:
            member = await network.chain.workers.member_of(network.run_id, address_of(WORKERS[1]))
            return member.status is WorkerStatus.BANNED

        async def is_settled() -> bool:
            view = ChainView()
            apply_poll(view, await EventReader(network.chain).poll())
            return [slash.state for slash in view.slashes] == [SlashState.RELEASED]

        await eventually(is_banned)
        await eventually(is_settled)
        with pytest.raises(ApiError, match="banned"):
            await network.upload(url, 1, b"more")
        async with OrchestratorApi(url) as api:

            async def is_shown() -> bool:
                slashes = (await api.status()).slashes
                return [s.state for s in slashes] == ["released"]

            await eventually(is_shown)


async def test_run_goes_on_when_the_database_is_deleted_between_two_opinions(
    network: Network,
) -> None:
    async with running(network) as url:
        first = await network.upload(url, 0, b"one")
        await network.judge(url, first)
        await network.until(url, first, "judged")
        second = await network.upload(url, 1, b"two")
        await network.judge(url, second, validators=(0,))
    for file in network.folder.glob("orchestrator.sqlite3*"):
        file.unlink()
    async with running(network) as url:
        await network.judge(url, second, validators=(1,))
        await network.until(url, second, "judged")
        third = await network.upload(url, 0, b"three")
        assert third.step == 1
        assert third.index != first.index
        await network.judge(url, third)
        await network.until(url, third, "judged")
    assert await network.chain.ledger.batch_count() == 3


async def test_waiting_submissions_are_committed_once_when_killed_in_between(
    network: Network,
) -> None:
    async with running(network, commit_interval_s=3600.0) as url:
        first = await network.upload(url, 0, b"one")
        await network.until(url, first, "committed")
        second = await network.upload(url, 1, b"two")
    async with running(network) as url:
        await network.until(url, second, "committed")
        await network.judge(url, second)
        await network.until(url, second, "judged")
        await network.judge(url, first)
        await network.until(url, first, "judged")
    assert await network.chain.ledger.batch_count() == 2


async def test_start_is_refused_when_the_run_does_not_exist(network: Network) -> None:
    with pytest.raises(ConfigError, match="there is no run 9"):
        async with running(network, run=9):
            pass


async def test_every_submission_is_committed_once_when_the_process_is_killed_again_and_again(
    network: Network,
) -> None:
    process, submissions = Process(network), []
    for number in range(4):
        url = await process.start()
        submissions.append(await network.upload(url, number % 2, b"rows %d" % number))
        # The kill falls between the answer to the upload and the reading of the commitment.
        await asyncio.sleep(0.02 * number)
        await process.kill()
    for file in network.folder.glob("orchestrator.sqlite3*"):
        file.unlink()
    url = await process.start()
    for submission in submissions:
        await network.until(url, submission, "committed")
    await process.stop()
    view = ChainView()
    apply_poll(view, await EventReader(network.chain).poll())
    assert sum(batch.count for batch in view.batches.values()) == len(submissions)


@pytest.mark.slow
async def test_every_submission_is_judged_once_when_the_process_is_killed_at_random(
    tmp_path: Path,
) -> None:
    # So many restarts take longer than other tests' deadline on a busy machine.
    async with open_network(tmp_path, outcome_deadline_s=900) as network:
        await is_judged_once_whatever_is_killed(network)


async def is_judged_once_whatever_is_killed(network: Network) -> None:
    process, submissions, random = Process(network), [], Random(7)
    for number in range(5):
        url = await process.start()
        submissions.append(await network.upload(url, number % 2, b"rows %d" % number))
        # The kill falls between the answer to the upload and the reading of the outcomes.
        judging = asyncio.create_task(network.judge(url, submissions[-1]))
        await asyncio.sleep(random.uniform(0, 1.5))
        await process.kill()
        judging.cancel()
        await asyncio.gather(judging, return_exceptions=True)
    url = await process.start()
    for submission in submissions:
        await judge_in_the_end(network, url, submission)
    await process.stop()
    view = ChainView()
    apply_poll(view, await EventReader(network.chain).poll())
    recorded = Counter(r.file_hash for b in view.batches.values() for r in b.records or ())
    assert recorded == Counter(submission.file_hash for submission in submissions)
    assert view.contradictions == []


async def judge_in_the_end(network: Network, url: str, submission: Submission) -> None:
    """Judge a submission unless the outcomes handed in before the kill suffice."""
    while True:
        async with network.api(url, VALIDATORS[0]) as api:
            if (await api.submission_state(submission.file_hash)).state == "judged":
                return
        with contextlib.suppress(TimeoutError):
            # It may be judged at any moment, and is then no longer just committed.
            async with asyncio.timeout(10):
                await network.judge(url, submission)
