"""A network whose parties compute on vLLM and on transformers: all of them agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from client_network import PARAMETERS, RECIPE, V0, WORKERS, Network, Run, open_network
from conformance_validator import PROOF, least_limits
from conftest import vllm_processes

from muster.client.connections import make_engine
from muster.protocol.ids import PolicyVersion
from muster.protocol.messages import Verdict

# Enough work for all workers, even if one of them is ready much earlier.
MANY = RECIPE.training.model_copy(update={"submissions_per_step": 1000})
WORK = RECIPE.model_copy(update={"proof": PROOF, "training": MANY})
V1, V2 = PolicyVersion(1), PolicyVersion(2)
# The quicker engine's work waits for the slower validator's verdict.
PATIENCE_S = 600.0
# vLLM starts slowly, and a killed one starts twice; batches wait for their validator.
PATIENT = PARAMETERS.model_copy(update={"outcome_deadline_s": 1800})


@pytest.fixture
async def network(tmp_path: Path, policies: list[Path]) -> AsyncIterator[Network]:
    def policy(_folder: Path, version: PolicyVersion) -> dict[str, Path]:
        return {path.name: path for path in policies[version % 2].iterdir()}

    limits = least_limits("float32")
    engines = limits.model.model_copy(update={"engine": "transformers:float32, vllm:float32"})
    calibration = limits.model_copy(update={"model": engines})
    run = Run(recipe=WORK, calibration=calibration, policy=policy)
    async with open_network(tmp_path, PATIENT, run) as opened:
        yield opened


class Parties:
    """Running workers and validators; the end of one of them ends the test."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def add(self, *mains: Any) -> None:
        self._tasks += [asyncio.ensure_future(main) for main in mains]

    async def stop_last(self) -> None:
        task = self._tasks.pop()
        task.cancel()
        await asyncio.wait([task])

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not await condition():
                for task in self._tasks:
                    if task.done():
                        await task
                # Each check of the condition reads the whole chain.
                await asyncio.sleep(0.5)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def running() -> AsyncIterator[Parties]:
    parties = Parties()
    try:
        yield parties
    finally:
        await parties.stop()


async def accepted(network: Network, number: int, version: PolicyVersion) -> int:
    view = await network.view()
    worker_id = view.workers[WORKERS[number].address].worker_id
    records = [record for batch in view.batches.values() for record in batch.records or ()]
    wanted = (worker_id, version, Verdict.ACCEPTED)
    return sum((r.worker_id, r.policy_version, r.verdict) == wanted for r in records)


async def test_workers_and_validators_on_both_engines_accept_each_others_work(
    network: Network,
) -> None:
    async def have(count: int, version: PolicyVersion, *workers: int) -> bool:
        return min([await accepted(network, i, version) for i in workers]) >= count

    before = vllm_processes()

    def own() -> list[psutil.Process]:
        return [process for process in vllm_processes() if process not in before]

    # A verdict needs both validators, so every accepted submission convinced both engines.
    async with running() as parties:
        parties.add(
            network.worker(0, make_engine=make_engine, engine="vllm"),
            network.validator(0, make_engine=make_engine, engine="vllm"),
            network.validator(1, make_engine=make_engine, engine="transformers"),
        )
        await parties.until(lambda: have(1, V0, 0))
        parties.add(network.worker(1, make_engine=make_engine, engine="transformers"))
        await parties.until(lambda: have(2, V0, 0, 1))
        first = own()
        assert len(first) == 2
        # Weights are swapped in place.
        await network.publish(V1)
        await parties.until(lambda: have(1, V1, 0, 1))
        assert own() == first
        # Killed processes are replaced; the other worker leaves some work for them.
        await parties.stop_last()
        for process in first:
            process.kill()
        await network.publish(V2)
        await parties.until(lambda: have(2, V2, 0))
        assert len(own()) == 2
        assert not set(own()) & set(first)
    view = await network.view()
    records = [record for batch in view.batches.values() for record in batch.records or ()]
    assert {record.verdict for record in records} == {Verdict.ACCEPTED}
    assert view.contradictions == []
