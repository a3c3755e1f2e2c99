"""How workers and validators learn that a run is over, and when they leave it."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds.client_chain import make_batch, make_context, make_view
from worlds.client_desk import Desk, make_record
from worlds.client_world import (
    CALIBRATION,
    NOW,
    RECIPE,
    RULES,
    RUN,
    VERSION,
    make_submission,
    make_ticket,
)

from muster.client.chain_facts import is_over, settled_at
from muster.client.validator.loop import ValidatorLoop
from muster.client.worker import loop as worker_loop
from muster.protocol.ids import RunId
from muster.protocol.messages import Verdict

DEADLINE_S, WINDOW_S = 800, 400


def trained(steps: int) -> Any:
    """Return the recipe of a run of `steps` steps."""
    training = RECIPE.training.model_copy(update={"steps": steps})
    return RECIPE.model_copy(update={"training": training})


# The chain's part


@pytest.mark.parametrize(
    ("version", "closed_at", "steps", "over"),
    [
        (None, 0, 3, False),
        (2, 0, 3, False),
        (3, 0, 3, True),
        (4, 0, 3, True),
        (9, 0, 0, False),
        (0, 0, 0, False),
        (None, NOW, 3, True),
        (2, NOW, 0, True),
    ],
)
def test_a_run_is_over_once_trained_or_closed(
    version: int | None, closed_at: int, steps: int, over: bool
) -> None:
    run: Any = SimpleNamespace(latest_version=version, closed_at=closed_at)
    assert is_over(run, steps) is over


def view_of(*batches: Any, cases: Any = ()) -> Any:
    view = make_view()
    view.runs[RUN].fraud_closes_at = lambda posted_at, window_s: posted_at + window_s
    view.batches = {batch.batch_id: batch for batch in batches}
    view.cases = dict(enumerate(cases))
    return view


def judged(batch_id: int) -> Any:
    return make_batch(batch_id, [], [make_record()])


def settled(view: Any) -> int | None:
    return settled_at(view, RUN, outcome_deadline_s=DEADLINE_S, challenge_window_s=WINDOW_S)


def test_a_run_is_settled_when_its_last_window_has_closed() -> None:
    posted, silent = judged(1), make_batch(2, [])
    assert settled(view_of()) == 0
    assert settled(view_of(posted)) == NOW + 60 + WINDOW_S
    assert settled(view_of(posted, silent)) == NOW + 30 + DEADLINE_S + WINDOW_S


def test_batches_and_cases_of_other_runs_are_not_waited_for() -> None:
    mine, other = judged(1), judged(2)
    other.run_id, other.posted_at = RUN + 1, NOW + 10**6
    case = SimpleNamespace(closed=False, batch_id=2, run_id=RUN + 1)
    assert settled(view_of(mine, other, cases=[case])) == NOW + 60 + WINDOW_S


@pytest.mark.parametrize(("closed", "end"), [(False, None), (True, NOW + 60 + WINDOW_S)])
def test_an_open_case_is_waited_for(closed: bool, end: int | None) -> None:
    case = SimpleNamespace(closed=closed, run_id=RUN)
    assert settled(view_of(judged(1), cases=[case])) == end


# The worker


@pytest.fixture
def desk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    desk = Desk(tmp_path, **{"recipe": trained(VERSION), **getattr(request, "param", {})})
    yield desk
    desk.close()


async def ends(loop: Any) -> None:
    async with asyncio.timeout(5):
        await loop.run()


async def test_a_worker_leaves_a_run_that_is_over(
    desk: Any, caplog: pytest.LogCaptureFixture
) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    with caplog.at_level(logging.INFO):
        await ends(desk.loop)
    assert caplog.messages[-1] == "run complete"
    assert vars(caplog.records[-1])["without_outcome"] == 0
    assert (desk.orchestrator.uploads, desk.fetcher.fetched) == ([], [])


async def test_it_does_not_wait_for_work_of_another_run(desk: Any) -> None:
    ticket = replace(make_ticket(), run_id=RunId(RUN + 1))
    desk.journal.record(ticket, b"", make_submission(ticket, []), b"a file")
    await ends(desk.loop)
    assert not desk.orchestrator.calls["submit"]


@pytest.mark.parametrize("desk", [{"recipe": trained(0)}], indirect=True)
async def test_it_waits_for_the_outcomes_of_what_it_submitted(desk: Any) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    running = asyncio.ensure_future(desk.loop.run())
    async with asyncio.timeout(5):
        while not desk.orchestrator.uploads:
            await asyncio.sleep(0.002)
        desk.view.runs[RUN].closed_at = NOW
        while desk.loop.state != "idle":
            await asyncio.sleep(0.002)
        assert not running.done()
        await desk.loop.on_change([desk.post(1, make_record(Verdict.ACCEPTED))])
        await running
    assert len(desk.loop.outcomes.earned) == 1


@pytest.mark.parametrize("desk", [{"recipe": trained(0)}], indirect=True)
async def test_it_does_not_wait_for_ever(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    await desk.loop.work_once()
    desk.view.runs[RUN].closed_at = NOW
    monkeypatch.setattr(worker_loop, "OUTCOMES_S", 0.0)
    await ends(desk.loop)
    assert desk.journal.unfinished()


@pytest.mark.parametrize("desk", [{"keep_going": True}], indirect=True)
async def test_who_keeps_going_stays_and_asks_for_nothing(desk: Any) -> None:
    desk.orchestrator.tickets.append(make_ticket())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await desk.loop.run()
    assert desk.loop.state == "idle"
    assert not desk.orchestrator.uploads


# The validator


class Seated(ValidatorLoop):
    """Has a seat and nothing to judge; its clock is a number."""

    def __init__(self, view: Any, *, keep_going: bool = False) -> None:
        self.time = NOW

        async def now() -> int:
            return self.time

        windows = SimpleNamespace(outcome_deadline_s=DEADLINE_S, challenge_window_s=WINDOW_S)
        rules = type(RULES)(trained(VERSION), RULES.task_set, CALIBRATION)
        super().__init__(
            make_context(view=view, windows=windows, rules=rules, now=now, keep_going=keep_going)
        )


async def test_a_validator_stays_until_nothing_can_be_challenged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = Seated(view_of(judged(1)))
    with caplog.at_level(logging.INFO):
        loop.time = NOW + 60 + WINDOW_S - 1
        assert not await loop.has_ended()
        loop.time += 1
        assert await loop.has_ended()
    assert caplog.messages == ["run over, staying for challenges"]


async def test_a_validator_stays_while_the_run_goes_on_or_a_case_is_open() -> None:
    case = SimpleNamespace(closed=False, run_id=RUN)
    view = view_of(judged(1), cases=[case])
    loop = Seated(view)
    loop.time = NOW + 10**6
    assert not await loop.has_ended()
    case.closed = True
    assert await loop.has_ended()
    view.runs[RUN].latest_version = VERSION - 1
    assert not await loop.has_ended()


async def test_a_validator_that_keeps_going_stays() -> None:
    loop = Seated(view_of(), keep_going=True)
    assert not await loop.has_ended()
