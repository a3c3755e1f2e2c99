"""Leases: who may work on which slot, and for how long.

Admission is paced by capacity, as in AReaL (arXiv 2505.24298, section 4): with K submissions per
training step, v the newest policy version and eta the recipe's `max_async_level`,

    capacity = (eta + v + 1) * K - used - outstanding

tickets may be given out, so that nothing is generated that would be too old when its turn comes.
*used* counts accepted submissions that training steps take, less what a step takes beyond its share
to replace what it left out (the trainer says how many: its refill is new capacity); *outstanding*
those that are leased, received or committed but not judged. A ticket belongs to rollout step
(used + outstanding) // K + 1, and a run of S steps has capacity for S steps at most.

A lease whose policy has become too old to be trained on is no longer open: it neither holds back
others nor is handed out again. Nor does the lease of a dead worker hold back others. Either ticket
stays good for an upload until its deadline, as signed.

When more nodes ask than there are tickets, they take turns by the leases that their stakes still
cover (`turns.py`); nobody is queued: who has to wait is told when to ask again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.chain import CheckpointView, WorkerView
from muster.orchestrator.db import counts
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.models import LeaseRow
from muster.orchestrator.services.batching import Batching
from muster.orchestrator.services.hardware import Hardware, Unfit
from muster.orchestrator.services.life import Lives, WorkerState
from muster.orchestrator.services.projection import Projection
from muster.orchestrator.services.turns import Turns
from muster.orchestrator.services.unit_cap import UnitCap
from muster.protocol.eip712 import Domain, digest, sign
from muster.protocol.ids import Address, Step
from muster.protocol.messages import Ticket
from muster.protocol.recipe import TrainingRecipe

logger = logging.getLogger(__name__)

DEAD_KNOWN_S = 1.0
"""For how long it is not asked again who of those that hold leases is dead."""


@dataclass(frozen=True, slots=True)
class SignedTicket:
    """A ticket and the orchestrator's signature."""

    ticket: Ticket
    """The ticket."""
    signature: bytes
    """EIP-712 `Ticket`."""


def next_step(used: int, outstanding: int, submissions_per_step: int) -> Step:
    """Return the rollout step that the next ticket belongs to."""
    return Step((used + outstanding) // submissions_per_step + 1)


def capacity(used: int, outstanding: int, version: int, training: TrainingRecipe) -> int:
    """Return how many tickets may be given out while `version` is the newest policy; 0 for none."""
    steps = version + 1 + training.max_async_level
    if training.steps:
        steps = min(steps, training.steps)
    return max(0, steps * training.submissions_per_step - used - outstanding)


class Withheld(StrEnum):
    """Why there is no ticket although there is work."""

    UNIT_CAP = "unit_cap"
    """The worker's stake does not cover another submission."""
    UNFUNDED = "unfunded"
    """The run cannot pay for what was uploaded."""
    HARDWARE_UNKNOWN = Unfit.UNKNOWN.value
    """The node has not said what its machine has."""
    HARDWARE_SHORT = Unfit.SHORT.value
    """Its machine has less than the run asks for."""
    TOO_SLOW = Unfit.SLOW.value
    """Its machine was slower on its last tickets than the run asks for."""


class Leases:
    """Gives out tickets, one open one per node."""

    def __init__(
        self,
        *,
        database: Database,
        projection: Projection,
        batching: Batching,
        unit_cap: UnitCap,
        hardware: Hardware,
        lives: Lives,
        turns: Turns,
        training: TrainingRecipe,
        key: bytes,
        domain: Domain,
        now: Callable[[], int],
        lease_s: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._projection = projection
        self._batching = batching
        self._unit_cap = unit_cap
        self._hardware = hardware
        self._lives = lives
        self._turns = turns
        self._monotonic = monotonic
        self._dead: frozenset[Address] = frozenset()
        self._dead_known_at = float("-inf")
        self._training = training
        self._key = key
        self._domain = domain
        self._now = now
        self._lease_s = lease_s

    async def lease(self, worker: WorkerView) -> SignedTicket | Withheld | None:
        """Return the node's open ticket or the next one; none when there is no work for it, or why
        there is work and no ticket.
        """
        async with self._database.write() as session:
            held = await self._held(session, worker)
            if held is not None:
                return held
            checkpoint = self._projection.checkpoint
            if checkpoint is None or self._projection.run.paused:
                return None
            # The beacon must be younger than the worker, or addresses could be ground against it.
            if worker.active_from > checkpoint.block_number:
                return None
            await self._batching.refresh(session)
            used, outstanding = await self._load(session)
            tickets = capacity(used, outstanding, checkpoint.version, self._training)
            if not tickets:
                self._turns.ask(worker.node)
                return None
            fitness = await self._fitness(session, worker)
            if isinstance(fitness, Withheld):
                self._turns.withdraw(worker.node)
                return fitness
            if not self._turns.may_go(worker.node, fitness, tickets):
                return None
            self._turns.served(worker.node)
            step = next_step(used, outstanding, self._training.submissions_per_step)
            return await self._give(session, worker, checkpoint, step)

    async def _fitness(self, session: AsyncSession, worker: WorkerView) -> int | Withheld:
        """Return how many leases the worker's stake covers, or why it gets none."""
        if self._batching.is_unfunded:
            return Withheld.UNFUNDED
        free = await self._unit_cap.free(session, worker, self._now())
        if not free:
            return Withheld.UNIT_CAP
        unfit = await self._hardware.fault(session, worker.node, self._now())
        return Withheld(unfit.value) if unfit else free

    async def collecting_step(self, session: AsyncSession) -> Step:
        """Return the rollout step that the next ticket would belong to."""
        return next_step(*await self._load(session), self._training.submissions_per_step)

    async def _load(self, session: AsyncSession) -> tuple[int, int]:
        """Return how many submissions are used, and how many outstanding."""
        outstanding = await self._leased(session) + await self._batching.outstanding(session)
        return self._projection.trained_submissions, outstanding

    async def _held(self, session: AsyncSession, worker: WorkerView) -> SignedTicket | None:
        row: LeaseRow | None = await session.scalar(
            select(LeaseRow)
            .where(LeaseRow.node == worker.node, *self._is_open())
            .order_by(LeaseRow.id.desc())
            .limit(1)
        )
        if row is None:
            return None
        return SignedTicket(Ticket.from_json(row.ticket), row.signature)

    async def _leased(self, session: AsyncSession) -> int:
        """Return the open leases whose workers are not dead."""
        dead = await self._leases_of_dead(session)
        found = await counts.open_leases(session, now=self._now(), oldest=self._oldest_version())
        return max(0, found - dead)

    async def _leases_of_dead(self, session: AsyncSession) -> int:
        """Return how many open leases dead workers hold, as of a moment ago."""
        if self._monotonic() - self._dead_known_at < DEAD_KNOWN_S:
            return len(self._dead)
        holders = await session.scalars(select(LeaseRow.node).where(*self._is_open()).distinct())
        serving = self._projection.view.worker_by_node
        dead = frozenset(
            Address(node)
            for node in holders
            if node in serving and self._lives.state(serving[Address(node)]) is WorkerState.DEAD
        )
        for node in dead - self._dead:
            logger.info("worker is dead, its slot is given to others", extra={"node": node})
        self._dead, self._dead_known_at = dead, self._monotonic()
        return len(dead)

    def _is_open(self) -> tuple[ColumnElement[bool], ...]:
        return (
            LeaseRow.deadline >= self._now(),
            LeaseRow.is_filled.is_(False),
            LeaseRow.policy_version >= self._oldest_version(),
        )

    def _oldest_version(self) -> int:
        checkpoint = self._projection.checkpoint
        return (checkpoint.version if checkpoint else 0) - self._training.max_async_level

    async def _give(
        self, session: AsyncSession, worker: WorkerView, checkpoint: CheckpointView, step: Step
    ) -> SignedTicket:
        ticket = Ticket(
            run_id=self._projection.run_id,
            worker=worker.address,
            step=step,
            index=await self._next_index(session, worker, step),
            policy_version=checkpoint.version,
            policy_root=checkpoint.manifest_root,
            beacon=checkpoint.beacon,
            deadline=self._now() + self._lease_s,
        )
        signature = sign(digest(self._domain, ticket.struct_hash()), self._key)
        session.add(
            LeaseRow(
                node=worker.node,
                worker=worker.address,
                step=step,
                index=ticket.index,
                deadline=ticket.deadline,
                ticket=ticket.to_json(),
                signature=signature,
                is_filled=False,
                policy_version=ticket.policy_version,
            )
        )
        return SignedTicket(ticket, signature)

    async def _next_index(self, session: AsyncSession, worker: WorkerView, step: Step) -> int:
        index = await counts.next_index(session, worker.address, step)
        # Slots that reached the chain without this database: direct submissions, or before a loss.
        while self._projection.view.slot_used(
            self._projection.run_id, worker.worker_id, step, index
        ):
            index += 1
        return index
