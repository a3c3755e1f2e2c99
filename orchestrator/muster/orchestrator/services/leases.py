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

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from muster.chain import CheckpointView, MemberView
from muster.orchestrator.db import statements
from muster.orchestrator.db.direct import Asked, Rows, Statement
from muster.orchestrator.db.engine import Database
from muster.orchestrator.services.batching import Batching
from muster.orchestrator.services.hardware import Hardware, Unfit
from muster.orchestrator.services.lease_book import Account, Book, questions_about
from muster.orchestrator.services.life import Lives, WorkerState
from muster.orchestrator.services.projection import Projection
from muster.orchestrator.services.turns import Turns
from muster.orchestrator.services.unit_cap import UnitCap, counts_from
from muster.orchestrator.together import Together
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


_Answer = SignedTicket | Withheld | None


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
        self._together = Together(self._serve)

    async def lease(self, worker: MemberView) -> SignedTicket | Withheld | None:
        """Return the node's open ticket or the next one; none when there is no work for it, or why
        there is work and no ticket.
        """
        return await self._together.join(worker)

    async def collecting_step(self) -> Step:
        """Return the rollout step that the next ticket would belong to."""
        book = await self._open_book(self._database.direct, [])
        return next_step(book.used, book.outstanding, self._training.submissions_per_step)

    async def _serve(self, workers: Sequence[MemberView]) -> list[_Answer | Exception]:
        """Decide about those who ask at the same moment, in one transaction."""
        async with self._database.direct.transaction() as asked:
            book = await self._open_book(asked, workers)
            answers: list[_Answer | Exception] = [self._decide(book, each) for each in workers]
            await asked.ask(*book.given)
        return answers

    def _decide(self, book: Book, worker: MemberView) -> _Answer:
        account = book.accounts[worker.address]
        held = account.open_ticket(worker.node, now=book.now, oldest=self._oldest_version())
        if held is not None:
            return SignedTicket(Ticket.from_json(json.loads(held.ticket)), held.signature)
        checkpoint = self._projection.checkpoint
        if checkpoint is None or self._projection.run.paused:
            return None
        if not worker.is_active(self._projection.head):
            return None
        tickets = capacity(book.used, book.outstanding, checkpoint.version, self._training)
        if not tickets:
            self._turns.ask(worker.node)
            return None
        fitness = self._fitness(book, worker)
        if isinstance(fitness, Withheld):
            self._turns.withdraw(worker.node)
            return fitness
        if not self._turns.may_go(worker.node, fitness, tickets):
            return None
        self._turns.served(worker.node)
        return self._give(book, worker, checkpoint)

    def _fitness(self, book: Book, worker: MemberView) -> int | Withheld:
        """Return how many leases the worker's stake covers, or why it gets none."""
        if self._batching.is_unfunded:
            return Withheld.UNFUNDED
        account = book.accounts[worker.address]
        free = self._unit_cap.free(
            worker, leased=len(account.unfilled), waiting=account.waiting_units, now=book.now
        )
        if not free:
            return Withheld.UNIT_CAP
        return Withheld(account.unfit.value) if account.unfit else free

    async def _open_book(self, asked: Asked, workers: Sequence[MemberView]) -> Book:
        """Read what is needed to decide about workers."""
        now, is_open = self._now(), {"now": self._now(), "oldest": self._oldest_version()}
        first_step = next_step(self._used(), 0, self._training.submissions_per_step)
        is_old = self._monotonic() - self._dead_known_at >= DEAD_KNOWN_S
        questions = _Questions()
        leased = questions.add(statements.open_leases(**is_open))
        waiting = questions.add(statements.waiting_submissions())
        dead = questions.add(*[statements.holders(**is_open)] * is_old)
        told = questions.add(*self._batching.questions())
        own = {
            worker.address: (
                worker.node,
                questions.add(
                    *questions_about(worker, counts_from=counts_from(now), since=first_step)
                ),
                questions.add(*self._hardware.questions(worker.node, now)),
            )
            for worker in workers
        }
        answers = await asked.ask(*questions.all)
        self._batching.take_note(answers[told])
        for holders in answers[dead]:
            self._note_dead(holders)
        await self._read_batches(asked, now)
        accounts = {
            address: Account.read(self._hardware.fault(node, answers[fit], now), answers[account])
            for address, (node, account, fit) in own.items()
        }
        [[(found,)]], [[(unbatched,)]] = answers[leased], answers[waiting]
        outstanding = max(0, found - len(self._dead)) + self._batching.outstanding(unbatched)
        return Book(now, self._used(), outstanding, first_step, accounts)

    async def _read_batches(self, asked: Asked, now: int) -> None:
        unknown = self._unit_cap.unknown_batches(now)
        if unknown:
            found = await asked.ask(*map(statements.units_in_batch, unknown))
            for root, units in zip(unknown, found, strict=True):
                self._unit_cap.note_batch(root, units)

    def _used(self) -> int:
        return self._projection.trained_submissions

    def _note_dead(self, holders: Rows) -> None:
        """Remember which nodes with open leases belong to dead workers."""
        nodes, members = self._projection.view.worker_by_node, self._projection.run.members
        dead = frozenset(
            Address(node)
            for (node,) in holders
            if node in nodes
            and (member := members.get(nodes[Address(node)].address)) is not None
            and self._lives.state(member) is WorkerState.DEAD
        )
        for node in dead - self._dead:
            logger.info("worker is dead, its slot is given to others", extra={"node": node})
        self._dead, self._dead_known_at = dead, self._monotonic()

    def _oldest_version(self) -> int:
        checkpoint = self._projection.checkpoint
        return (checkpoint.version if checkpoint else 0) - self._training.max_async_level

    def _give(self, book: Book, worker: MemberView, checkpoint: CheckpointView) -> SignedTicket:
        step = next_step(book.used, book.outstanding, self._training.submissions_per_step)
        # A reorganisation while the database was asked may have led back behind what it answered.
        step = max(step, book.first_step)
        account = book.accounts[worker.address]
        ticket = Ticket(
            run_id=self._projection.run_id,
            worker=worker.address,
            step=step,
            index=self._next_index(account, worker, step),
            policy_version=checkpoint.version,
            policy_root=checkpoint.manifest_root,
            beacon=worker.beacon_under(checkpoint),
            deadline=book.now + self._lease_s,
        )
        signed = SignedTicket(ticket, sign(digest(self._domain, ticket.struct_hash()), self._key))
        book.note(worker.node, signed.ticket, signed.signature)
        return signed

    def _next_index(self, account: Account, worker: MemberView, step: Step) -> int:
        index = account.slots.get(step, -1) + 1
        # Slots that reached the chain without this database: direct submissions, or before a loss.
        while self._projection.view.slot_used(
            self._projection.run_id, worker.worker_id, step, index
        ):
            index += 1
        return index


class _Questions:
    """Statements to ask together; knows where the answers to some of them will be."""

    def __init__(self) -> None:
        self.all: list[Statement] = []

    def add(self, *statements: Statement) -> slice:
        """Add statements; return the place of their answers."""
        self.all += statements
        return slice(len(self.all) - len(statements), len(self.all))
