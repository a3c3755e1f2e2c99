"""The state that outlives a trainer in a test, and a trainer that dies at a chosen moment."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_fakes import KEY, FakeRoots, FakeSink, Feed, make_recipe, no_sleep

from muster.lifecycle import ComputeThread
from muster.protocol.eip712 import Domain
from muster.protocol.ids import Address, PolicyVersion, RunId
from muster.protocol.recipe import Recipe
from muster.shardcast import ChunkStore
from muster.trainer.learn.learner import Learner
from muster.trainer.loop import Parts, Trainer
from muster.trainer.measure.figures import UNREPEATABLE
from muster.trainer.measure.metrics import MetricsLog, MetricsPoster
from muster.trainer.publish.policies import BASE, PolicyShelf
from muster.trainer.publish.publisher import Publisher
from muster.trainer.recover.checkpoint import Checkpoints, Identity
from muster.trainer.stream.reader import FileBuffer, StreamReader

RUN = RunId(1)


class Killed(BaseException):
    """Ends a trainer like kill -9: nothing may catch it."""


class World:
    """The state that outlives a trainer: chain, files and disk."""

    def __init__(self, folder: Path, model: Path, recipe: Recipe | None = None) -> None:
        self.folder = folder
        self.model = model
        self.recipe = recipe or make_recipe()
        self.feed = Feed()
        self.policy_roots = FakeRoots()
        self.sink = FakeSink()
        self.store = ChunkStore(folder / "store")

    def parts(self, **changes: Any) -> Parts:
        """Return the parts of a trainer that starts now."""
        shelf = PolicyShelf(self.folder / "policies")
        if not shelf.has(BASE):
            shelf.adopt(self.model)
        buffer = FileBuffer(self.folder / "files", self.feed.files, self.feed.ledger)
        values: dict[str, Any] = {
            "recipe": self.recipe,
            "stream": StreamReader(
                self.feed.ledger, buffer, self.recipe, vocab_size=16, sleep=no_sleep
            ),
            "learner": Learner(shelf.path(BASE), self.recipe, published=shelf.weights),
            "shelf": shelf,
            "checkpoints": Checkpoints(
                self.folder / "checkpoints", Identity(RUN, self.recipe.hash(), 31337)
            ),
            "buffer": buffer,
            "publisher": Publisher(
                self.store,
                self.policy_roots,
                run_id=RUN,
                domain=Domain(31337, Address("0x" + "22" * 20)),
                key=KEY,
                sleep=no_sleep,
            ),
            "log": MetricsLog(self.folder / "metrics.jsonl"),
            "poster": MetricsPoster(self.sink),
            "compute": ComputeThread(),
        }
        return Parts(**{**values, **changes})

    async def train(self, steps: int, **changes: Any) -> Parts:
        """Run one trainer to the end of its steps."""
        parts = self.parts(**changes)
        try:
            async with asyncio.timeout(30):
                await Trainer(parts, steps=steps).run()
        finally:
            parts.compute.close()
            parts.checkpoints.close()
        return parts

    def lines(self) -> list[dict[str, Any]]:
        """Return the metrics written so far."""
        text = (self.folder / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def weights(self, version: int) -> torch.Tensor:
        """Return a published version's weights, flat."""
        shelf = PolicyShelf(self.folder / "policies")
        return torch.cat([w.flatten() for w in shelf.weights(PolicyVersion(version)).values()])


def dying(parts: Parts, moment: str, count: int) -> Parts:
    """Make a part kill the trainer at its `count`-th use, before or after it did its work."""
    name, when = moment.split(" ")
    owner, method = {
        "learn": (parts.learner, "step"),
        "write": (parts.shelf, "_write"),
        "stage": (parts.checkpoints, "save"),
        "complete": (parts.checkpoints, "_finish"),
        "log": (parts.log, "append"),
        "publish": (parts.publisher, "_store_chunks"),
        "anchor": (parts.publisher._roots, "publish"),
    }[name]
    setattr(owner, method, _killing(getattr(owner, method), when, count))
    return parts


def _killing(function: Callable[..., Any], when: str, count: int) -> Callable[..., Any]:
    uses = 0

    def is_time() -> bool:
        nonlocal uses
        uses += 1
        return uses == count

    if asyncio.iscoroutinefunction(function):

        async def asynchronous(*args: Any) -> Any:
            dies = is_time()
            if dies and when == "before":
                raise Killed
            result = await function(*args)
            if dies:
                raise Killed
            return result

        return asynchronous

    def synchronous(*args: Any, **options: Any) -> Any:
        dies = is_time()
        if dies and when == "before":
            raise Killed
        result = function(*args, **options)
        if dies:
            raise Killed
        return result

    return synchronous


async def die(parts: Parts, *, steps: int) -> None:
    """Run a trainer until it is killed."""
    try:
        await Trainer(parts, steps=steps).run()
    except BaseExceptionGroup as group:
        assert group.subgroup(Killed)  # noqa: PT017
    except Killed:
        pass
    else:
        pytest.fail("the trainer was not killed")
    finally:
        # Threads that still compute or write would not outlive a process.
        await asyncio.to_thread(parts.compute._executor.shutdown, cancel_futures=True)
        await asyncio.to_thread(parts.checkpoints.close)


def without_time(world: World) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in UNREPEATABLE} for line in world.lines()]
