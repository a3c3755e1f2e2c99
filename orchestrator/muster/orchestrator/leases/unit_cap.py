"""The unit cap: a worker has no more units in flight than its stake covers.

Units in flight can still turn out to be fraud: open leases at the most they can bring, units that
were uploaded or committed, and units whose outcomes are not final. The ledger does not count them,
so tickets alone bound them. The lapsed tickets of a worker that lets one after another lapse count,
too, as if it had filled them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from muster.chain import MemberView
from muster.orchestrator.db.query import Rows
from muster.orchestrator.intake.batching import Batching
from muster.orchestrator.ports import Constants
from muster.orchestrator.projection import Projection
from muster.protocol.ids import Address, Hash32
from muster.protocol.messages import COMMIT_GRACE_S
from muster.protocol.recipe import SamplingRecipe


def max_units(sampling: SamplingRecipe) -> int:
    """Return the most units that one submission can be worth."""
    return sampling.problems_per_submission * sampling.samples_per_problem * sampling.max_new_tokens


def free_leases(in_flight: int, per_lease: int, active_wei: int, stake_per_unit: int) -> int:
    """Return how many leases of so many units a stake covers beside the units in flight."""
    return max(0, active_wei // stake_per_unit - in_flight) // per_lease


class UnitCap:
    """Says how many more leases are covered by their worker's stake.

    What is in a batch does not change any more, so it is read once, when the batch is first met.
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
        self._max_units = max_units(sampling)
        self._constants = constants
        self._batches: dict[Hash32, dict[Address, int]] = {}
        self._in_batches: Counter[Address] = Counter()

    @property
    def busy(self) -> Collection[Address]:
        """The workers with work in batches without outcomes."""
        return self._in_batches.keys()

    def counts_from(self, now: int, *, lapses: bool) -> int:
        """Return the deadline from which a ticket that is not filled is in flight: while its upload
        can be committed, and if `lapses` count for as long as its work would have been in flight.
        """
        return now - COMMIT_GRACE_S - lapses * self._constants.challenge_s

    def unknown_batches(self, now: int) -> list[Hash32]:
        """Return the batches in flight whose content must be told with `note_batch` first."""
        final_before = now - self._constants.outcome_deadline_s - self._constants.challenge_s
        unsettled = self._projection.unsettled
        open_ids = {batch.batch_id for batch in unsettled}
        # Work taken out of a batch counts with that batch until it is void.
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
        """Take note of each worker's units in a batch."""
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
        """Return the worker's units in flight: of so many leases at their maximum, of its
        submissions that are in no batch, of batches without outcomes, and of outcomes that are
        not final.
        """
        posted = self._projection.posted_units(
            worker.worker_id, posted_after=now - self._constants.challenge_s
        )
        return leased * self._max_units + waiting + self._in_batches[worker.address] + posted
