"""Whether a worker may get a ticket, judged by its last tickets and by its machine.

A ticket is held from its lease until its work is judged, or its time is over. The allowance is a
congestion window (Jacobson 1988): accepted work widens it; a ticket that lapsed, or whose work was
refused, halves it. Lapses of tickets that were open together have one cause, and halve it once. A
ticket that this orchestrator closed, after an outage or a reorganisation, does not count. A window
below one is a share of time: a waiting time after the last fault. Refused work frees its place no
sooner than a lapse would, so an empty upload is no faster way to get rid of a ticket.

Several open tickets at a time, for a machine with several engines or one that leases ahead, must be
earned: one, and one more for each ticket that was accepted since the last fault and uploaded with a
quarter of its time to spare. So a worker's claims about its speed do not matter, and after a lapse
it is back to one open ticket.

The allowance is a pure function of the worker's leases and submissions and of the chain. Nothing of
it is stored, so every replica and every restart computes the same, whichever nodes the worker had.
"""

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
from muster.protocol.messages import HardwareReport, Verdict
from muster.protocol.reasons import OTHERS_FAULTS
from muster.protocol.recipe import HardwareRecipe

HISTORY = 32
"""Number of a worker's last tickets that count."""
FIRST, MOST, LEAST = 4.0, 16.0, 1 / 64
"""The window of a newcomer, the largest and the smallest window."""
SPARE = 0.25
"""Share of its time that a ticket must have left at upload to earn another open ticket."""
LONGEST_WAIT_S = 3600
"""Seconds after which a worker that let many tickets lapse may try again."""


@dataclass(frozen=True, slots=True)
class Past:
    """An earlier or current ticket of a worker."""

    step: int
    """Rollout step of its slot."""
    index: int
    """Number of its slot."""
    deadline: int
    """Chain time until which it could be filled."""
    received_at: int | None
    """Chain time at which it was filled; None if it was not."""
    units: int | None
    """Units claimed by its submission."""
    file_hash: Hash32 | None
    """The file that fills it."""

    def is_over(self, now: int) -> bool:
        """Return whether it is filled or past its deadline."""
        return self.received_at is not None or self.deadline < now

    def was_early(self, lease_s: int) -> bool:
        """Return whether it was filled with at least `SPARE` of its time left."""
        return self.received_at is not None and (
            self.received_at <= self.deadline - SPARE * lease_s
        )


class TicketEnd(Enum):
    """The end of a ticket, or its current state."""

    OPEN = auto()
    """It may still be filled."""
    WAITING = auto()
    """Its work is not judged yet."""
    ACCEPTED = auto()
    """Its work was accepted."""
    LOST = auto()
    """It lapsed, or its work was refused."""
    EXCUSED = auto()
    """Its work was refused through no fault of the worker, or was committed directly."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many tickets a worker may hold, and holds."""

    window: float
    """Tickets that it may hold; below 1 a share of time."""
    held: int
    """Tickets it holds."""
    side_by_side: int
    """Tickets that it may have open at the same time."""
    free_at: int
    """Chain time before which it gets no further ticket."""

    def covers_another(self, share: int, now: int, *, is_open: int = 0) -> bool:
        """Return whether it may have one more ticket. `share` is its limit by stake; `is_open` of
        its held tickets are still worth working on.
        """
        if now < self.free_at or is_open >= self.side_by_side:
            return False
        return self.held < min(share, max(1, int(self.window)))


def end_of(
    ticket: Past,
    judged: Callable[[Past, Hash32], Judged | None],
    is_used: Callable[[int, int], bool],
    now: int,
) -> TicketEnd:
    """Return the end of a ticket; `is_used` tells whether the chain judged work for a slot."""
    if ticket.file_hash is None:
        if ticket.deadline >= now:
            return TicketEnd.OPEN
        # The worker committed the work directly.
        return TicketEnd.EXCUSED if is_used(ticket.step, ticket.index) else TicketEnd.LOST
    found = judged(ticket, ticket.file_hash)
    if found is None:
        return TicketEnd.WAITING
    if found.verdict is Verdict.ACCEPTED:
        return TicketEnd.ACCEPTED
    return TicketEnd.EXCUSED if found.reason in OTHERS_FAULTS else TicketEnd.LOST


def allowance_of(
    tickets: Sequence[tuple[Past, TicketEnd]], now: int, *, lease_s: int, outcome_deadline_s: int
) -> Allowance:
    """Return the allowance that follows from a worker's last tickets, oldest first.

    Work whose outcome is overdue no longer counts as held, so silent validators stop nobody.
    """
    window, held, lost_at, side_by_side, lapsed_at = FIRST, 0, 0, 1, 0
    for ticket, end in tickets:
        if end is TicketEnd.ACCEPTED:
            window = min(MOST, window + 1 if window >= 1 else 2 * window)
            side_by_side += ticket.was_early(lease_s)
        elif end is TicketEnd.LOST:
            lost_at, side_by_side = ticket.deadline, 1
            is_lapse = ticket.received_at is None
            if not is_lapse or ticket.deadline - lease_s >= lapsed_at:
                window = max(LEAST, window / 2)
                lapsed_at = ticket.deadline if is_lapse else lapsed_at
        is_due = (ticket.received_at or 0) + outcome_deadline_s < now
        held += (
            end is TicketEnd.OPEN
            or (end is TicketEnd.WAITING and not is_due)
            or (end is TicketEnd.LOST and ticket.deadline >= now)
        )
    wait_s = min(LONGEST_WAIT_S, int(lease_s * (1 / window - 1)))
    free_at = lost_at + wait_s if window < 1 else 0
    return Allowance(window, held, side_by_side, free_at)


# Which machines get work: the recipe's requirements, the nodes' reports, and measured speed.
#
# A report is signed but proves nothing. Measured time counts: the first tickets of a worker are its
# challenge, whichever nodes it has. A worker that claims units which it did not generate is
# slashed, so the units per second between lease and upload cannot be faked.

CHALLENGES = 3
"""Tickets of a challenge; the best one counts, because others may fall into a bad moment."""
RETEST_S = 3600
"""Seconds after which a machine that was too slow gets another ticket."""
_KEEP = latest_row(hardware)
_ALL = Query(select(hardware.c.node, hardware.c.report))()


class Unfit(StrEnum):
    """Why a machine gets no ticket."""

    UNKNOWN = "hardware_unknown"
    """It has sent no report."""
    SHORT = "hardware_short"
    """Its report is below the run's requirements."""
    SLOW = "too_slow"
    """It was slower on its last tickets than the run requires."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Measured work on a ticket."""

    units: int
    """Units uploaded for it; 0 if nothing was."""
    seconds: int
    """Seconds of the chain's clock from lease to upload, or to the deadline."""
    ended_at: int
    """Chain time of the upload, or the deadline."""

    @property
    def units_per_s(self) -> float:
        """Units per second; the chain's clock counts whole seconds."""
        return self.units / max(self.seconds, 1)


def is_short(report: HardwareReport, asked: HardwareRecipe) -> bool:
    """Return whether a machine's report is below the requirements."""
    return report.memory_mb < asked.min_memory_mb or report.gpu_memory_mb < asked.min_gpu_memory_mb


def is_slow(timed: list[Timed], asked: HardwareRecipe, now: int) -> bool:
    """Return whether a machine failed its challenge and must not try again yet."""
    if len(timed) < CHALLENGES or not asked.min_units_per_s:
        return False
    best = max(each.units_per_s for each in timed)
    latest = max(each.ended_at for each in timed)
    return best < asked.min_units_per_s and now < latest + RETEST_S


class Hardware:
    """The reports of all nodes, and the run's requirements. Bounded by the registered nodes."""

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
        """The last report of each node."""
        return self._reports

    async def load(self) -> None:
        """Load the reports received before the start."""
        [rows] = await self._database.search(_ALL)
        for node, report in rows:
            self._reports[Address(node)] = HardwareReport.from_json(json.loads(report))

    def note(self, node: Address, said: dict[str, Any], signature: bytes) -> Statement:
        """Remember a node's report; returns the row to write. Refuses a report with a wrong
        signature."""
        try:
            report = HardwareReport.from_json(said)
            signer = recover(digest(self._domain, report.struct_hash()), signature)
        except (EncodingError, SignatureError) as error:
            raise refuse("bad_hardware_report", str(error)) from error
        if (signer, report.node, report.run_id) != (node, node, self._run_id):
            raise refuse(
                "bad_hardware_report", f"the report is not of node {node} for run {self._run_id}"
            )
        self._reports[node] = report
        return _KEEP(
            node=node,
            report=json.dumps(report.to_json()),
            signature=signature,
            report_hash=report.struct_hash(),
        )

    def wants(self, node: Address) -> bool:
        """Return whether the run has requirements and this node has sent no report."""
        return self._asks and node not in self._reports

    def fault(self, node: Address, reports: Rows, past: Sequence[Past], now: int) -> Unfit | None:
        """Return why a node's machine gets no ticket, or None. `reports` are its rows in the
        database, `past` its worker's last tickets, oldest first.
        """
        if not self._asks:
            return None
        report = self._reports.get(node)
        if report is None and reports:
            # The node sent its report to another replica.
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
