"""The background tasks: waking, resting, surviving outages."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from orchestrator_bench import Bench, open_bench
from orchestrator_fakes import FakeLedger, Network

from muster.chain import Poll
from muster.orchestrator.db.sqlite import SqliteDatabase
from muster.orchestrator.http.feed import Notice
from muster.orchestrator.intake.blobs import LocalBlobs
from muster.orchestrator.loop import announce, commit, follow, record, run, settle, write
from muster.orchestrator.services import Services
from muster.protocol.errors import ChainError, ChainUnreachable, RpcError, StorageFailed
from muster.protocol.messages import Reason, Verdict
from muster.protocol.recipe import TrainingRecipe


async def until(condition: Callable[[], bool], task: Awaitable[None]) -> None:
    """Run a background task until a condition is true."""
    running = asyncio.ensure_future(task)
    async with asyncio.timeout(10):
        while not condition():
            assert not running.done()
            await asyncio.sleep(0.005)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


class Flaky:
    """A reader that fails a few times first."""

    def __init__(self, bench: Bench, *failures: ChainError) -> None:
        self._bench = bench
        self._failures = list(failures)

    async def poll(self) -> Poll:
        if self._failures:
            raise self._failures.pop(0)
        return await self._bench.network.chain.poll()


@pytest.mark.parametrize("error", [ChainUnreachable("gone"), RpcError("busy", code=-32005)])
async def test_following_lives_through_an_outage(
    bench: Bench, error: ChainError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.orchestrator.loop.RETRY_S", 0.001)
    await bench.upload()
    composition = await bench.services.batching.next()
    assert composition is not None
    await bench.services.batching.commit(composition)
    task = follow(bench.services, Flaky(bench, error, error))
    await until(lambda: bool(bench.network.view.batches), task)


def failing_twice(method: Callable[..., Awaitable[Any]], error: Exception) -> Any:
    failures = [error, error]

    async def call(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return await method(*arguments)

    return call


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [
        (LocalBlobs, "put", OSError(errno.ENOSPC, "No space left on device")),
        (SqliteDatabase, "ask", StorageFailed("the database's disk is full")),
        (FakeLedger, "commit_batch", StorageFailed("the journal's disk is full")),
    ],
)
@pytest.mark.sqlite_only
async def test_commitment_lives_through_a_full_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, error: Exception
) -> None:
    monkeypatch.setattr("muster.orchestrator.loop.RETRY_S", 0.001)
    await bench.upload()
    monkeypatch.setattr(owner, method, failing_twice(getattr(owner, method), error))
    await until(lambda: bool(bench.network.chain.ledger.committed), write(bench.services))


async def test_submission_is_committed_when_it_arrives_not_at_the_next_tick(bench: Bench) -> None:
    async def scenario(services: Services) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(commit(services))
            await asyncio.sleep(0.02)
            await bench.upload()
            await asyncio.Event().wait()

    started = asyncio.get_running_loop().time()
    ledger = bench.network.chain.ledger
    await until(lambda: bool(ledger.committed), scenario(bench.services))
    assert asyncio.get_running_loop().time() - started < 0.9


async def test_batches_keep_their_distance(tmp_path: Path) -> None:
    wide = Network(training=TrainingRecipe(submissions_per_step=100))
    async with open_bench(tmp_path, wide, batch_limit=1, commit_interval_s=0.1) as bench:
        for number in range(3):
            await bench.upload(number, b"%d" % number)

        async def scenario() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(commit(bench.services))
                tasks.create_task(follow(bench.services, bench.network.chain))

        started = asyncio.get_running_loop().time()
        ledger = bench.network.chain.ledger
        await until(lambda: len(ledger.committed) == 3, scenario())
        assert asyncio.get_running_loop().time() - started >= 0.2


async def test_outcomes_are_posted_and_fraud_executed_without_a_tick(bench: Bench) -> None:
    submission = await bench.upload()
    await bench.commit()

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(record(bench.services))
            tasks.create_task(settle(bench.services))
            tasks.create_task(follow(bench.services, bench.network.chain))
            await asyncio.sleep(0.02)
            await bench.judge(1, [submission], Verdict.FRAUD, Reason.WRONG_SEED)
            await asyncio.Event().wait()

    started = asyncio.get_running_loop().time()
    ledger = bench.network.chain.ledger
    await until(lambda: bool(ledger.executed), scenario())
    assert asyncio.get_running_loop().time() - started < 0.9
    assert len(ledger.posted) == 1


async def test_status_is_built_only_when_somebody_listens(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("muster.orchestrator.loop.STATUS_INTERVAL_S", 0.001)
    monkeypatch.setattr("muster.orchestrator.loop.IDLE_S", 0.001)
    stream = bench.services.feed.listen("first")
    received: list[Notice | None] = []

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(announce(bench.services))
            await asyncio.sleep(0.02)
            assert bench.services.feed._latest == ""
            received.append(await anext(stream))
            received.append(await anext(stream))
            await asyncio.Event().wait()

    await until(lambda: len(received) == 2, scenario())
    await stream.aclose()
    assert received[1] is not None
    assert '"run_id":1' in received[1].status


async def test_everything_ends_when_one_task_fails(bench: Bench) -> None:
    class Broken:
        async def poll(self) -> Poll:
            raise RuntimeError("a bug")

    with pytest.raises(ExceptionGroup) as caught:
        await run(bench.services, Broken())
    assert [str(error) for error in caught.value.exceptions] == ["a bug"]
