"""Turns for pages: a crowd's page is built once, and one network cannot take them all."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any, cast

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from muster.lifecycle.rates import RateLimit
from muster.orchestrator.http.app import Pages
from muster.orchestrator.http.quotas import PAGES_AT_ONCE, PAGES_PER_NETWORK, Quotas, Readings
from muster.orchestrator.settings import OrchestratorSettings

HOSTS = [f"198.51.{number}.7" for number in range(10)]
"""Addresses in networks of their own."""


@dataclass
class Stage:
    """An application whose pages are built when a test says so."""

    quotas: Quotas
    status: int = 200
    built: list[str] = field(default_factory=list)
    may_build: asyncio.Event = field(default_factory=asyncio.Event)
    now_s: float | None = None
    """The time; None for the real one."""
    takes_s: float = 0.0
    """How long building a page keeps the event loop."""

    def __post_init__(self) -> None:
        self.pages = Pages(self.build, self.quotas, monotonic=self.clock)

    def clock(self) -> float:
        return monotonic() if self.now_s is None else self.now_s

    async def build(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.built.append(scope["path"])
        number = len(self.built)
        if self.now_s is not None:
            self.now_s += self.takes_s
        await self.may_build.wait()
        await PlainTextResponse(f"page {number}", self.status)(scope, receive, send)

    async def get(self, path: str, host: str = HOSTS[0]) -> httpx.Response:
        transport = httpx.ASGITransport(cast(Any, self.pages), client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.get(path)


@pytest.fixture
def quotas(tmp_path: Path) -> Quotas:
    """Quotas whose pages have no burst, under a clock that stands still."""
    settings = OrchestratorSettings(run=1, keystore=tmp_path / "key", files=tmp_path)
    seconds = RateLimit(rate=0.25, burst=0.0, monotonic=lambda: 0.0)
    return replace(Quotas.of(settings), page_seconds=seconds)


@pytest.fixture
def stage(quotas: Quotas) -> Stage:
    return Stage(replace(quotas, page_seconds=RateLimit(rate=1.0, burst=1e9)))


async def turns() -> None:
    """Let every task go on until all of them wait."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_page_is_built_once_for_all_who_wait_for_it(stage: Stage) -> None:
    async with asyncio.TaskGroup() as tasks:
        first = [tasks.create_task(stage.get("/", host)) for host in HOSTS[:PAGES_AT_ONCE]]
        await turns()
        crowd = [tasks.create_task(stage.get("/", host)) for host in HOSTS[PAGES_AT_ONCE:]]
        await turns()
        assert len(stage.built) == PAGES_AT_ONCE
        stage.may_build.set()
    # What was begun before they asked may be older than what they were told of.
    assert {each.result().text for each in first} == {"page 1", "page 2"}
    assert {each.result().text for each in crowd} <= {"page 3", "page 4"}
    assert (await stage.get("/")).text == f"page {len(stage.built)}"


@pytest.mark.parametrize("path", ["/workers", "/?order=paid"])
async def test_another_page_is_not_taken_for_it(stage: Stage, path: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(stage.get(each, HOSTS[n])) for n, each in enumerate(("/", path))]
        await turns()
        stage.may_build.set()
    assert {each.result().text for each in asked} == {"page 1", "page 2"}


async def test_failed_page_is_nobody_elses(stage: Stage) -> None:
    stage.status = 404
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(stage.get("/nothing", host)) for host in HOSTS]
        await turns()
        stage.may_build.set()
    assert len({each.result().text for each in asked}) == len(HOSTS)


async def test_network_waits_for_few_pages_at_once(stage: Stage) -> None:
    neighbours = [f"203.0.113.{1 + number}" for number in range(PAGES_PER_NETWORK)]
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(stage.get(f"/?{host}", host)) for host in neighbours]
        await turns()
        refused = await stage.get("/", "203.0.113.200")
        other = tasks.create_task(stage.get("/", HOSTS[0]))
        await turns()
        stage.may_build.set()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "overloaded"
    assert {each.result().status_code for each in [*asked, other]} == {200}


@pytest.mark.parametrize("path", ["/healthz", "/v1/status", "/static/app.js", "/live", "/metrics"])
async def test_what_is_no_page_needs_no_turn(stage: Stage, path: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(2 * PAGES_PER_NETWORK):
            tasks.create_task(stage.get(f"/?{number}"))
        await turns()
        asked = tasks.create_task(stage.get(path))
        await turns()
        assert stage.built[-1] == path
        stage.may_build.set()
    assert asked.result().status_code == 200


@pytest.mark.parametrize(("spent_s", "began"), [(0.0, 1), (1.0, 0)])
async def test_page_waits_while_pages_had_more_than_their_share(
    quotas: Quotas, spent_s: float, began: int
) -> None:
    stage = Stage(quotas)
    quotas.page_seconds.charge("", spent_s)
    asked = asyncio.create_task(stage.get("/"))
    await turns()
    assert len(stage.built) == began
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize("takes_s", [0.5, 3.0, 0.0])
async def test_page_is_charged_for_the_time_of_the_loop_and_not_for_waiting(
    quotas: Quotas, takes_s: float
) -> None:
    stage = Stage(quotas, now_s=1.0, takes_s=takes_s)
    asked = asyncio.create_task(stage.get("/"))
    await turns()
    stage.now_s = 61.0 + takes_s
    stage.may_build.set()
    assert (await asked).status_code == 200
    assert quotas.page_seconds.debt_s("") == takes_s / 0.25


async def test_page_that_nobody_waits_for_any_more_is_charged_too(quotas: Quotas) -> None:
    stage = Stage(quotas, now_s=1.0, takes_s=0.5)
    asked = asyncio.create_task(stage.get("/"))
    await turns()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert quotas.page_seconds.debt_s("") == 0.5 / 0.25


async def test_networks_take_turns_however_many_pages_one_waits_for() -> None:
    readings, began = Readings(1, most_per_host=3), list[str]()

    async def read(host: str) -> None:
        async with readings.turn(host):
            began.append(host)

    async with asyncio.TaskGroup() as tasks, readings.turn("first"):
        asked = [tasks.create_task(read(host)) for host in ("a", "a", "a", "b", "b", "c")]
        await turns()
        asked[1].cancel()
    assert began == ["a", "b", "c", "a", "b"]
