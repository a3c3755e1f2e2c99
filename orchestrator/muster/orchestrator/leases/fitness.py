"""Whether a worker may get a ticket: by the ends of its last ones, and by its machine.

A ticket is held from its lease until its work is judged, or its time is over. The allowance is a
congestion window (Jacobson 1988): accepted work opens it, a ticket that lapsed or whose work was
refused halves it. A window below one is a share of time: that part of a lease's time has to pass
after the last fault. Refused work frees its place no sooner than a lapse would, so that filling a
ticket with nothing does not get rid of it faster.

Open tickets at the same moment, for a machine with several engines or one that asks ahead, are
earned: one, and one more for each that was accepted since the last fault and came with a quarter of
its time to spare. So nothing that a worker says of its speed is believed, and whoever lets a ticket
lapse has one open ticket again.

The allowance is pure. Nothing of it is stored: it follows from the worker's leases and submissions
and from the chain, so every replica and every restart comes to the same, whichever nodes the worker
had.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any

from sqlalchemy import select

from muster.orchestrator.db import Database
from muster.orchestrator.db.query import Query, Rows, Statement, latest_row
from muster.orchestrator.db.tables import hardware
from muster.orchestrator.http.errors import refuse
from muster.orchestrator.projection import Judged
from muster.protocol.eip712 import Domain, digest, recover
from muster.protocol.errors import EncodingError, SignatureError
from muster.protocol.ids import Address, Hash32, RunId
from muster.protocol.messages import HardwareReport, Reason, Verdict
from muster.protocol.recipe import HardwareRecipe

HISTORY = 32
"""A worker's last tickets, which count."""
FIRST, MOST, LEAST = 4.0, 16.0, 1 / 64
"""The window of a newcomer, the largest and the smallest."""
SPARE = 0.25
"""Part of a lease that a worker leaves, of which more at the same moment is expected."""
LONGEST_WAIT_S = 3600
"""A worker that let many tickets lapse may try again after this time."""
OTHERS_FAULTS = frozenset(
    {
        Reason.UNKNOWN_TICKET,
        Reason.LATE,
        Reason.SLOT_REUSED,
        Reason.FILE_UNAVAILABLE,
        Reason.BATCH_MISDECLARED,
    }
)
"""Refusals that whoever committed the batch can cause."""


@dataclass(frozen=True, slots=True)
class Past:
    """A ticket that a worker had, or has."""

    step: int
    """Rollout step of its slot."""
    index: int
    """Number of its slot."""
    deadline: int
    """Chain time until which it could be filled."""
    received_at: int | None
    """Chain time at which it was; None where it was not."""
    units: int | None
    """Units claimed for it."""
    file_hash: Hash32 | None
    """The file that fills it."""

    def is_over(self, now: int) -> bool:
        """Return whether nobody works on it any more."""
        return self.received_at is not None or self.deadline < now

    def was_early(self, lease_s: int) -> bool:
        """Return whether it was filled with a part of its time to spare, `SPARE`."""
        return self.received_at is not None and (
            self.received_at <= self.deadline - SPARE * lease_s
        )


class TicketEnd(Enum):
    """How a ticket ended, or that it has not."""

    OPEN = auto()
    """It may still be filled."""
    WAITING = auto()
    """Its work is not judged."""
    ACCEPTED = auto()
    """Its work was accepted."""
    LOST = auto()
    """It lapsed, or its work was refused."""
    EXCUSED = auto()
    """Its work was refused through no fault of the worker, or came by another way."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a worker may hold, and holds."""

    window: float
    """Tickets it may hold; below 1 a share of time."""
    held: int
    """Tickets it holds."""
    side_by_side: int
    """Tickets it may have open at the same moment."""
    free_at: int
    """Chain time before which it gets no other."""

    def covers_another(self, share: int, now: int, *, is_open: int = 0) -> bool:
        """Return whether it may have one more, when `share` of all are its at most, and `is_open`
        of those that it holds are worth working on.
        """
        if now < self.free_at or is_open >= self.side_by_side:
            return False
        return self.held < min(share, max(1, int(self.window)))


def end_of(
    ticket: Past,
    judged: Callable[[Hash32], Judged | None],
    is_used: Callable[[int, int], bool],
    now: int,
) -> TicketEnd:
    """Return what became of a ticket; `is_used` tells whether the chain judged work for a slot."""
    if ticket.file_hash is None:
        if ticket.deadline >= now:
            return TicketEnd.OPEN
        # Its worker committed the work itself.
        return TicketEnd.EXCUSED if is_used(ticket.step, ticket.index) else TicketEnd.LOST
    found = judged(ticket.file_hash)
    if found is None:
        return TicketEnd.WAITING
    if found.verdict is Verdict.ACCEPTED:
        return TicketEnd.ACCEPTED
    return TicketEnd.EXCUSED if found.reason in OTHERS_FAULTS else TicketEnd.LOST


def allowance_of(
    tickets: Sequence[tuple[Past, TicketEnd]], now: int, *, lease_s: int, outcome_deadline_s: int
) -> Allowance:
    """Return the allowance that follows from a worker's last tickets, oldest first.

    Work whose outcome is overdue is held no more: silent validators stop nobody.
    """
    window, held, lost_at, side_by_side = FIRST, 0, 0, 1
    for ticket, end in tickets:
        if end is TicketEnd.ACCEPTED:
            window = min(MOST, window + 1 if window >= 1 else 2 * window)
            side_by_side += ticket.was_early(lease_s)
        elif end is TicketEnd.LOST:
            window, lost_at, side_by_side = max(LEAST, window / 2), ticket.deadline, 1
        is_due = (ticket.received_at or 0) + outcome_deadline_s < now
        held += (
            end is TicketEnd.OPEN
            or (end is TicketEnd.WAITING and not is_due)
            or (end is TicketEnd.LOST and ticket.deadline >= now)
        )
    wait_s = min(LONGEST_WAIT_S, int(lease_s * (1 / window - 1)))
    free_at = lost_at + wait_s if window < 1 else 0
    return Allowance(window, held, side_by_side, free_at)


# The machines that get work: the recipe's demands, the nodes' reports, and measured speed.
#
# A report is signed, so a node answers for it, but it proves nothing. Measured time counts: the
# first tickets of a worker are its challenge, whichever nodes it has. A worker that claims units
# which it did not generate is slashed, so units per second between lease and upload cannot be made
# up.

CHALLENGES = 3
"""Tickets by the best of which a machine is measured: one may fall into a bad moment."""
RETEST_S = 3600
"""A machine that was too slow gets another ticket after this time."""
_KEEP = latest_row(hardware)
_ALL = Query(select(hardware.c.node, hardware.c.report))()


class Unfit(StrEnum):
    """Why a machine gets no ticket."""

    UNKNOWN = "hardware_unknown"
    """It has not said what it has."""
    SHORT = "hardware_short"
    """It says it has less than the run asks for."""
    SLOW = "too_slow"
    """It was slower on its last tickets than the run asks for."""


@dataclass(frozen=True, slots=True)
class Timed:
    """How a ticket went."""

    units: int
    """Units uploaded for it; 0 for nothing."""
    seconds: int
    """Seconds of the chain's clock from lease to upload, or to the deadline."""
    ended_at: int
    """Chain time of the upload, or the deadline."""

    @property
    def units_per_s(self) -> float:
        """What it achieved; the chain's clock counts whole seconds."""
        return self.units / max(self.seconds, 1)


def is_short(report: HardwareReport, asked: HardwareRecipe) -> bool:
    """Return whether a machine says it has less than is asked for."""
    return report.memory_mb < asked.min_memory_mb or report.gpu_memory_mb < asked.min_gpu_memory_mb


def is_slow(timed: list[Timed], asked: HardwareRecipe, now: int) -> bool:
    """Return whether a machine failed its challenge, and its time to try again has not come."""
    if len(timed) < CHALLENGES or not asked.min_units_per_s:
        return False
    best = max(each.units_per_s for each in timed)
    latest = max(each.ended_at for each in timed)
    return best < asked.min_units_per_s and now < latest + RETEST_S


class Hardware:
    """The reports of all nodes, and what the run asks for. Bounded by the registered nodes."""

    def __init__(
        self,
        database: Database,
        asked: HardwareRecipe,
        *,
        run_id: RunId,
        domain: Domain,
        lease_s: int,
    ) -> None:
        self._database = database
        self._asked = asked
        self._asks = asked != HardwareRecipe()
        self._run_id = run_id
        self._domain = domain
        self._lease_s = lease_s
        self._reports: dict[Address, HardwareReport] = {}

    @property
    def reports(self) -> Mapping[Address, HardwareReport]:
        """What each node last said."""
        return self._reports

    async def load(self) -> None:
        """Read what was said before the start."""
        [rows] = await self._database.search(_ALL)
        for node, report in rows:
            self._reports[Address(node)] = HardwareReport.from_json(json.loads(report))

    def note(self, node: Address, said: dict[str, Any], signature: bytes) -> Statement:
        """Remember a node's report; returns the row to write. Refuses what it did not sign."""
        try:
            report = HardwareReport.from_json(said)
            signer = recover(digest(self._domain, report.struct_hash()), signature)
        except (EncodingError, SignatureError) as error:
            raise refuse("bad_hardware_report", str(error)) from error
        if (signer, report.node, report.run_id) != (node, node, self._run_id):
            raise refuse("bad_hardware_report", "the report is another node's, or for another run")
        self._reports[node] = report
        return _KEEP(
            node=node,
            report=json.dumps(report.to_json()),
            signature=signature,
            report_hash=report.struct_hash(),
        )

    def wants(self, node: Address) -> bool:
        """Return whether the run asks something of machines, and this one has said nothing."""
        return self._asks and node not in self._reports

    def fault(self, node: Address, reports: Rows, past: Sequence[Past], now: int) -> Unfit | None:
        """Return why a node's machine gets no ticket, or None; from what the database has of it and
        its worker's last tickets, oldest first.
        """
        if not self._asks:
            return None
        report = self._reports.get(node)
        if report is None and reports:
            # It told another replica.
            report = self._reports[node] = HardwareReport.from_json(json.loads(reports[0][0]))
        if report is None:
            return Unfit.UNKNOWN
        if is_short(report, self._asked):
            return Unfit.SHORT
        timed = [self._time(each) for each in past if each.is_over(now)]
        return Unfit.SLOW if is_slow(timed[-CHALLENGES:], self._asked, now) else None

    def _time(self, past: Past) -> Timed:
        ended_at = past.deadline if past.received_at is None else past.received_at
        return Timed(past.units or 0, ended_at - (past.deadline - self._lease_s), ended_at)
