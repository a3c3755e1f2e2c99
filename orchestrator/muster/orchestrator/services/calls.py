"""Calls: which validators are to check which batch now, by `muster.protocol.schedule`.

Derived from the chain, from what validators handed in and from the chain's clock, so that every
replica and every restart comes to the same. Only who is absent is remembered beside that: a called
validator that let its time pass is not waited for again until it speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from muster.chain import BatchView
from muster.orchestrator.services.projection import Projection
from muster.protocol.ids import Address
from muster.protocol.schedule import (
    Calls,
    Statement,
    Timing,
    batch_seed,
    order_of_batch,
    plan_calls,
    timeout_of,
)


class Caller:
    """Calls validators for the batches of one run."""

    def __init__(
        self,
        projection: Projection,
        *,
        outcome_deadline_s: int,
        timeout_s: int | None,
        now: Callable[[], int],
    ) -> None:
        """`timeout_s` is how long a called validator may be silent; None for as long as can be."""
        self._projection = projection
        self._deadline_s = outcome_deadline_s
        longest = timeout_of(outcome_deadline_s)
        self._timeout_s = longest if timeout_s is None else min(timeout_s, longest)
        self._now = now
        self._absent_since: dict[Address, int] = {}

    @property
    def absent(self) -> Collection[Address]:
        """Seated validators that let the time of a call pass and were not heard of since."""
        return [v for v in self._projection.run.validators if v in self._absent_since]

    def open_batches(self) -> list[BatchView]:
        """Return the batches for which outcomes are still due, ascending."""
        due_before = self._now() - self._deadline_s
        return [b for b in self._projection.unjudged if b.committed_at > due_before]

    def plan(self, batch: BatchView, statements: Collection[Statement]) -> Calls:
        """Return who is called for a batch, and what is to be posted."""
        run, now = self._projection.run, self._now()
        seed = batch_seed(batch.beacon, batch.run_id, batch.batch_id, batch.root)
        self._note_heard(statements)
        calls = plan_calls(
            order_of_batch(seed, batch.seated, run.validators),
            self._projection.quorum_of(batch),
            Timing(batch.committed_at, self._deadline_s, self._timeout_s),
            now,
            statements,
            absent=self._absent_since,
        )
        for validator in calls.silent:
            self._absent_since.setdefault(validator, now)
        return calls

    def heard(self, validator: Address) -> None:
        """Note that a validator handed something in."""
        self._absent_since.pop(validator, None)

    def _note_heard(self, statements: Collection[Statement]) -> None:
        """Take note of what another replica heard."""
        for statement in statements:
            if statement.at >= self._absent_since.get(statement.validator, statement.at + 1):
                self.heard(statement.validator)
