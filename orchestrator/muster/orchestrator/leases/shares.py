"""Shares of the tickets by stake, and turns among the workers that ask for them.

Shares are computed from the stakes of contenders: workers that hold tickets, or want some. A stake
that only sends heartbeats soon takes no share from the others. A worker whose share is at least one
ticket holds no more than its share; a fraction is rounded up or down by lot under each policy
version. Workers with smaller shares have the sum of their shares in common, so splitting a stake
among many workers gains no tickets.

The unit cap limits a worker's units in flight to those that its stake covers. Units in flight can
still turn out to be fraud: open leases at their maximum, uploaded or committed units, and units
whose outcomes are not final. The ledger does not count them, so only tickets bound them. If a
worker lets many tickets lapse, these count too, as if it had filled them.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Set
from dataclasses import dataclass
from math import ceil

from muster.chain import MemberView
from muster.orchestrator.db.query import Rows
from muster.orchestrator.intake.batching import Batching
from muster.orchestrator.ports import Constants
from muster.orchestrator.projection import Projection
from muster.protocol.encoding import keccak
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import COMMIT_GRACE_S
from muster.protocol.recipe import SamplingRecipe

_WHOLE = 1 << 64
CONTENDS_S = 60.0
"""Seconds for which a worker counts as wanting tickets after it asked, held one, or was heard for
the first time."""


class Contenders:
    """The workers whose stakes share the tickets.

    These hold tickets or want some. A worker that is heard for the first time counts too: it may be
    slower to ask than others are to take all. One that was refused through its own fault, while it
    held nothing, counts again when it may have a ticket.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` counts seconds."""
        self._clock = clock
        self._until: dict[Address, float] = {}
        self._unfit: set[Address] = set()
        self._holding: Set[Address] = frozenset()

    def note(
        self,
        members: Mapping[Address, MemberView],
        heard: Iterable[Address],
        holding: Set[Address],
    ) -> list[MemberView]:
        """Return the contenders among the members. `heard` are those with recent heartbeats,
        `holding` those with work that is not judged, or was refused lately.
        """
        now, self._holding = self._clock(), holding
        for who in heard:
            self._until.setdefault(who, now + CONTENDS_S)
        for who in holding:
            self._until[who] = now + CONTENDS_S
        self._unfit = (self._unfit & members.keys()) - holding
        self._until = {who: until for who, until in self._until.items() if who in members}
        return [
            members[who]
            for who, until in self._until.items()
            if until > now and who not in self._unfit
        ]

    def ask(self, worker: Address, *, is_fit: bool) -> None:
        """Note that a worker asks. It is fit if it may have a ticket now; that is not known while
        there is none.
        """
        if is_fit:
            self._unfit.discard(worker)
        self._until[worker] = self._clock() + CONTENDS_S

    def withdraw(self, worker: Address) -> None:
        """Note that a worker may have no ticket now, through its own fault."""
        if worker not in self._holding:
            self._unfit.add(worker)


class Shares:
    """Shares of tickets by stake."""

    def __init__(self, tickets: int) -> None:
        """`tickets` is the number that may be open at once."""
        self._tickets = tickets
        self._stakes: dict[Address, int] = {}
        self._total = 0
        self._held_by_small = 0
        self._of_small = 1

    def note(
        self,
        contenders: Iterable[MemberView],
        held: Mapping[Address, int],
        busy: Container[Address],
        dead: Iterable[MemberView] = (),
    ) -> None:
        """Update the inputs. `contenders` and the `dead` include all workers that hold tickets;
        `held` counts each worker's tickets that are open, filled and in no batch, or refused within
        the last lease time; `busy` are workers with work in batches that can still be judged.
        """
        self._stakes = {each.address: each.active_wei for each in contenders}
        self._total = sum(self._stakes.values())
        small = {who: stake for who, stake in self._stakes.items() if self._is_small(stake)}
        self._of_small = max(1, ceil(sum(small.values()) * self._tickets / max(1, self._total)))
        counted = set(small)
        if len(small) < len(self._stakes):
            # A gang that falls silent must not get its tickets again beside larger workers.
            counted.update(each.address for each in dead if self._is_small(each.active_wei))
        self._held_by_small = sum(held.get(who, 0) + (who in busy) for who in counted)

    def served(self, worker: MemberView) -> None:
        """Note that a worker got a ticket."""
        self._held_by_small += self._is_small(worker.active_wei)

    def of(self, worker: MemberView, beacon: Hash32) -> int:
        """Return how many tickets a worker may hold at most; `beacon` is that of the policy
        version."""
        mine = worker.active_wei
        total = self._total if worker.address in self._stakes else self._total + mine
        lot = int.from_bytes(keccak(beacon + worker.address.encode())[:8], "big")
        return max(1, (mine * self._tickets * _WHOLE + lot * total) // max(1, total * _WHOLE))

    def is_small(self, worker: MemberView) -> bool:
        """Return whether a worker's share is less than one ticket."""
        return self._is_small(worker.active_wei)

    def free_for_small(self, tickets: int) -> int:
        """Return how many of the tickets are for workers with a share of less than one."""
        return max(0, min(tickets, self._of_small - self._held_by_small))

    def _is_small(self, stake: int) -> bool:
        return stake * self._tickets < self._total


CLEAR_S = 0.5
"""Seconds between two removals of workers that stopped asking."""


@dataclass(slots=True)
class _Asker:
    ended: float
    """Virtual time at which its last ticket ended."""
    weight: int
    asked_at: float


class Turns:
    """Shares tickets among the workers that ask, when there are fewer tickets than workers.

    Start-time fair queueing (Goyal, Vin, Cheng 1996) with tickets as packets: each ticket of a
    worker starts at the later of the common clock and its own last end, and ends 1 / weight later.
    Those that start first are served first, and the common clock is the start of the last one
    served. So tickets are shared in proportion to weight among the workers that ask, nobody saves
    up turns while absent, and splitting a stake among many workers gains nothing.

    Pure except for the injected clock. While there are enough tickets for all, nobody waits.
    """

    def __init__(self, *, patience_s: float, clock: Callable[[], float]) -> None:
        """A worker that has not asked for `patience_s` loses its turn."""
        self._patience_s = patience_s
        self._clock = clock
        self._waiting: dict[Address, _Asker] = {}
        self._weights: dict[Address, int] = {}
        self._ended: dict[Address, float] = {}
        self._unfit: set[Address] = set()
        self._now = 0.0
        self._cleared_at = clock()

    def ask(self, worker: Address) -> None:
        """Note that a worker asks while there is no ticket for anybody."""
        if worker not in self._unfit:
            self._note(worker)

    def withdraw(self, worker: Address) -> None:
        """Note that a worker may have no ticket now, so that it loses its turn."""
        self._waiting.pop(worker, None)
        self._unfit.add(worker)

    def may_go(self, worker: Address, weight: int, tickets: int) -> bool:
        """Note that a worker asks, and return whether it gets one of the tickets."""
        self._unfit.discard(worker)
        self._weights[worker] = max(1, weight)
        asker = self._note(worker)
        if len(self._waiting) <= tickets:
            return True
        mine = self._turn(worker, asker)
        return sum(self._turn(n, a) < mine for n, a in self._waiting.items()) < tickets

    def _note(self, worker: Address) -> _Asker:
        now = self._clock()
        ended, weight = self._ended.get(worker, self._now), self._weights.get(worker, 1)
        self._waiting[worker] = asker = _Asker(ended, weight, now)
        self._forget(now)
        return asker

    def served(self, worker: Address) -> None:
        """Note that a worker got a ticket."""
        asker = self._waiting.pop(worker, None)
        if asker is not None:
            start = max(self._now, asker.ended)
            self._ended[worker] = start + 1 / asker.weight
            self._now = start

    def _turn(self, worker: Address, asker: _Asker) -> tuple[float, int, Address]:
        return max(self._now, asker.ended), -asker.weight, worker

    def _forget(self, now: float) -> None:
        """Remove workers that stopped asking, and turns that are over."""
        if now - self._cleared_at < CLEAR_S:
            return
        self._cleared_at = now
        gone = [n for n, a in self._waiting.items() if now - a.asked_at > self._patience_s]
        for worker in gone:
            del self._waiting[worker]
        self._ended = {n: ended for n, ended in self._ended.items() if ended > self._now}
        known = self._waiting.keys() | self._ended.keys()
        self._weights = {n: weight for n, weight in self._weights.items() if n in known}


# Units covered by a stake


def free_leases(in_flight: int, per_lease: int, active_wei: int, stake_per_unit: int) -> int:
    """Return how many leases of `per_lease` units a stake covers beside the units in flight."""
    return max(0, active_wei // stake_per_unit - in_flight) // per_lease


class UnitCap:
    """Computes how many more leases a worker's stake covers.

    The content of a batch never changes, so it is read once, when the batch is first seen.
    """

    def __init__(
        self,
        projection: Projection,
        batching: Batching,
        sampling: SamplingRecipe,
        constants: Constants,
    ) -> None:
        self._projection = projection
        self._batching = batching
        self._max_units = sampling.max_units
        self._constants = constants
        self._batches: dict[Hash32, dict[Address, int]] = {}
        self._in_batches: Counter[Address] = Counter()

    def busy(self, now: int) -> set[Address]:
        """Return the workers with work in batches that can still be judged. Those that are overdue
        do not count, so that silent validators do not stop the small stakes.
        """
        due_before = now - self._constants.outcome_deadline_s
        roots = {b.root for b in self._projection.unjudged if b.committed_at >= due_before}
        roots.update(self._batching.uncommitted_roots)
        return {who for root in roots for who in self._batches.get(root, ())}

    def counts_from(self, now: int, *, lapses: bool) -> int:
        """Return the earliest deadline of an unfilled ticket that counts as in flight: while its
        upload can still be committed or, with `lapses`, while its work would have been in flight.
        """
        return now - COMMIT_GRACE_S - lapses * self._constants.challenge_s

    def unknown_batches(self, now: int) -> list[Hash32]:
        """Return the batches in flight whose content must first be added with `note_batch`."""
        final_before = now - self._constants.outcome_deadline_s - self._constants.challenge_s
        unsettled = self._projection.unsettled
        open_ids = {batch.batch_id for batch in unsettled}
        # Work withdrawn from a batch counts with that batch until the batch is void.
        unjudged = {
            b.root: b
            for b in unsettled
            if b.committed_at > final_before and b.split_from not in open_ids
        }
        wanted = unjudged.keys() | set(self._batching.uncommitted_roots)
        for root in self._batches.keys() - wanted:
            self._in_batches.subtract(self._batches.pop(root))
            self._in_batches = +self._in_batches
        for root in wanted - self._batches.keys():
            batch = unjudged.get(root)
            if batch is not None and batch.direct is not None:
                self.note_batch(root, [(batch.direct.worker, batch.direct.units)])
        return list(wanted - self._batches.keys())

    def note_batch(self, root: Hash32, units: Rows) -> None:
        """Store each worker's units in a batch."""
        content = {Address(worker): int(of_worker) for worker, of_worker in units}
        self._batches[root] = content
        self._in_batches.update(content)

    def free(self, worker: MemberView, *, leased: int, waiting: int, now: int) -> int:
        """Return how many more leases the worker's stake covers, beside those in `in_flight`."""
        in_flight = self.in_flight(worker, leased=leased, waiting=waiting, now=now)
        return free_leases(
            in_flight, self._max_units, worker.active_wei, self._constants.stake_per_unit
        )

    def in_flight(self, worker: MemberView, *, leased: int, waiting: int, now: int) -> int:
        """Return the worker's units in flight: `leased` leases at their maximum, `waiting` units of
        submissions in no batch, units of batches without outcomes, and of outcomes that are not
        final.
        """
        posted = self._projection.posted_units(
            worker.worker_id, posted_after=now - self._constants.challenge_s
        )
        return leased * self._max_units + waiting + self._in_batches[worker.address] + posted
