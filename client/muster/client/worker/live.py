"""The live view of a worker on a terminal, refreshed once a second if something changed.

Reads the loop and changes nothing in it. Without a terminal, log lines have the same content.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from muster.client.cli.printing import printable
from muster.client.quantities import format_duration, format_tokens

if TYPE_CHECKING:
    from muster.chain import Chain
    from muster.client.settings import WorkerSettings
    from muster.client.worker.loop import WorkerLoop
    from muster.client.worker.process import Watch

LOOK_S = 1.0
"""Seconds between two refreshes."""
EVENTS = 8
"""Number of latest log lines shown."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Content of the live view."""

    title: str
    """The staking wallet, and the run."""
    rows: tuple[tuple[str, str], ...]
    """Names and figures; the first row is the worker's activity."""
    is_waiting: bool
    """Whether a dependency is not available."""
    events: tuple[str, ...]
    """Latest log lines, oldest first."""


class EventLog(logging.Handler):
    """Keeps the latest log lines for the live view."""

    def __init__(self, formatter: logging.Formatter | None) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: deque[str] = deque(maxlen=EVENTS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(self.format(record))


def take_picture(loop: WorkerLoop, events: tuple[str, ...], *, now: int, window_s: int) -> Picture:
    """Return the state of a worker at `now`; outcomes are final `window_s` after posting."""
    context, run_id, worker = loop.context, loop.context.run_id, loop.context.worker
    waiting, lasting = len(context.unfinished), context.held.outages.lasting
    rows = {
        "state": loop.doing + (f", waiting for {' and '.join(lasting)}" if lasting else ""),
        "policy": _policy(loop),
        "ticket": _ticket(loop, now),
        "speed": f"{loop.tokens_per_s:,.0f} tokens/s" if loop.tokens_per_s else "-",
        "work": f"{sum(each.uploads.count for each in loop.loops)} uploaded, {waiting} waiting; "
        f"{len(loop.outcomes.earned)} accepted, {loop.outcomes.refused} not",
        "money": _money(loop, now - window_s),
        "stake": f"{format_tokens(context.view.stake(run_id, worker).active_wei)} tokens",
    }
    title = f"worker {worker}, run {run_id}"
    return Picture(title, tuple(rows.items()), bool(lasting), events)


def _policy(loop: WorkerLoop) -> str:
    newest = loop.context.run.latest_version
    if loop.policy_version is None:
        return "none yet"
    is_newest = newest in (None, loop.policy_version)
    return f"{loop.policy_version}" + ("" if is_newest else f", newest {newest}")


def _ticket(loop: WorkerLoop, now: int) -> str:
    tickets = loop.context.held.tickets
    if not tickets:
        return "none"
    first = min(tickets, key=lambda each: each.deadline)
    left = first.deadline - now
    due = f"due in {format_duration(left)}" if left > 0 else "late"
    more = f", and {len(tickets) - 1} more" if len(tickets) > 1 else ""
    return f"step {first.step}, index {first.index}, {due}{more}"


def _money(loop: WorkerLoop, final_before: int) -> str:
    context = loop.context
    earned = sum(amount for _, amount in loop.outcomes.earned)
    final = sum(amount for posted_at, amount in loop.outcomes.earned if posted_at <= final_before)
    paid = sum(
        payment.amount_wei
        for payment in context.view.payments
        if (payment.run_id, payment.worker) == (context.run_id, context.worker)
    )
    parts = (earned, max(final - paid, 0), paid)
    return "{} earned, {} claimable, {} paid".format(*map(format_tokens, parts))


def draw(picture: Picture) -> Group:
    """Return a picture in drawable form."""
    figures = Table(box=None, show_header=False, pad_edge=False)
    figures.add_column(style="bold", width=7)
    figures.add_column(overflow="fold")
    for name, figure in picture.rows:
        colour = "yellow" if picture.is_waiting else "green"
        figures.add_row(name, Text(figure, style=colour if name == "state" else ""))
    lines = [Text(printable(line), style="dim", overflow="ellipsis") for line in picture.events]
    for line in lines:
        line.no_wrap = True
    return Group(Text(picture.title, style="bold"), figures, Text(), *lines)


class LiveView:
    """Shows pictures, with log lines in them, on a terminal until cancelled."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.time) -> None:
        self._console = console
        self._clock = clock

    async def run(self, loop: WorkerLoop, chain: Chain) -> None:
        """Show what a worker does."""
        window_s = await chain.ledger.challenge_window()
        root = logging.getLogger()
        handlers = root.handlers[:]
        log = EventLog(handlers[0].formatter if handlers else None)
        root.handlers = [log]
        try:
            with Live(console=self._console, auto_refresh=False) as live:
                await self._show(live, loop, log, window_s)
        finally:
            root.handlers = handlers

    async def _show(self, live: Live, loop: WorkerLoop, log: EventLog, window_s: int) -> None:
        shown = None
        while True:
            now = int(self._clock())
            picture = take_picture(loop, tuple(log.lines), now=now, window_s=window_s)
            if picture != shown:
                live.update(draw(picture), refresh=True)
                shown = picture
            await asyncio.sleep(LOOK_S)


def make_watch(settings: WorkerSettings) -> Watch | None:
    """Return the live view if the output is a terminal, else None."""
    console = Console(stderr=True)
    if settings.plain or not console.is_terminal:
        return None
    return LiveView(console).run
