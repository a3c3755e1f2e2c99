"""The number of tickets that a worker may hold, from the ends of its last ones.

A ticket is held from its lease until its work is judged, or its time is over. The allowance is a
congestion window (Jacobson 1988): accepted work opens it, a ticket that lapsed or whose work was
refused halves it. A window below one is a share of time: that part of a lease's time has to pass
after the last fault. Refused work frees its place no sooner than a lapse would, so that filling a
ticket with nothing does not get rid of it faster.

Open tickets at the same moment, for a machine with several engines or one that asks ahead, are
earned: one, and one more for each that was accepted since the last fault and came with a quarter of
its time to spare. So nothing that a worker says of its speed is believed, and whoever lets a ticket
lapse has one open ticket again.

Pure. Nothing of it is stored: it follows from the worker's leases and submissions and from the
chain, so every replica and every restart comes to the same, whichever nodes the worker had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from muster.orchestrator.projection import Judged
from muster.protocol.ids import Hash32
from muster.protocol.messages import Reason, Verdict

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
