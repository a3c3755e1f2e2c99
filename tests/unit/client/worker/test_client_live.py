"""The live view: every figure of a worker in its place, strangers' words harmless."""

import asyncio
import logging
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from worlds.client_desk import Desk, make_record
from worlds.client_world import NOW, RUN, WORKER, make_ticket

from muster.client.outage import Outages
from muster.client.settings import WorkerSettings
from muster.client.worker.live import EVENTS, EventLog, LiveView, draw, make_watch, take_picture
from muster.protocol.errors import ApiError
from muster.protocol.messages import Reason, Verdict

WINDOW_S = 30
TOKEN = 10**18


def shown(desk: Desk, *events: str, now: int = NOW, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width, force_terminal=False)
    console.print(draw(take_picture(desk.loop, events, now=now, window_s=WINDOW_S)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def test_a_worker_that_has_done_nothing_yet_shows_that(desk: Desk) -> None:
    assert shown(desk).splitlines() == [
        f"worker {WORKER}, run {RUN}",
        "state    starting",
        "policy   none yet",
        "ticket   none",
        "speed    -",
        "work     0 uploaded, 0 waiting; 0 accepted, 0 not",
        "money    0 earned, 0 claimable, 0 paid",
        "stake    100 tokens",
        "",
    ]


async def test_work_and_its_outcomes_are_counted(desk: Desk) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    await desk.loop.work_once()
    assert "1 uploaded, 1 waiting; 0 accepted, 0 not" in shown(desk)
    rejected = make_record(Verdict.REJECTED, Reason.LATE, index=1)
    await desk.loop.on_change([desk.post(1, make_record(), rejected)])
    await desk.loop.settle()
    text = shown(desk)
    assert "1 uploaded, 0 waiting; 1 accepted, 1 not" in text
    assert "policy   3\n" in text
    assert "tokens/s" in text


async def test_money_is_claimable_once_the_window_is_over_and_until_it_is_paid(desk: Desk) -> None:
    desk.view.batches[1] = None
    event = desk.post(1, make_record())
    desk.view.batches[1].price_per_unit = TOKEN
    await desk.loop.on_change([event])
    await desk.loop.settle()
    posted_at = desk.view.batches[1].posted_at
    assert "20 earned, 0 claimable, 0 paid" in shown(desk, now=posted_at + WINDOW_S - 1)
    assert "20 earned, 20 claimable, 0 paid" in shown(desk, now=posted_at + WINDOW_S)
    payment = SimpleNamespace(run_id=RUN, worker=WORKER, amount_wei=20 * TOKEN)
    others = SimpleNamespace(run_id=RUN, worker="0x", amount_wei=TOKEN)
    desk.view.payments.extend([payment, others])
    assert "20 earned, 0 claimable, 20 paid" in shown(desk, now=posted_at + WINDOW_S)


@pytest.mark.parametrize(
    ("now", "says"), [(NOW, "due in 10 min"), (NOW + 599, "due in 1 s"), (NOW + 600, "late")]
)
def test_a_ticket_shows_how_long_it_has_left(desk: Desk, now: int, says: str) -> None:
    desk.loop.context.held.tickets.append(make_ticket())
    assert f"step 4, index 0, {says}" in shown(desk, now=now)


def test_a_newer_policy_is_named(desk: Desk) -> None:
    desk.loop.station.loaded = (2, b"")  # type: ignore[assignment]
    assert "policy   2, newest 3\n" in shown(desk)


def test_an_outage_is_named_until_it_is_over(desk: Desk) -> None:
    desk.loop.held.outages = Outages()
    desk.loop.held.outages.failed(ApiError("away", status=503, code="unreachable"))
    assert "state    starting, waiting for the orchestrator\n" in shown(desk)
    desk.loop.held.outages.recovered()
    assert "state    starting\n" in shown(desk)


def test_events_are_one_line_each_and_drive_no_terminal(desk: Desk) -> None:
    hostile = "refused error=\x1b[2J" + "x" * 300
    lines = shown(desk, "first", hostile, width=60).splitlines()
    assert lines[-2] == "first"
    assert lines[-1].startswith("refused error=\ufffd[2J")
    assert len(lines[-1]) == 60


def test_only_the_latest_events_are_kept() -> None:
    log = EventLog(None)
    for n in range(EVENTS + 3):
        log.emit(logging.makeLogRecord({"msg": f"event {n}"}))
    assert list(log.lines) == [f"event {n}" for n in range(3, EVENTS + 3)]


async def test_logs_go_into_the_view_and_back_to_their_handlers_after_it(desk: Desk) -> None:
    async def window() -> int:
        return WINDOW_S

    chain: Any = SimpleNamespace(ledger=SimpleNamespace(challenge_window=window))
    console = Console(file=StringIO(), width=100, force_terminal=True, color_system=None)
    root = logging.getLogger()
    before = root.handlers[:]
    root.setLevel(logging.INFO)
    running = asyncio.ensure_future(LiveView(console, clock=lambda: NOW).run(desk.loop, chain))
    async with asyncio.timeout(5):
        while f"worker {WORKER}" not in console.file.getvalue():  # type: ignore[attr-defined]
            await asyncio.sleep(0.001)
    assert len(root.handlers) == 1
    assert isinstance(root.handlers[0], EventLog)
    running.cancel()
    await asyncio.wait([running])
    assert root.handlers == before


def test_there_is_no_view_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"run": 1, "orchestrator": "http://o", "state_dir": "s", "worker": "0x" + "ab" * 20}
    settings = WorkerSettings(**given)  # type: ignore[arg-type]
    assert make_watch(settings) is None
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert make_watch(settings) is not None
    assert make_watch(settings.model_copy(update={"plain": True})) is None


async def test_a_look_at_an_idle_worker_draws_nothing_twice(desk: Desk) -> None:
    first = take_picture(desk.loop, (), now=NOW, window_s=WINDOW_S)
    assert take_picture(desk.loop, (), now=NOW + 60, window_s=WINDOW_S) == first
    desk.loop.state = "idle"
    assert take_picture(desk.loop, (), now=NOW, window_s=WINDOW_S) != first
