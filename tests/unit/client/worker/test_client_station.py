"""Loops that share an engine: its policy, their order, and hopeless tickets."""

import asyncio
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_desk import Desk, run_until
from worlds.client_world import NOW, ROOT, RUN, VERSION, HashEngine, make_ticket

from muster.client.worker import loop
from muster.client.worker.context import Hope, Hopeless, Station
from muster.client.worker.loop import WorkerLoop
from muster.inference.engine import Progress
from muster.lifecycle import uptime_s
from muster.protocol.encoding import keccak
from muster.protocol.ids import PolicyVersion

P1, P2 = (PolicyVersion(1), ROOT), (PolicyVersion(2), ROOT)


def with_helper(desk: Desk, helper_context: Any = None) -> WorkerLoop:
    """Give the desk's loop a second one on the same engine, or on the engine of another context."""
    helper = WorkerLoop(helper_context or desk.loop.context)
    desk.loop.take_helpers([helper])
    return helper


class Slow(HashEngine):
    """Generates while a test lets it; records which loops do so at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.begun = 0
        self.due: list[int] = []
        self.at_once = self.most_at_once = 0

    def generate(self, requests: Any, **options: Any) -> Any:
        if "due" not in options:
            return super().generate(requests, **options)
        self.begun += 1
        self.due.append(options["due"])
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.go_on.wait(5)
        self.at_once -= 1
        return super().generate(requests, **options)


# The policy


async def test_another_policy_is_loaded_when_nobody_holds_the_present_one() -> None:
    station, loaded = Station(), []

    async def hold(policy: Any, until: asyncio.Event) -> None:
        async def load() -> None:
            loaded.append(policy)

        async with station.holding(policy, load):
            assert station.loaded == policy
            await until.wait()

    first, second = asyncio.Event(), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold(P1, first))
        await asyncio.sleep(0)
        tasks.create_task(hold(P2, second))
        await asyncio.sleep(0.01)
        # A loop that now asks for the present policy waits: else the next would never be loaded.
        tasks.create_task(hold(P1, second))
        await asyncio.sleep(0.01)
        assert loaded == [P1]
        first.set()
        await asyncio.sleep(0.01)
        assert loaded == [P1, P2]
        second.set()
    assert loaded == [P1, P2, P1]


async def test_a_load_that_fails_leaves_no_policy_and_the_next_one_loads_anew() -> None:
    station = Station()

    async def fail() -> None:
        raise RuntimeError("no")

    async def load() -> None:
        pass

    with pytest.raises(RuntimeError):
        async with station.holding(P1, fail):
            raise AssertionError
    assert station.loaded is None
    async with station.holding(P1, load):
        assert station.loaded == P1


# Two loops of one engine


async def test_the_next_ticket_is_generated_beside_the_first(tmp_path: Path) -> None:
    engine = Slow()
    desk = Desk(tmp_path, engine=engine)
    with_helper(desk)
    station = desk.loop.station
    station.took(1.0)
    desk.loop.context.held.lease_s = 600.0
    desk.orchestrator.tickets.extend(make_ticket(index=index) for index in range(4))

    def are_two_at_hand() -> bool:
        is_so = len(desk.loop.context.held.tickets) == 2 and engine.at_once == 2
        if is_so:
            engine.go_on.set()
        return is_so or engine.go_on.is_set()

    await run_until(desk.loop, are_two_at_hand)
    desk.close()
    again = Desk(tmp_path / "again", engine=engine)
    with_helper(again)
    again.orchestrator.tickets.extend(make_ticket(index=index) for index in range(6))
    await run_until(again.loop, lambda: len(again.orchestrator.uploads) == 6)
    # Each once, and the earlier deadline first.
    assert sorted(each[0].index for each in again.orchestrator.uploads) == list(range(6))
    assert engine.most_at_once == 2
    assert set(engine.due) == {make_ticket().deadline}
    assert not again.loop.context.held.tickets or again.orchestrator.tickets
    again.close()


async def test_two_engines_generate_at_the_same_moment(tmp_path: Path) -> None:
    engines = Slow(), Slow()
    desk = Desk(tmp_path, engine=engines[0])
    with_helper(desk, replace(desk.loop.context, engine=engines[1], station=Station()))
    desk.orchestrator.tickets.extend(make_ticket(index=index) for index in range(4))
    await run_until(desk.loop, lambda: engines[0].at_once == engines[1].at_once == 1)
    for engine in engines:
        engine.go_on.set()
    desk.close()


async def test_the_next_policy_is_fetched_while_the_present_one_works(tmp_path: Path) -> None:
    engine = Slow()
    desk = Desk(tmp_path, engine=engine)
    helper = with_helper(desk)
    newer = PolicyVersion(4)
    run = desk.view.runs[RUN]
    run.checkpoints[newer] = SimpleNamespace(
        manifest_root=ROOT, beacon=keccak(b"block 50"), block_number=50
    )
    desk.orchestrator.tickets.append(make_ticket())
    leading = asyncio.ensure_future(desk.loop.work_once())
    while not engine.begun:
        await asyncio.sleep(0.001)
    desk.loop.station.took(1.0)
    beacon = keccak(b"block 50")
    desk.orchestrator.tickets.append(make_ticket(index=1, policy_version=newer, beacon=beacon))
    helping = asyncio.ensure_future(helper.work_once())
    while helper.state != "fetching":
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert [version for _, version in engine.loaded] == [VERSION]
    engine.go_on.set()
    await leading
    await helping
    assert [version for _, version in engine.loaded] == [VERSION, newer]
    # Either upload may end first.
    uploads = {(each[0].index, each[0].policy_version) for each in desk.orchestrator.uploads}
    assert uploads == {(0, VERSION), (1, newer)}
    desk.close()


async def test_a_node_goes_on_with_its_version_until_the_newest_is_fetched(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    arrived, fetch = asyncio.Event(), desk.fetcher.fetch
    newer, orchestrator = PolicyVersion(4), desk.orchestrator

    async def slowly(run_id: Any, version: PolicyVersion, root: Any) -> Path:
        if version == newer:
            await arrived.wait()
        return await fetch(run_id, version, root)

    desk.fetcher.fetch = slowly  # type: ignore[method-assign]
    orchestrator.tickets.append(make_ticket())
    running = asyncio.ensure_future(desk.loop.run())

    async def until(check: Any) -> None:
        async with asyncio.timeout(5):
            while not check():
                await asyncio.sleep(0.001)

    await until(lambda: len(orchestrator.uploads) == 1)
    assert set(orchestrator.versions) == {None}
    run = desk.view.runs[RUN]
    run.checkpoints[newer] = SimpleNamespace(
        manifest_root=ROOT, beacon=keccak(b"block 50"), block_number=50
    )
    run.latest_version = newer
    await desk.loop.on_change([])
    await until(lambda: VERSION in orchestrator.versions)
    # Work of the version at hand goes on meanwhile.
    orchestrator.tickets.append(make_ticket(index=1))
    await until(lambda: len(orchestrator.uploads) == 2)
    assert [version for _, version in desk.engine.loaded] == [VERSION]
    arrived.set()
    await until(lambda: desk.engine.policy_version == newer)
    assert orchestrator.versions[-1] is None
    running.cancel()
    await asyncio.wait([running])
    desk.close()


async def test_a_slow_engine_asks_for_no_ticket_that_would_lapse(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    helper = with_helper(desk)
    desk.loop.context.held.lease_s = 100.0
    desk.loop.station.took(41.0)
    desk.loop.station.waiting = 1
    desk.orchestrator.tickets.append(make_ticket())
    assert await helper.work_once() > 0
    assert not desk.orchestrator.calls["lease"]
    # A little faster, both would be done in time.
    desk.loop.station.forget_speed()
    desk.loop.station.took(39.0)
    await helper.work_once()
    assert len(desk.orchestrator.uploads) == 1
    desk.close()


# What is hopeless


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("at_s", "progress", "is_hopeless"),
    [
        (5.0, Progress(50, 1, 50), False),  # too early to tell
        (20.0, Progress(200, 1, 50), False),  # 16 x 50 tokens: needs 60 s more, 80 s are left
        (20.0, Progress(120, 1, 50), False),  # needs 113 s, 80 s are left: perhaps
        (20.0, Progress(50, 1, 50), True),  # needs 300 s, 80 s are left
        (20.0, Progress(50, 0, 0), False),  # nobody knows how long samples are
        (100.0, Progress(799, 15, 749), True),  # its time is over
    ],
)
def test_a_ticket_is_given_up_when_the_rest_takes_far_longer_than_it_may(
    at_s: float, progress: Progress, is_hopeless: bool
) -> None:
    clock = Clock()
    hope = Hope(16, 100.0, lambda: True, clock, clock)
    clock.now = at_s
    if not is_hopeless:
        return hope(progress)
    with pytest.raises(Hopeless, match=r"of 16 samples are done after .* tokens/s") as caught:
        hope(progress)
    assert caught.value.takes_s > 100


def test_a_ticket_is_judged_by_its_pace_once_it_is_first() -> None:
    clock, first = Clock(), [False]
    hope = Hope(16, 100.0, lambda: first[0], clock, clock)
    clock.now = 40.0
    hope(Progress(50, 1, 50))  # at this pace it needs 600 s more, 60 s are left
    first[0] = True
    clock.now = 52.0
    hope(Progress(290, 5, 250))  # 240 tokens in 12 s: needs 25 s more, 48 s are left
    clock.now = 90.0
    with pytest.raises(Hopeless):
        hope(Progress(300, 5, 250))
    # Its time is over in either order.
    first[0], clock.now = False, 100.0
    with pytest.raises(Hopeless):
        hope(Progress(799, 15, 749))


@pytest.mark.parametrize(("slept_s", "is_hopeless"), [(40.0, False), (60.0, True), (80.0, True)])
def test_a_machine_that_slept_has_less_time_and_the_same_pace(
    slept_s: float, is_hopeless: bool
) -> None:
    clock, due_clock = Clock(), Clock()
    hope = Hope(16, 100.0, lambda: True, clock, due_clock)
    clock.now, due_clock.now = 20.0, 20.0 + slept_s
    if not is_hopeless:
        return hope(Progress(200, 1, 50))  # needs 60 s more, 40 s are left: perhaps
    with pytest.raises(Hopeless):
        hope(Progress(200, 1, 50))


def test_what_is_due_is_due_by_a_clock_that_counts_suspension() -> None:
    counts = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    before = time.clock_gettime(counts)
    assert before <= uptime_s() <= time.clock_gettime(counts)


def test_the_engines_time_is_counted_once() -> None:
    clock = Clock()
    station = Station(clock)
    first, second = make_ticket(deadline=NOW + 10), make_ticket(index=1, deadline=NOW + 20)
    with station.at_work(second) as of_second:
        clock.now = 1.0
        assert station.is_first(second)
        with station.at_work(first) as of_first:
            assert (station.is_first(first), station.is_first(second)) == (True, False)
            clock.now = 5.0
            assert of_first() == 4.0
        clock.now = 7.0
        assert of_second() == 2.0


class Tiring:
    """A clock that advances by an hour at each reading."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return time.monotonic() + 3600 * (self.looks > 1)


async def test_a_machine_that_is_too_slow_stops_and_does_not_try_again_and_again(
    desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "Hope", lambda *given: Hope(*given, Tiring()))
    desk.orchestrator.tickets.append(make_ticket(deadline=NOW + 15))
    with caplog.at_level(logging.WARNING):
        await desk.loop.work_once()
        assert desk.loop.station.takes_s is not None
        assert desk.loop.station.takes_s > 15
        pauses = [await desk.loop.work_once()]
        # It tries one again, and waits longer.
        await desk.loop.work_once()
        pauses.append(await desk.loop.work_once())
    assert desk.orchestrator.calls["lease"] == 2
    assert not desk.orchestrator.uploads
    assert 5 <= pauses[0] <= 10 <= pauses[1] <= 20
    said = [record.getMessage() for record in caplog.records]
    assert said.count("ticket left to lapse") == 2
    [slow] = [r for r in caplog.records if "finish in time is not available" in r.getMessage()]
    assert "takes this machine about" in slow.__dict__["error"]
    assert "--lease-s" in slow.__dict__["hint"]
