"""The dashboard's pages. Anybody may read them: they show only public data.

A visitor's input is parsed once, here; malformed input is answered with an error page.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse
from starlette.exceptions import HTTPException

from muster.chain import (
    BatchView,
    CaseView,
    ChainView,
    Named,
    NameIndex,
    find_named,
    losses,
    prefix_of,
)
from muster.orchestrator.dashboard.figures import Panel, idle, panels
from muster.orchestrator.dashboard.health import RelayWatch, read_health
from muster.orchestrator.dashboard.lists import (
    ORDERS,
    STATES,
    WORKERS_PAGE,
    Wanted,
    find_submission,
    find_worker,
    lines_at,
    list_submissions,
    rank_workers,
    received_files,
)
from muster.orchestrator.dashboard.render import ASSETS, CONTENT_SECURITY_POLICY, render
from muster.orchestrator.dashboard.samples import SampleCache
from muster.orchestrator.http.errors import failure_response
from muster.orchestrator.http.feed import StatusFeed
from muster.orchestrator.http.requests import ServicesDep, host_of
from muster.orchestrator.services import Services
from muster.protocol.errors import ConfigError, EncodingError
from muster.protocol.ids import Address, Hash32, to_address, to_hash32
from muster.protocol.jury import summons_of
from muster.protocol.messages import Verdict

MAX_NUMBER = 1 << 62
"""Largest cursor or step that is looked up: it fits a database's integers."""
MAX_QUERY_CHARACTERS = 100
"""Longest search text."""
FRONT_SUBMISSIONS = 12
FRONT_WORKERS = 8
FRONT_LOSSES = 5
WORKER_SUBMISSIONS = 25


class Dashboard:
    """Objects that the pages need besides the services."""

    def __init__(self, services: Services) -> None:
        self.samples = SampleCache(services)
        self.relays = RelayWatch(
            services.run_id, origin=services.settings.origin, relays=services.settings.relays
        )
        self.names = NameIndex(services.projection.view)
        self._panels: tuple[int, list[Panel]] = (-1, [])

    def panels(self, services: Services) -> list[Panel]:
        """Return the charts; they are rebuilt only after a report of the trainer."""
        reports = services.training.reports
        if self._panels[0] != reports:
            self._panels = reports, panels(services.training, services.recipe)
        return self._panels[1]


class NotAnswered(Exception):
    """A request that no page can answer."""

    def __init__(self, status: int, title: str, hint: str) -> None:
        super().__init__(title)
        self.status, self.title, self.hint = status, title, hint


router = APIRouter(include_in_schema=False)


def dashboard_of(request: Request) -> Dashboard:
    """Return the application's dashboard."""
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard


@router.get("/")
@router.get("/runs/{run_id}")
async def run_page(request: Request, services: ServicesDep) -> Response:
    """The run at a glance."""
    wanted = request.path_params.get("run_id", str(services.run_id))
    if wanted != str(services.run_id):
        raise NotAnswered(
            404,
            "This orchestrator serves another run.",
            f"It serves run {services.run_id}; other runs have orchestrators of their own.",
        )
    reward, *multiples = dashboard_of(request).panels(services)
    latest = await list_submissions(services, Wanted(limit=FRONT_SUBMISSIONS))
    return await _page(
        services,
        "run.html",
        reward=reward,
        multiples=multiples,
        latest=latest.lines,
        leaders=rank_workers(services, order="units", state=None, first=0, limit=FRONT_WORKERS),
        total=services.projection.total,
        alarm_steps=services.training.latest("alarm_steps") or 0,
        run=services.projection.run,
        idle=idle(services.training),
        losses=losses(services.projection.view, services.run_id)[: -FRONT_LOSSES - 1 : -1],
    )


@router.get("/workers")
async def workers_page(request: Request, services: ServicesDep) -> Response:
    """The ranking of workers."""
    query = request.query_params
    order = _choice(query, "order", ORDERS, "units")
    state = _choice(query, "state", dict.fromkeys(STATES), None)
    ranking = rank_workers(
        services, order=order or "units", state=state, first=_number(query, "after") or 0
    )
    return await _page(
        services,
        "workers.html",
        ranking=ranking,
        order=order,
        orders={key: each.title for key, each in ORDERS.items()},
        state_filter=state,
        states=STATES,
        page_size=WORKERS_PAGE,
    )


@router.get("/workers/{address}")
async def worker_page(address: str, services: ServicesDep) -> Response:
    """One worker."""
    worker = _address(address)
    detail = None if worker is None else find_worker(services, worker)
    if worker is None or detail is None:
        raise NotAnswered(
            404,
            "No worker is registered under this address.",
            "Use the address of the worker's staking wallet, not of its node's key.",
        )
    listing = await list_submissions(services, Wanted(worker=worker, limit=WORKER_SUBMISSIONS))
    return await _page(services, "worker.html", detail=detail, listing=listing)


@router.get("/submissions")
async def submissions_page(request: Request, services: ServicesDep) -> Response:
    """Submissions, filtered, by cursor."""
    query = request.query_params
    verdicts = {verdict.name.lower(): verdict for verdict in Verdict}
    verdict = _choice(query, "verdict", verdicts, None)
    wanted = Wanted(
        worker=_worker_filter(query),
        verdict=None if verdict is None else verdicts[verdict],
        step=_number(query, "step"),
        before=_number(query, "before"),
    )
    listing = await list_submissions(services, wanted)
    return await _page(
        services,
        "submissions.html",
        listing=listing,
        wanted=wanted,
        verdicts=list(verdicts),
        total=services.projection.total,
    )


@router.get("/submissions/{submission_id}")
async def submission_page(submission_id: str, request: Request, services: ServicesDep) -> Response:
    """One submission, by its file hash; another name of it leads to this page."""
    file_hash = _hash(submission_id)
    if file_hash is None:
        return await _look_up(submission_id, request, services)
    detail = await find_submission(services, file_hash)
    if detail is None:
        raise NotAnswered(
            404,
            "No submission has this file hash.",
            "It may not have arrived yet, or belongs to another run.",
        )
    view, batch = services.projection.view, detail.batch
    slashes = [
        s
        for s in view.slashes
        if batch is not None and (s.batch_id, s.position) == (batch.batch_id, detail.position)
    ]
    return await _page(
        services,
        "submission.html",
        detail=detail,
        case=_case_of(view, batch, detail.position),
        slashes=[services.status.slash(s) for s in slashes],
        # Before its verdict nobody but validators may read it.
        samples=await dashboard_of(request).samples.of(file_hash) if detail.recorded else [],
        has_text=dashboard_of(request).samples.has_text,
    )


@router.get("/cases")
async def cases_page(services: ServicesDep) -> Response:
    """Slashes and disputes."""
    slashes = services.projection.slashes
    everywhere = services.projection.view.cases.values()
    cases = [case for case in everywhere if case.run_id == services.run_id and case.claims]
    return await _page(
        services,
        "cases.html",
        slashes=[services.status.slash(s) for s in reversed(slashes[-200:])],
        slashes_total=len(slashes),
        cases=cases[:-201:-1],
    )


@router.get("/samples")
async def samples_page(request: Request, services: ServicesDep) -> Response:
    """Samples to read."""
    return await _page(
        services,
        "samples.html",
        files=await dashboard_of(request).samples.latest(),
        has_text=dashboard_of(request).samples.has_text,
    )


@router.get("/network")
async def network_page(request: Request, services: ServicesDep) -> Response:
    """The network's health."""
    relays = await dashboard_of(request).relays.latest()
    return await _page(services, "network.html", health=await read_health(services, relays))


@router.get("/search")
async def search(request: Request, services: ServicesDep) -> Response:
    """Redirect to what was searched for: any name that commands accept, or a step."""
    return await _look_up(request.query_params.get("q", ""), request, services)


async def _look_up(text: str, request: Request, services: Services) -> Response:
    text = text.strip()[:MAX_QUERY_CHARACTERS]
    digits = prefix_of(text)
    received = [] if digits is None else await received_files(services, digits)
    try:
        index = dashboard_of(request).names
        named = find_named(services.projection.view, text, received=received, index=index)
    except ConfigError as error:
        if text.isascii() and text.isdigit() and int(text) <= MAX_NUMBER:
            return RedirectResponse(f"/submissions?step={int(text)}", 303)
        raise NotAnswered(404, _sentence(str(error)), _sentence(error.hint or "")) from error
    return await _show_named(services, named)


async def _show_named(services: Services, named: Named) -> Response:
    """Redirect to the page of the found item, or of what it belongs to."""
    ours = [place for place in named.places if place.batch.run_id == services.run_id]
    if named.places and not ours:
        raise NotAnswered(
            404,
            _sentence(f"{named} is of run {named.places[0].batch.run_id}"),
            f"This orchestrator serves run {services.run_id}; other runs have their own.",
        )
    if named.file_hash is not None:
        return RedirectResponse(f"/submissions/0x{named.file_hash.hex()}", 303)
    lines = await lines_at(services, ours)
    if len(lines) == 1:
        return RedirectResponse(f"/submissions/{lines[0].submission_id}", 303)
    if named.worker is not None and not lines:
        return RedirectResponse(f"/workers/{named.worker}", 303)
    return await _page(services, "found.html", named=named, lines=lines, total=len(ours))


@router.get("/live")
async def live(request: Request, services: ServicesDep) -> StreamingResponse:
    """Stream a notice at every change, so that open pages reload themselves."""
    host = host_of(request)
    services.feed.require_room(host)
    last_seen = request.headers.get("last-event-id")
    return StreamingResponse(
        _changes(services.feed, last_seen, host),
        media_type="text/event-stream",
        headers={"cache-control": "no-store"},
    )


async def _changes(feed: StatusFeed, last_seen: str | None, host: str) -> AsyncIterator[str]:
    async for notice in feed.listen("", last_seen, host):
        if notice is None:
            yield ": alive\n\n"
        else:
            yield f"id: {notice.event_id}\nevent: change\ndata: {{}}\n\n"


@router.get("/static/{name:path}")
async def static(name: str, request: Request) -> Response:
    """Return a static file of the dashboard."""
    asset = ASSETS.get(name)
    if asset is None:
        raise NotAnswered(404, "There is no such file.", "Go back and reload the page.")
    headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            asset.packed, media_type=asset.kind, headers=headers | {"content-encoding": "gzip"}
        )
    return Response(asset.body, media_type=asset.kind, headers=headers)


async def _page(services: Services, template: str, **values: Any) -> HTMLResponse:
    status = await services.status.latest()
    html = render(
        template,
        status=status,
        now=services.clock(),
        chain_now=services.chain_clock.now(),
        **values,
    )
    return _html(html, 200)


def _html(html: str, status: int) -> HTMLResponse:
    return HTMLResponse(
        html,
        status,
        headers={"content-security-policy": CONTENT_SECURITY_POLICY, "cache-control": "no-store"},
    )


async def show_problem(request: Request, error: Exception) -> Response:
    """Return the error page."""
    assert isinstance(error, NotAnswered)
    services: Services = request.app.state.services
    status = await services.status.latest()
    html = render(
        "problem.html",
        status=status,
        now=services.clock(),
        chain_now=services.chain_clock.now(),
        title=error.title,
        hint=error.hint,
    )
    return _html(html, error.status)


async def show_missing(request: Request, error: Exception) -> Response:
    """Return the page for an unknown address; programs get the error as JSON."""
    assert isinstance(error, HTTPException)
    is_reader = "text/html" in request.headers.get("accept", "")
    if error.status_code != 404 or not is_reader or request.url.path.startswith("/v1/"):
        return failure_response(request, error)
    missing = NotAnswered(404, "There is no such page.", "Choose one of the run's pages above.")
    return await show_problem(request, missing)


def _case_of(view: ChainView, batch: BatchView | None, position: int | None) -> CaseView | None:
    """Return the dispute about an outcome, or the call for judges of a batch without outcomes."""
    if batch is None or position is None:
        return None
    if batch.records is not None:
        disputed = view.cases.get(batch.records[position].leaf(batch.batch_id, position))
        if disputed is not None:
            return disputed
    return view.cases.get(summons_of(batch.batch_id))


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_NUMBER):
        raise NotAnswered(
            400, f"“{name}” is not a number.", "Give a number, or leave the field empty."
        )
    return int(text)


def _choice(
    query: Mapping[str, str], name: str, choices: Mapping[str, object], default: str | None
) -> str | None:
    text = query.get(name, "")
    if not text:
        return default
    if text not in choices:
        raise NotAnswered(400, f"There is no such {name}.", "Choose: " + ", ".join(choices) + ".")
    return text


def _worker_filter(query: Mapping[str, str]) -> Address | None:
    text = query.get("worker", "").strip()
    if not text:
        return None
    address = _address(text)
    if address is None:
        raise NotAnswered(
            400, "“worker” is not an address.", "Give the address of its staking wallet, 0x…"
        )
    return address


def _address(text: str) -> Address | None:
    try:
        return to_address(text)
    except EncodingError:
        return None


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _hash(text: str) -> Hash32 | None:
    try:
        return to_hash32(text)
    except EncodingError:
        return None
