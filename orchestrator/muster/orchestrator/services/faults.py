"""Faults of validators that prove themselves, and whom to have punished for them.

Anyone may send these transactions; the orchestrator does so that nobody has to. It is paid a capped
share for reporting silence, so it reports only what another validator's word shows to be silence:
where nobody handed in outcomes, the batch may not have been there to be judged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from muster.chain import BatchView, Fault
from muster.orchestrator.db.engine import Database
from muster.orchestrator.db.outcomes import outcomes_of
from muster.orchestrator.ports import FaultsPort
from muster.orchestrator.services.projection import Projection
from muster.protocol.encoding import abi_words, address_bytes, keccak
from muster.protocol.ids import Address, Hash32

MAX_OVERDUE = 500
"""Overdue batches that are looked at, the latest: SQLite limits the variables of a statement."""


@dataclass(frozen=True, slots=True)
class ValidatorFault:
    """A validator that can be punished."""

    validator: Address
    """Who."""
    fault: Fault
    """For what."""
    subject: Hash32
    """About what: the batch's number, or the outcome's leaf."""
    batch_id: int
    """The batch."""
    position: int | None = None
    """The outcome's place in it; None when it is about the batch."""

    def offence(self) -> Hash32:
        """Return what the slash is filed under."""
        number = self.fault.number
        return keccak(abi_words(number, self.subject, address_bytes(self.validator)))


class Faults:
    """What validators did that is to be punished, derived from the chain and what was handed in."""

    def __init__(
        self,
        database: Database,
        projection: Projection,
        *,
        outcome_deadline_s: int,
        now: Callable[[], int],
    ) -> None:
        self._database = database
        self._projection = projection
        self._deadline_s = outcome_deadline_s
        self._now = now

    async def to_punish(self) -> list[ValidatorFault]:
        """Return the faults that nobody has had punished yet."""
        stakes = self._projection.view.stakes
        filed = {slash.offence for slash in self._projection.view.slashes}
        found = [*self._of_cases(), *await self._silences()]
        return [
            fault
            for fault in found
            if fault.offence() not in filed
            and fault.validator in stakes
            and stakes[fault.validator].active_wei + stakes[fault.validator].unbonding_wei > 0
        ]

    async def report(self, fault: ValidatorFault, court: FaultsPort) -> None:
        """Have a fault punished."""
        batch = self._projection.view.batches[fault.batch_id]
        if fault.fault is Fault.MISSED_DEADLINE:
            await court.slash_overdue(batch.header(), fault.validator)
        elif fault.fault is Fault.ABSENT_JUROR:
            await court.slash_absent_juror(fault.subject, fault.validator)
        else:
            assert fault.position is not None
            await court.slash_signer(batch.prove(fault.position), fault.validator)

    def _of_cases(self) -> Iterator[ValidatorFault]:
        """Yield who signed an overturned outcome, and which jurors revealed no vote."""
        for case in self._projection.view.cases.values():
            batch = self._projection.batch(case.batch_id)
            if batch is None or not case.closed:
                continue
            for juror in case.jurors:
                if juror not in case.votes:
                    yield ValidatorFault(juror, Fault.ABSENT_JUROR, case.leaf, batch.batch_id)
            if case.overturned and batch.records is not None:
                for signer in self._signers(batch):
                    yield ValidatorFault(
                        signer, Fault.WRONG_VERDICT, case.leaf, batch.batch_id, case.position
                    )

    def _signers(self, batch: BatchView) -> list[Address]:
        return [v for v, bit in self._projection.run.seats.items() if bit & batch.signers]

    async def _silences(self) -> list[ValidatorFault]:
        """Return who let a batch become overdue although others judged it."""
        overdue_from = self._now() - self._deadline_s
        overdue = [b for b in self._projection.unjudged if b.committed_at <= overdue_from]
        if not overdue:
            return []
        overdue = overdue[-MAX_OVERDUE:]
        spoke: dict[int, set[str]] = defaultdict(set)
        for row in await outcomes_of(self._database, overdue):
            spoke[row.batch_id].add(row.validator)
        return [
            ValidatorFault(validator, Fault.MISSED_DEADLINE, _subject_of(batch), batch.batch_id)
            for batch in overdue
            for validator in batch.seated
            if spoke[batch.batch_id]
            and validator not in spoke[batch.batch_id]
            and validator in self._projection.run.validators
        ]


def _subject_of(batch: BatchView) -> Hash32:
    return Hash32(batch.batch_id.to_bytes(32, "big"))
