"""The trainer's flow: a training step, top to bottom.

One rollout, from task to payment (docs/architecture.md):

  >  1. publish     the trainer cuts the policy into chunks and anchors its root on chain   _publish
     2. broadcast   the origin serves the chunks (this process, process.py), relays mirror them
     3. fetch       a worker pulls and verifies them
     4. lease       the worker gets a signed ticket
     5. generate    it samples and commits to its hidden states
     6. submit      its file is taken in; a batch's root goes on chain
     7. validate    validators check the files and sign outcomes
     8. record      a quorum's outcomes are posted
  >  9. train       the trainer consumes what was accepted                          _training_step
    10. settle      fraud is executed, and finalised after its window
    11. dispute     a jury decides about a challenged verdict
    12. audit       anyone rebuilds all of it from the chain

Step s reads the next accepted records of the training stream, turns verified rewards into
advantages, takes the GRPO steps against the policies that sampled, and makes policy version s.
Weights, optimiser, generators and cursor are one checkpoint, complete before version s is
published (its chunks stored, then its root anchored on chain), so:

    killed before it is complete  the step is taken again from the same records: the same version s
    killed before it is anchored  version s is published at the next start, from its folder; so is
                                  version s - 1 if it was still on its way
    killed after it is anchored   the chain has it already, with the same root: nothing to do
    reorganisation removed it     the version is anchored again
    newest checkpoint damaged     the step is taken again from the one before, also when the chain
                                  has version s already: it is made again, with the same root. On
                                  a GPU or with sites, where it would have another root, training
                                  goes on from the published version s

While version s is written and on its way to the chain, the next step is already read, and its
gradient computed; its first optimiser step waits until the tensors of version s are written, its
checkpoint until that of version s is complete.

A version whose weights or logits are not finite is neither saved nor published
(`muster.trainer.recover.collapse`).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from muster.lifecycle import ComputeThread
from muster.protocol.errors import EngineError, NotYet, StorageError
from muster.protocol.ids import PolicyVersion, Step
from muster.protocol.recipe import Recipe
from muster.trainer.learn.learner import Learner
from muster.trainer.measure.evaluate import Evaluator
from muster.trainer.measure.figures import (
    HELD_UP,
    OF_SPEED,
    Durations,
    StepFigures,
    evaluation_entry,
    flat,
    step_entry,
)
from muster.trainer.measure.metrics import Export, MetricsLog, MetricsPoster
from muster.trainer.publish.policies import BASE, PolicyShelf
from muster.trainer.publish.publisher import Publisher, Unpublished
from muster.trainer.recover.checkpoint import Checkpoints, Saved, TrainerState
from muster.trainer.recover.collapse import Guard, require_finite
from muster.trainer.sites.site_learner import SiteLearner
from muster.trainer.stream.filters import DifficultyPools, has_preference, named
from muster.trainer.stream.listing import Lists
from muster.trainer.stream.reader import Cursor, FileBuffer, StepInput, StreamReader

logger = logging.getLogger(__name__)

POST_GRACE_S = 2.0
"""Seconds that the last figures may take to reach the orchestrator when the run is over."""


SAVED: Future[None] = Future()
"""A future that is already done, for when there is nothing to save."""
SAVED.set_result(None)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that the flow works with; it owns none of them."""

    recipe: Recipe
    stream: StreamReader
    """Reader of the accepted records."""
    learner: Learner | SiteLearner
    """The policy in training; with several sites, in step with theirs."""
    shelf: PolicyShelf
    """Policy versions on disk, published or not yet, among them always the base model."""
    checkpoints: Checkpoints
    """State that survives the process."""
    buffer: FileBuffer
    """Accepted files that a later step may still read."""
    publisher: Publisher | Unpublished
    """Brings versions to workers and chain; does nothing at a site for which another publishes."""
    log: MetricsLog
    """Figures on disk."""
    poster: MetricsPoster
    """Figures on their way to the orchestrator."""
    compute: ComputeThread
    """Thread that computes tensors."""
    lists: Lists = field(default_factory=Lists)
    """Makes the list of set-aside problems of each version."""
    require_room: Callable[[list[int]], None] = lambda _: None
    """Raises MemoryShort when samples of these lengths, in tokens, do not fit into the memory."""
    guard: Guard = field(default_factory=Guard)
    """Decides what follows from alarms."""
    evaluator: Evaluator | None = None
    """Measures policies on held-out problems, if there are any."""
    exports: Sequence[Export] = ()
    """Functions that are called with all figures."""
    eval_every: int = 0
    """Also evaluate every N steps; 0 for the first and the last only."""
    peak_flops: float = 0.0
    """Peak operations per second of all ranks together; 0 when unknown."""
    clock: Callable[[], float] = time.monotonic
    """Clock for durations."""


class _Made(NamedTuple):
    """A version, the range of the stream that its step consumed, and its checkpoint's future."""

    version: PolicyVersion
    stream_from: int
    stream_to: int
    saved: Future[None] = SAVED


def _lengths(taken: StepInput) -> list[int]:
    """Return the tokens of each sample that a step may compute."""
    groups = [group for group in taken.groups if has_preference(group)]
    return [len(r.prompt_tokens) + len(r.completion_tokens) for group in groups for r in group]


class Trainer:
    """Trains one run up to policy version `steps` (0: until cancelled)."""

    def __init__(self, parts: Parts, *, steps: int) -> None:
        self._parts = parts
        self._steps = steps
        self._version = PolicyVersion(0)
        self._cursor = Cursor()
        self._step_start = 0
        self._pools = DifficultyPools()
        self._saved = SAVED
        self._empty_steps = 0
        self._held_up = dict.fromkeys(HELD_UP, 0.0)

    @property
    def version(self) -> PolicyVersion:
        """The newest version that it made."""
        return self._version

    async def run(self) -> None:
        """Train; returns when the last version is published and evaluated.

        Raises StorageError or ChainError when state, chain and stream contradict each other.
        """
        due = await self._resume()
        async with asyncio.TaskGroup() as tasks:
            posting = tasks.create_task(self._parts.poster.run())
            standing_by = tasks.create_task(self._parts.publisher.stand_by())
            publication = tasks.create_task(self._publish(due))
            if self._version == 0:
                await self._evaluate(self._version)
            while not self._steps or self._version < self._steps:
                made = await self._training_step()
                # One version at a time: the next is not anchored before this one.
                with self._timed("publish_s"):
                    await publication
                publication = tasks.create_task(self._publish([made]))
                if self._parts.eval_every and self._version % self._parts.eval_every == 0:
                    await self._evaluate(self._version)
            await publication
            await self._evaluate(self._version)
            await self._parts.poster.drain(POST_GRACE_S)
            posting.cancel()
            standing_by.cancel()

    # 9. train

    async def _training_step(self) -> _Made:
        """Consume the next records, improve the policy, and begin to make the result durable."""
        parts = self._parts
        asked = parts.clock()
        taken = await parts.stream.next_step(self._cursor, self._version, self._pools)
        began = parts.clock()
        step = Step(self._version + 1)
        await parts.compute.run(parts.require_room, _lengths(taken))
        figures = await parts.compute.run(parts.learner.step, step, taken.groups)
        fault = await parts.compute.run(self._fault)
        version = PolicyVersion(step)
        # Logged before the save: if the step has to be taken again, the next start removes its
        # line.
        took = Durations(began - asked, parts.clock() - began, self._held_up)
        self._held_up = dict.fromkeys(HELD_UP, 0.0)
        back_to = self._report_step(version, taken, figures, took, fault=fault)
        if back_to is not None:
            # The version to go back to may be the one that is being written.
            await asyncio.wrap_future(self._saved)
            await parts.compute.run(self._roll_back, back_to)
        with self._timed("save_s"):
            await asyncio.wrap_future(self._saved)
            self._saved = await parts.compute.run(self._save, version, taken)
        self._version, self._cursor = version, taken.end
        self._step_start, self._pools = taken.start.position, taken.pools
        return _Made(version, taken.start.position, taken.end.position, self._saved)

    def _save(self, version: PolicyVersion, taken: StepInput) -> Future[None]:
        """Write the version's folder, then the checkpoint that names it, in the background."""
        parts, learner = self._parts, self._parts.learner
        listed = parts.lists.of(taken.pools)
        writing = parts.shelf.writing(version, learner.weights(), learner.pieces, listed)
        # Files of the previous checkpoint stay until this one is complete.
        oldest = version - parts.recipe.training.max_async_level - parts.checkpoints.keep
        parts.shelf.drop_before(PolicyVersion(oldest))
        parts.buffer.forget_before(self._step_start)
        parts.checkpoints.retained = frozenset(parts.guard.good)
        return parts.checkpoints.save(
            TrainerState(
                version=version,
                cursor=taken.end,
                step_start=taken.start.position,
                previous_start=self._step_start,
                kept={"pools": taken.pools.to_dict(), "guard": parts.guard.state()},
            ),
            learner.state(),
            first=writing,
            release=learner.hold(),
        )

    def _report_step(
        self,
        version: PolicyVersion,
        taken: StepInput,
        figures: StepFigures,
        took: Durations,
        *,
        fault: str | None,
    ) -> PolicyVersion | None:
        """Report a step; returns the version whose weights it gets instead of its own, if any.
        `fault` names what of its weights is not finite.
        """
        parts = self._parts
        entry = step_entry(version, taken, figures, took, parts.recipe, peak_flops=parts.peak_flops)
        judgement = parts.guard.judge(version, entry, fault=fault)
        self._tell(version, entry | judgement.entry())
        logger.info(
            "training step",
            extra={
                "step": version,
                "reward": round(taken.reward, 4),
                "tokens": figures.tokens,
                **{name: round(entry[name], 4) for name in OF_SPEED if entry[name] is not None},
            },
        )
        self._empty_steps = 0 if figures.tokens else self._empty_steps + 1
        if self._empty_steps:
            dropped = named(taken.dropped + figures.dropped)
            logger.warning(
                "nothing was trained on",
                extra={"step": version, "steps": self._empty_steps, "dropped": dropped},
            )
        return judgement.back_to

    def _fault(self) -> str | None:
        """Return what of the policy is not finite, in training or as it would be published."""
        learner = self._parts.learner
        return learner.fault(self._parts.shelf.formats(learner.weights()))

    def _roll_back(self, version: PolicyVersion) -> None:
        """Give the learner an earlier version's weights and optimiser, and a smaller rate."""
        parts = self._parts
        if version == BASE:
            parts.learner.start_again(parts.shelf.weights(BASE))
        else:
            folder = parts.checkpoints.folder_of(version)
            parts.learner.restore(parts.checkpoints.read(folder, parts.learner))
        parts.learner.learning_rate_scale = parts.guard.scale

    def _tell(self, step: int, entry: dict[str, Any]) -> None:
        """Write an entry to the log, and pass its figures on."""
        self._parts.log.append(entry)
        figures = flat(entry)
        self._parts.poster.post(step, figures)
        for export in self._parts.exports:
            export(figures)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Count the duration of a block as delay of the next step."""
        began = self._parts.clock()
        yield
        self._held_up[name] += self._parts.clock() - began

    # 1. publish

    async def _publish(self, versions: list[_Made]) -> None:
        for made in versions:
            await asyncio.wrap_future(made.saved)
            folder = self._parts.shelf.path(made.version)
            await self._parts.publisher.publish(
                made.version, folder, made.stream_from, made.stream_to
            )

    # Measuring and resuming

    async def _evaluate(self, version: PolicyVersion) -> None:
        parts = self._parts
        if parts.evaluator is None or version in parts.log.evaluated():
            return
        with self._timed("save_s"):
            await asyncio.wrap_future(self._saved)
        folder = parts.shelf.path(version)
        # Not in the tensor thread: it sends signs of life to the waiting ranks.
        thread = ComputeThread()
        try:
            with self._timed("evaluate_s"):
                evaluation = await thread.run(parts.evaluator.evaluate, folder, version)
        except (EngineError, NotYet) as error:
            said = {"policy_version": version, "error": str(error)}
            logger.warning("version not evaluated", extra=said)
            return
        finally:
            thread.close()
        self._tell(version, evaluation_entry(evaluation))
        reward = evaluation.reward and round(evaluation.reward.value, 4)
        logger.info("evaluated", extra={"policy_version": version, "reward": reward})

    async def _resume(self) -> list[_Made]:
        """Resume from the saved state; returns the versions that may not be on chain yet.

        Raises TrainingCollapsed when the saved weights, or the base model's, are not finite.
        """
        parts = self._parts
        saved = await parts.compute.run(parts.checkpoints.newest)
        parts.log.forget_after(saved.state.version if saved else self._version)
        if saved is None:
            require_finite(self._version, await parts.compute.run(self._fault))
            return [_Made(self._version, 0, 0)]
        state = saved.state
        writing = await parts.compute.run(self._restore, saved)
        require_finite(state.version, await parts.compute.run(self._fault))
        if writing is not None:
            # Not in the tensor thread: it sends signs of life to the waiting ranks.
            await asyncio.wrap_future(parts.checkpoints.behind(writing))
        parts.guard.restore(state.kept.get("guard", {}))
        parts.learner.learning_rate_scale = parts.guard.scale
        parts.checkpoints.retained = frozenset(parts.guard.good)
        self._version, self._cursor = state.version, state.cursor
        self._step_start = state.step_start
        self._pools = DifficultyPools.from_dict(state.kept.get("pools", {}))
        logger.info(
            "resumed", extra={"policy_version": state.version, "position": state.cursor.position}
        )
        previous = _Made(PolicyVersion(state.version - 1), state.previous_start, state.step_start)
        own = _Made(state.version, state.step_start, state.cursor.position)
        return [previous, own] if parts.shelf.has(previous.version) else [own]

    def _restore(self, saved: Saved) -> Callable[[], object] | None:
        """Restore the learner; returns what writes the version's folder, if it is missing."""
        learner, shelf, version = self._parts.learner, self._parts.shelf, saved.state.version
        learner.restore(self._parts.checkpoints.read(saved.folder, learner))
        if shelf.has(version):
            return None
        if not version:
            raise StorageError("the base model is not in the state folder")
        # The checkpoint is complete without the folder: that is only a rounded copy of its weights.
        pools = DifficultyPools.from_dict(saved.state.kept.get("pools", {}))
        listed = self._parts.lists.of(pools)
        return shelf.writing(version, learner.weights(), learner.pieces, listed)
