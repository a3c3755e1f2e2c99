"""The end of a run: its owner closes it, or its last version is handed over."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.lifecycle import ComputeThread
from muster.protocol.errors import ContractRevert
from muster.trainer.config import TrainerSettings
from muster.trainer.process import _hand_over, train

Body = Callable[[], Awaitable[None]]


class FakeTrainer:
    """Trains as a test says; records whether it was stopped."""

    version = 3

    def __init__(self, body: Body) -> None:
        self._body = body
        self.stopped = False

    async def run(self) -> None:
        try:
            await self._body()
        except asyncio.CancelledError:
            self.stopped = True
            raise


class FakeLedger:
    """A run that may be closed."""

    def __init__(self) -> None:
        self.is_closed = False
        self._event = asyncio.Event()

    async def changed(self) -> None:
        await self._event.wait()

    def close(self) -> None:
        self.is_closed = True
        self._event.set()


async def forever() -> None:
    await asyncio.Event().wait()


async def at_once() -> None:
    """Skip training."""


def refused(name: str) -> Body:
    async def publish() -> None:
        raise ContractRevert(name, (1,))

    return publish


def among_tasks(body: Body) -> Body:
    async def both() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forever())
            await body()

    return both


async def run(body: Body, ledger: FakeLedger | None = None) -> FakeTrainer:
    trainer: Any = FakeTrainer(body)
    async with asyncio.timeout(5):
        await train(trainer, ledger or FakeLedger())
    return trainer


async def test_a_trainer_that_made_its_steps_just_ends(caplog: pytest.LogCaptureFixture) -> None:
    assert not (await run(at_once)).stopped
    assert caplog.messages == []


async def test_a_trainer_that_waits_for_records_hears_of_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = FakeLedger()
    asyncio.get_running_loop().call_later(0.01, ledger.close)
    with caplog.at_level(logging.WARNING):
        assert (await run(forever, ledger)).stopped
    assert caplog.messages == ["the run was closed by its owner"]


@pytest.mark.parametrize("body", [refused("RunEnded"), among_tasks(refused("RunEnded"))])
async def test_a_version_that_a_closed_run_refuses_is_no_error(
    caplog: pytest.LogCaptureFixture, body: Body
) -> None:
    await run(body)
    assert caplog.messages == ["the run was closed by its owner"]


async def test_any_other_refusal_is_one() -> None:
    with pytest.raises(ContractRevert, match="RunVersionUnknown"):
        await run(refused("RunVersionUnknown"))
    with pytest.raises(ExceptionGroup) as raised:
        await run(among_tasks(refused("RunVersionUnknown")))
    assert raised.group_contains(ContractRevert, match="RunVersionUnknown")


async def test_a_stop_stops_the_training() -> None:
    trainer: Any = FakeTrainer(forever)
    serving = asyncio.ensure_future(train(trainer, FakeLedger()))
    await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.wait([serving])
    assert trainer.stopped


@pytest.mark.parametrize(("published", "last"), [(4, 4), (None, 3)])
async def test_other_ranks_end_before_the_last_version_is_handed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, published: int | None, last: int
) -> None:
    # A hand-over may take longer than a rank waits for a command.
    log: list[str] = []

    async def newest() -> int:
        return 3  # as a node tells that does not know version 4 yet

    async def run_info(_run: int) -> Any:
        await asyncio.sleep(0)
        log.append("handing over")
        return SimpleNamespace(relays=[])

    async def stand_by() -> None:
        log.append("standing by")
        await asyncio.Event().wait()

    roots: Any = SimpleNamespace(newest=newest)
    publisher: Any = SimpleNamespace(newest=published, stand_by=stand_by)
    api: Any = SimpleNamespace(run_info=run_info)
    team: Any = SimpleNamespace(dismiss=lambda: log.append("other ranks end"))
    settings = TrainerSettings(run=1, keystore=tmp_path, orchestrator="http://x")
    compute = ComputeThread()
    await _hand_over(settings, publisher, roots, api, team, compute)
    compute.close()
    assert log == ["other ranks end", "standing by", "handing over"]
    [said] = [r for r in caplog.records if "no relay mirrors" in r.getMessage()]
    assert vars(said)["policy_version"] == last
