"""Leases: who may work on which slot, and for how long.

Admission is paced by capacity, as in AReaL (arXiv 2505.24298, section 4): with K submissions per
training step, v the newest policy version and eta the recipe's `max_async_level`,

    capacity = (eta + v + 1) * K - used - outstanding

tickets may be given out, so that no submission is too old when its training step comes. *used*
counts accepted submissions in training steps, without those that a step takes beyond its share to
replace filtered groups (the trainer reports this number, its refill). *outstanding* counts
submissions that are leased, received or committed but not judged. A ticket belongs to rollout step
(used + outstanding) // K + 1, and a run of S steps has capacity for S steps at most.

A ticket names the newest policy. While the node still downloads the newest, it may name the older
one that the node holds, if the ticket's step may train on that.

A lease whose policy is too old to train on, or whose seeds a reorganisation made void, is no longer
open: it uses no capacity and is not given out again. The lease of a dead worker uses no capacity
either. All these tickets stay valid for an upload until their signed deadline.

Tickets belong to the worker: any of its nodes gets an open one that the node does not already work
on. How many tickets a worker may hold, open or not judged, depends on its last ones (`fitness.py`)
and is limited by its share of stake (`shares.py`). When more workers ask than there are tickets,
they take turns, weighted by the leases that their stakes still cover (`shares.py`). No request
waits here: the worker is told when to ask again.

A request that arrives here is signed by the node of an Active worker, within its quotas, with a new
nonce. These rules are applied in this order (`lease`, `_decide`, `_leases_covered`). A worker that
fails a rule is told the reason in quotes; if there is none, it has nothing to do now:

     1. owner      the owner has not paused leases, or named another orchestrator: "paused"
     2. again      an open ticket that the node does not hold is given again
     3. run        the run is not paused on chain, and has a policy version
     4. activation the worker's activation delay is over
     5. capacity   there is a ticket; those with small stakes share theirs
     6. money      the chain answers: "chain_away"; the run can pay: "unfunded"
     7. machine    `fitness.py`: "hardware_unknown", "hardware_short", "too_slow"
     8. allowance  `fitness.py`, and the share by stake, `shares.py`: "share"
     9. unit cap   the stake covers another lease, `shares.py`: "unit_cap"
    10. turn       when there are fewer tickets than workers that ask, `shares.py`

Slot numbers are drawn among `INDEX_BLOCK`, so that no worker knows its next problems before it has
the ticket.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, count, islice
from typing import Any

from muster.chain import CheckpointView, MemberView
from muster.orchestrator.db import Database, statements
from muster.orchestrator.db.group import GroupedCalls
from muster.orchestrator.db.query import Query, Queryable, Rows, Statement
from muster.orchestrator.intake.batching import Batching
from muster.orchestrator.leases.fitness import (
    HISTORY,
    Allowance,
    Hardware,
    Past,
    Unfit,
    allowance_of,
    end_of,
)
from muster.orchestrator.leases.life import HEARD, MAY_WORK, Lives, WorkerState
from muster.orchestrator.leases.shares import Contenders, Shares, Turns, UnitCap
from muster.orchestrator.projection import Judged, Projection
from muster.protocol.eip712 import Domain, address_of, digest, sign, signer_of
from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.ids import Address, Hash32, PolicyVersion, Step
from muster.protocol.messages import Ticket
from muster.protocol.reasons import OTHERS_FAULTS
from muster.protocol.recipe import TrainingRecipe

logger = logging.getLogger(__name__)

HOLDERS_KNOWN_S = 1.0
"""Seconds for which the holders of leases, the dead ones among them, and shares are cached."""
INDEX_BLOCK = 16
"""Slots among which one is drawn; this many share a word of the escrow's storage."""


@dataclass(frozen=True, slots=True)
class SignedTicket:
    """A ticket and the orchestrator's signature."""

    ticket: Ticket
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


class NoTicket(StrEnum):
    """Reasons that a worker is told when it gets no ticket."""

    UNIT_CAP = "unit_cap"
    """The worker's stake does not cover another submission."""
    SHARE = "share"
    """The worker holds as many tickets as it may, or has let some lapse."""
    CHAIN_AWAY = "chain_away"
    """Batches cannot be committed: by the time they can, the work may be late."""
    UNFUNDED = "unfunded"
    """The run cannot pay for the uploaded work."""
    PAUSED = "paused"
    """The run's owner has paused leases at this orchestrator, or named another one."""


OUR_FAULTS = frozenset({NoTicket.CHAIN_AWAY, NoTicket.UNFUNDED, NoTicket.PAUSED})
"""Reasons that are no fault of the worker."""

Slots = frozenset[tuple[int, int]]
"""Slots of one worker: step and index of each."""


@dataclass(frozen=True, slots=True)
class _LeaseRequest:
    worker: MemberView
    holding: Slots
    """Slots of the tickets that the node works on."""
    version: PolicyVersion | None
    """The policy that the node holds and would use; None for the newest."""


Answer = SignedTicket | NoTicket | Unfit | None
"""A ticket, the reason why the worker gets none, or None: nothing to do now (rules 3, 4, 5, 10)."""


@dataclass(eq=False, repr=False, kw_only=True)
class Leases:
    """Gives out tickets; a worker's allowance bounds how many it has open."""

    database: Database
    projection: Projection
    batching: Batching
    unit_cap: UnitCap
    hardware: Hardware
    lives: Lives
    turns: Callable[[], Turns]
    training: TrainingRecipe
    key: bytes
    domain: Domain
    now: Callable[[], int]
    is_chain_away: Callable[[], bool]
    lease_s: int
    outcome_deadline_s: int
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._shares = Shares(
            self.training.submissions_per_step * (self.training.max_async_level + 1)
        )
        self._contenders = Contenders(self.monotonic)
        # Workers with stake for at least one ticket take turns apart from smaller ones, which share
        # tickets.
        self._turns = {is_small: self.turns() for is_small in (False, True)}
        self._dead: frozenset[Address] = frozenset()
        self._held_by_dead = 0
        self._holders_known_at = float("-inf")
        self._address = address_of(self.key)
        self._secret = keccak(b"muster.slots" + self.key)
        self._grouped = GroupedCalls(self._serve)
        self.are_paused = False
        """Whether the run's owner has paused leases; until this process ends."""

    @property
    def is_named(self) -> bool:
        """Whether the run names this account as its orchestrator: tickets that another one signed
        are worth nothing."""
        return self.projection.run.config.orchestrator == self._address

    async def lease(
        self,
        worker: MemberView,
        holding: Slots = frozenset(),
        version: PolicyVersion | None = None,
    ) -> Answer:
        """Return an open ticket of the worker that is not in `holding`, or the next one, or why it
        gets none. `version` is the policy that the node would use, if that is not too old.
        """
        if self.are_paused or not self.is_named:
            return NoTicket.PAUSED
        return await self._grouped.join(_LeaseRequest(worker, holding, version))

    async def close_void(self) -> None:
        """Close the open leases whose seeds follow from a block that a reorganisation removed.

        Their slots stay used: the work of both tickets of one slot would look alike.
        """
        is_open = {"now": self.now(), "oldest": self._oldest_version()}
        [rows] = await self.database.search(statements.due_tickets(**is_open))
        tickets = [Ticket.from_json(json.loads(text)) for (text,) in rows]
        void = [each for each in tickets if not self.projection.is_anchored(each)]
        if not void:
            return
        logger.warning("a reorganisation made leases void", extra={"count": len(void)})
        async with self.database.transaction() as asked:
            await asked.ask(*map(statements.close_lease, void))

    async def close_missed(self, wall_time: int) -> None:
        """Close the unfilled leases that fell due while no orchestrator served this database: since
        its last request, which the same clock as `wall_time` dates. Their work could not be
        uploaded in time, so they are no lapses.
        """
        [[last]] = await self.database.search(statements.last_requests())
        now, silence_s = self.now(), max(0, wall_time - max(last))
        async with self.database.transaction() as asked:
            [closed] = await asked.ask(statements.close_missed(since=now - silence_s, now=now))
        if closed:
            logger.warning(
                "leases fell due while no orchestrator ran",
                extra={"count": len(closed), "silence_s": silence_s},
            )

    async def vouch(self) -> None:
        """Sign tickets that are not on chain and that another account signed, which was the run's
        orchestrator before: the account that commits work must have signed its ticket.
        """
        roots = self.batching.uncommitted_roots
        [leased] = await self.database.search(statements.unfilled_tickets(now=self.now()))
        held = await self.database.search(
            statements.waiting_tickets(),
            *(statements.tickets_in_batch(root=root) for root in roots),
        )
        signing = [
            *self._signed_again(leased, statements.sign_lease),
            *self._signed_again(chain(*held), statements.sign_submission),
        ]
        if signing:
            logger.warning(
                "another account signed tickets; signed them again", extra={"count": len(signing)}
            )
            async with self.database.transaction() as asked:
                await asked.ask(*signing)

    def _signed_again(self, rows: Iterable[Any], store: Query) -> Iterator[Statement]:
        for number, text, signature in rows:
            ticket = Ticket.from_json(json.loads(text))
            if signer_of(self.domain, ticket, signature) != self._address:
                signed = sign(digest(self.domain, ticket.struct_hash()), self.key)
                yield store(number=number, signed=signed)

    async def collecting_step(self) -> Step:
        """Return the rollout step that the next ticket would belong to."""
        snapshot = await self.read_snapshot(self.database, [])
        return next_step(snapshot.used, snapshot.outstanding, self.training.submissions_per_step)

    async def _serve(self, questions: Sequence[_LeaseRequest]) -> list[Answer | Exception]:
        """Answer simultaneous requests in one transaction."""
        async with self.database.transaction(is_quick=True) as asked:
            snapshot = await self.read_snapshot(asked, [each.worker for each in questions])
            answers: list[Answer | Exception] = [self._decide(snapshot, each) for each in questions]
            await asked.ask(*snapshot.given)
        return answers

    def _decide(self, snapshot: Snapshot, asked: _LeaseRequest) -> Answer:
        worker = asked.worker
        account = snapshot.accounts[worker.address]
        held = account.open_ticket(snapshot.now, self._oldest_version(), besides=asked.holding)
        if held is not None:
            return SignedTicket(Ticket.from_json(json.loads(held.ticket)), held.signature)
        checkpoint = self.projection.checkpoint
        if checkpoint is None or self.projection.run.paused:
            return None
        if not worker.is_active(self.projection.head):
            return None
        tickets = capacity(snapshot.used, snapshot.outstanding, checkpoint.version, self.training)
        is_small = self._shares.is_small(worker)
        turns = self._turns[is_small]
        if is_small:
            tickets = self._shares.free_for_small(tickets)
        if not tickets:
            turns.ask(worker.address)
            self._contenders.ask(worker.address, is_fit=False)
            return None
        covered = self._leases_covered(snapshot, worker, checkpoint)
        if not isinstance(covered, int):
            turns.withdraw(worker.address)
            if covered not in OUR_FAULTS:
                self._contenders.withdraw(worker.address)
            return covered
        self._contenders.ask(worker.address, is_fit=True)
        if not turns.may_go(worker.address, covered, tickets):
            return None
        turns.served(worker.address)
        self._shares.served(worker)
        return self._give(snapshot, worker, asked.version)

    def _leases_covered(
        self, snapshot: Snapshot, worker: MemberView, checkpoint: CheckpointView
    ) -> int | NoTicket | Unfit:
        """Return how many leases the worker's stake covers, or why it gets none."""
        if self.is_chain_away():
            return NoTicket.CHAIN_AWAY
        if self.batching.is_unfunded:
            return NoTicket.UNFUNDED
        account, now = snapshot.accounts[worker.address], snapshot.now
        unfit = self.hardware.fault(worker.node, account.reports, account.past, now)
        if unfit is not None:
            return unfit
        allowance = self._allowance(account, worker, now)
        share, oldest = self._shares.of(worker, checkpoint.beacon), self._oldest_version()
        is_open = sum(each.is_worth(now, oldest) for each in account.unfilled)
        if not allowance.covers_another(share, now, is_open=is_open):
            return NoTicket.SHARE
        since = self.unit_cap.counts_from(now, lapses=allowance.window < 1)
        leased = sum(each.deadline >= since for each in account.unfilled)
        free = self.unit_cap.free(worker, leased=leased, waiting=account.waiting_units, now=now)
        return free or NoTicket.UNIT_CAP

    def _allowance(self, account: WorkerRows, worker: MemberView, now: int) -> Allowance:
        projection = self.projection

        def is_used(step: int, index: int) -> bool:
            return projection.slot_used(worker.worker_id, step, index)

        def judged(past: Past, file_hash: Hash32) -> Judged | None:
            return projection.judged((worker.address, past.step, past.index), file_hash)

        ends = [(each, end_of(each, judged, is_used, now)) for each in account.past]
        return allowance_of(
            ends, now, lease_s=self.lease_s, outcome_deadline_s=self.outcome_deadline_s
        )

    async def read_snapshot(self, asked: Queryable, workers: Sequence[MemberView]) -> Snapshot:
        """Read the data for the decisions about these workers."""
        now, is_open = self.now(), {"now": self.now(), "oldest": self._oldest_version()}
        [(leased,)], [(waiting,)], *told = await asked.ask(
            statements.open_leases(**is_open),
            statements.waiting_submissions(),
            *self.batching.questions(),
        )
        self.batching.take_note(told)
        await self._read_batches(asked, now)
        if self.monotonic() - self._holders_known_at >= HOLDERS_KNOWN_S:
            holders, waiting_of = await asked.ask(
                statements.holders(**is_open), statements.waiting_workers()
            )
            self._note_holders(holders, waiting_of, now)
        first_step = next_step(self._used(), 0, self.training.submissions_per_step)
        accounts = await self._read_accounts(asked, workers, now, first_step)
        outstanding = max(0, leased - self._held_by_dead) + self.batching.outstanding(waiting)
        return Snapshot(now, self._used(), outstanding, first_step, accounts)

    async def _read_accounts(
        self, asked: Queryable, workers: Sequence[MemberView], now: int, first_step: Step
    ) -> dict[Address, WorkerRows]:
        since = self.unit_cap.counts_from(now, lapses=True)
        questions = {
            worker.address: WorkerRows.questions(worker, counts_from=since, since=first_step)
            for worker in workers
        }
        answers = iter(await asked.ask(*chain.from_iterable(questions.values())))
        return {
            address: WorkerRows.read(list(islice(answers, len(own))))
            for address, own in questions.items()
        }

    async def _read_batches(self, asked: Queryable, now: int) -> None:
        unknown = self.unit_cap.unknown_batches(now)
        if unknown:
            found = await asked.ask(*(statements.units_in_batch(root=root) for root in unknown))
            for root, units in zip(unknown, found, strict=True):
                self.unit_cap.note_batch(root, units)

    def _used(self) -> int:
        return self.projection.trained_submissions

    def _note_holders(self, holders: Rows, waiting: Rows, now: int) -> None:
        """Cache which workers with open leases are dead, and the shares of all."""
        held = {Address(worker): int(count) for worker, count in holders}
        members = self.projection.run.members
        states = {who: self.lives.state(each) for who, each in members.items()}
        dead = frozenset(who for who in held if states.get(who) is WorkerState.DEAD)
        for worker in dead - self._dead:
            logger.info("worker is dead, others get as many tickets", extra={"worker": worker})
        self._dead, self._holders_known_at = dead, self.monotonic()
        self._held_by_dead = sum(held[who] for who in dead)
        heard = (who for who, state in states.items() if state in HEARD)
        refused = self.projection.refused_after(now - self.lease_s, besides=OTHERS_FAULTS)
        waits = {Address(worker): int(count) for worker, count in waiting}
        holding, busy = Counter(held) + Counter(waits) + refused, self.unit_cap.busy(now)
        contenders = [
            each
            for each in self._contenders.note(members, heard, holding.keys() | busy)
            if states[each.address] in MAY_WORK
        ]
        silent = [members[who] for who, state in states.items() if state is WorkerState.DEAD]
        self._shares.note(contenders, holding, busy, silent)

    def _oldest_version(self) -> int:
        checkpoint = self.projection.checkpoint
        return (checkpoint.version if checkpoint else 0) - self.training.max_async_level

    def _checkpoint(self, version: PolicyVersion | None, step: Step) -> CheckpointView:
        """Return `version` if it is published and the step may train on it; else the newest
        version.
        """
        newest = self.projection.checkpoint
        assert newest is not None  # there is a ticket to give
        if version is None or not self.training.may_train_on(version, step):
            return newest
        return self.projection.run.checkpoints.get(version, newest)

    def _give(
        self, snapshot: Snapshot, worker: MemberView, version: PolicyVersion | None
    ) -> SignedTicket:
        step = next_step(snapshot.used, snapshot.outstanding, self.training.submissions_per_step)
        # A reorganisation during the database query may have removed this version.
        step = max(step, snapshot.first_step)
        account, checkpoint = snapshot.accounts[worker.address], self._checkpoint(version, step)
        ticket = Ticket(
            run_id=self.projection.run_id,
            worker=worker.address,
            step=step,
            index=self._next_index(account, worker, step),
            policy_version=checkpoint.version,
            policy_root=checkpoint.manifest_root,
            beacon=worker.beacon_under(checkpoint),
            deadline=snapshot.now + self.lease_s,
        )
        signed = SignedTicket(ticket, sign(digest(self.domain, ticket.struct_hash()), self.key))
        snapshot.note(worker.node, signed.ticket, signed.signature)
        return signed

    def _next_index(self, account: WorkerRows, worker: MemberView, step: Step) -> int:
        """Return the slot of a worker's next ticket, drawn with a secret that all replicas
        share."""
        run_id, used = self.projection.run_id, account.slots.get(step, set())
        drawn = keccak(
            self._secret + abi_words(run_id, address_bytes(worker.address), step, len(used))
        )

        def is_free(index: int) -> bool:
            # Some slots were used on chain without this database: direct submissions, or before it
            # was lost.
            is_used = self.projection.slot_used(worker.worker_id, step, index)
            return index not in used and not is_used

        for first in count(0, INDEX_BLOCK):
            free = [i for i in range(first, first + INDEX_BLOCK) if is_free(i)]
            if free:
                return free[int.from_bytes(drawn[:8], "big") % len(free)]
        raise AssertionError("count does not end")


@dataclass(frozen=True, slots=True)
class Unfilled:
    """A ticket that waits for its submission."""

    step: int
    """Rollout step of its slot."""
    index: int
    """Number of its slot."""
    deadline: int
    """Chain time at which it is due."""
    policy_version: int
    ticket: str
    """JSON."""
    signature: bytes

    def is_worth(self, now: int, oldest: int) -> bool:
        """Return whether a step may still train on work for it."""
        return self.deadline >= now and self.policy_version >= oldest


@dataclass(slots=True)
class WorkerRows:
    """One worker's rows in the database."""

    unfilled: list[Unfilled]
    """Its unfilled tickets, oldest first."""
    waiting_units: int
    """Units of its submissions that are in no batch."""
    slots: dict[Step, set[int]]
    """The indexes of its slots, for each step that tickets may be for."""
    past: list[Past]
    """Its last tickets, oldest first."""
    reports: Rows
    """The stored report on its machine: one row, or none."""

    @staticmethod
    def questions(worker: MemberView, *, counts_from: int, since: Step) -> list[Statement]:
        """Return the queries about a worker: tickets due at `counts_from` or later, slots of steps
        from `since` on.
        """
        return [
            statements.unfilled_leases(worker=worker.address, since=counts_from),
            statements.waiting_units(worker=worker.address),
            statements.slots(worker=worker.address, since=since),
            statements.last_tickets(worker=worker.address, limit=HISTORY),
            statements.hardware_report(node=worker.node),
        ]

    @classmethod
    def read(cls, answers: Sequence[Rows]) -> WorkerRows:
        """Parse the answers to `questions`."""
        unfilled, [(units,)], numbers, tickets, reports = answers
        slots: dict[Step, set[int]] = {}
        for step, number in numbers:
            slots.setdefault(Step(step), set()).add(number)
        past = [Past(*row) for row in reversed(tickets)]
        return cls([Unfilled(*row) for row in unfilled], int(units or 0), slots, past, reports)

    def open_ticket(self, now: int, oldest: int, *, besides: Slots) -> Unfilled | None:
        """Return its newest ticket that is still worth working on, of any of its nodes, except
        those in `besides`.
        """
        for each in reversed(self.unfilled):
            if each.is_worth(now, oldest) and (each.step, each.index) not in besides:
                return each
        return None


@dataclass(slots=True)
class Snapshot:
    """The figures and rows that one transaction has read, and the tickets it has issued."""

    now: int
    """The chain's time."""
    used: int
    """Submissions used by training."""
    outstanding: int
    """Submissions that are leased, received or committed and not judged."""
    first_step: Step
    """Slots of earlier steps were not read."""
    accounts: Mapping[Address, WorkerRows]
    """Rows of each asking worker."""
    given: list[Statement] = field(default_factory=list)
    """Statements that store the issued tickets."""

    def note(self, node: Address, ticket: Ticket, signature: bytes) -> None:
        """Add an issued ticket."""
        text = json.dumps(ticket.to_json())
        account = self.accounts[ticket.worker]
        slot, due = (ticket.step, ticket.index), ticket.deadline
        account.unfilled.append(Unfilled(*slot, due, ticket.policy_version, text, signature))
        account.past.append(Past(*slot, due, None, None, None))
        account.slots.setdefault(ticket.step, set()).add(ticket.index)
        self.outstanding += 1
        self.given.append(statements.new_lease(node, ticket, text, signature))
