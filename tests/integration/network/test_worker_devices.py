"""A worker with two engines, in processes of their own, in a whole network with a real model."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from client_network import WORKERS, Network, Run, eventually, open_network, running
from one_submission import CALIBRATION, recipe

from muster.client.connections import make_engine
from muster.client.worker.context import WorkerContext
from muster.client.worker.loop import WorkerLoop
from muster.protocol.ids import PolicyVersion
from muster.protocol.messages import OutcomeRecord, Verdict
from muster.trainer.base_model import LESSONS, WarmStart, build_base_model

LESSON = LESSONS["sort"]
# Enough work for both engines, more than the trainer takes.
RECIPE = recipe(problems=2, samples=4, limit=12)
MANY = RECIPE.training.model_copy(update={"submissions_per_step": 1000})
RECIPE = RECIPE.model_copy(update={"training": MANY})
MODEL = CALIBRATION.model.model_copy(update={"engine": "transformers:float32"})
LIMITS = CALIBRATION.model_copy(update={"model": MODEL})
PATIENCE_S = 120.0


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    model = tmp_path / "model"
    threads = torch.get_num_threads()
    build_base_model(model, seed=0, lesson=LESSON, warm_start=WarmStart(steps=2, batch=8))

    def policy(_folder: Path, _version: PolicyVersion) -> dict[str, Path]:
        return {path.name: path for path in model.iterdir()}

    tasks, _ = LESSON.split(32, 4, 0)
    run = Run(recipe=RECIPE, calibration=LIMITS, task_set=tasks, policy=policy)
    async with open_network(tmp_path / "network", run=run) as opened:
        yield opened
    torch.set_num_threads(threads)


class Noted(WorkerLoop):
    """Records how many tickets all loops of a node hold at once."""

    made: list[Noted]
    most_tickets = 0

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        type(self).made.append(self)

    async def generate(self, ticket: Any) -> Any:
        mine = type(self)
        mine.most_tickets = max(mine.most_tickets, len(self.context.held.tickets))
        return await super().generate(ticket)


def fresh() -> type[Noted]:
    return type("FreshlyNoted", (Noted,), {"made": []})


async def records_of(network: Network, number: int) -> list[OutcomeRecord]:
    view = await network.view()
    worker_id = view.workers[WORKERS[number].address].worker_id
    records = [record for batch in view.batches.values() for record in batch.records or ()]
    return [record for record in records if record.worker_id == worker_id]


def engine_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "inference/vllm/child.py" in " ".join(child.cmdline())]


async def test_two_engines_work_side_by_side_and_one_that_is_killed_comes_back(
    network: Network,
) -> None:
    noted = fresh()
    worker = network.worker(
        0, noted, make_engine, devices="cpu,cpu", tickets_per_engine=2, context=128
    )
    judges = [network.validator(n, make_engine=make_engine) for n in (0, 1)]

    async def have(count: int) -> bool:
        return len(await records_of(network, 0)) >= count

    async with running(worker, *judges):
        await eventually(lambda: have(6), PATIENCE_S)
        # Tickets side by side are earned by the first that are accepted.
        assert len(noted.made) == 4
        assert noted.most_tickets >= 2
        stations = {each.station for each in noted.made}
        assert len(stations) == 2
        before = engine_processes()
        assert len(before) == 2
        os.kill(before[0].pid, signal.SIGKILL)
        done = len(await records_of(network, 0))
        await eventually(lambda: have(done + 4), PATIENCE_S)
    records = await records_of(network, 0)
    assert {record.verdict for record in records} == {Verdict.ACCEPTED}
    # Nothing was done twice.
    assert len({(record.step, record.index) for record in records}) == len(records)


async def test_an_engine_without_room_for_the_runs_samples_says_how_much_they_need(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    narrow = network.worker(0, WorkerLoop, make_engine, context=8)

    async def has_said() -> bool:
        said = [record.__dict__.get("error", "") for record in caplog.records]
        return any("exceed the 8 that this engine makes room for" in each for each in said)

    async with running(narrow, network.validator(0, make_engine=make_engine)):
        await eventually(has_said, PATIENCE_S)
    assert not await records_of(network, 0)
