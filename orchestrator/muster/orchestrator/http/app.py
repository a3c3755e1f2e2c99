"""The web application: its routes, a fast path for the most frequent ones, turns for pages, and a
guard around all of them: quotas per network address, metrics of requests, security headers.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from urllib.parse import unquote_plus

from fastapi import FastAPI
from prometheus_client import Counter, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muster.lifecycle import machine_of
from muster.orchestrator.dashboard import routes
from muster.orchestrator.http import nodes, public, validators
from muster.orchestrator.http.crowd import place_of
from muster.orchestrator.http.errors import (
    TooMany,
    add_error_handlers,
    error_response,
    failure_response,
    refusal_response,
)
from muster.orchestrator.http.openapi import document_routes
from muster.orchestrator.http.quotas import Quotas
from muster.orchestrator.http.requests import SIGNER_KEY
from muster.orchestrator.metrics import REQUEST_SECONDS, REQUESTS
from muster.orchestrator.services import Services
from muster.protocol.encoding import message_fault

_ABOUT: dict[str, Any] = {
    "title": "Muster orchestrator",
    "description": "Requests and answers are specified in docs/protocol.md section 11.",
}

_ENDLESS = frozenset({"/live", "/v1/events"})
"""Event streams, for which HEAD requests are not supported."""


class Application(FastAPI):
    """The application: the guard, the fast routes, the turns for pages, the framework's routes."""

    def __init__(self, services: Services) -> None:
        super().__init__(**_ABOUT, docs_url=None, redoc_url=None)
        self.state.services = services
        self.state.dashboard = routes.Dashboard(services)
        self._entrance = RequestGuard(
            FastRoutes(Pages(super().__call__, services.quotas), services), quotas=services.quotas
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; HEAD is answered like GET without the body."""
        if scope["type"] == "http" and scope["method"] == "HEAD" and scope["path"] not in _ENDLESS:
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        await self._entrance(scope, receive, send)


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head


def create_app(services: Services) -> FastAPI:
    """Return the application over loaded services."""
    app = Application(services)
    add_error_handlers(app)
    app.add_exception_handler(routes.NotAnswered, routes.show_problem)
    app.add_exception_handler(HTTPException, routes.show_missing)
    _add_routes(app)
    return app


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document, without loading any services."""
    app = FastAPI(**_ABOUT)
    _add_routes(app)
    return app.openapi()


def _add_routes(app: FastAPI) -> None:
    for part in (nodes, validators, public, routes):
        app.include_router(part.router)
    document_routes(app)


Endpoint = Callable[[Request, Services], Awaitable[Response]]

_MOST_DIGITS = 10
"""Most digits of a number in a fast route's path; the framework refuses longer ones."""


@dataclass(frozen=True, slots=True)
class _Route:
    path: str
    """The route's template, which metrics are labelled with."""
    endpoint: Endpoint


_BY_PATH = {
    ("POST", "/v1/heartbeat"): _Route("/v1/heartbeat", nodes.heartbeat),
    ("POST", "/v1/leases"): _Route("/v1/leases", nodes.lease),
}
_UPLOADS = "/v1/submissions/"
_UPLOAD = "/v1/submissions/{run_id}/{step}/{index}"


class FastRoutes:
    """The most frequent requests of nodes, answered before the framework is reached.

    The framework's routing, dependencies, exit stacks and telemetry take longer than a heartbeat
    itself. The same routes are also in the framework, for its document and for requests that do not
    match exactly.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a fast route, and pass on every other."""
        route = _route_of(scope)
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(request, self._services)
        except Exception as error:  # answered as the framework would
            response = failure_response(request, error)
        await response(scope, receive, send)


def _route_of(scope: Scope) -> _Route | None:
    if scope["type"] != "http":
        return None
    method, path = scope["method"], scope["path"]
    route = _BY_PATH.get((method, path))
    if route is None and method == "PUT" and path.startswith(_UPLOADS):
        return _upload_route(path.removeprefix(_UPLOADS).split("/"))
    return route


def _upload_route(slot: list[str]) -> _Route | None:
    if len(slot) != 3 or not all(_is_number(part) for part in slot):
        return None
    run_id, step, index = map(int, slot)

    def endpoint(request: Request, services: Services) -> Awaitable[Response]:
        return nodes.upload(run_id, step, index, request, services)

    return _Route(_UPLOAD, endpoint)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


_NO_PAGES = frozenset({"/live", "/healthz", "/metrics"})

KEPT_PAGES = 16
"""Most pages that are kept for those who wait for the same ones."""
_PageKey = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class _Page:
    route: object
    """The route that built it, for metrics."""
    messages: tuple[Message, ...]
    """What is sent."""
    began_s: float
    """When its building began."""


class _Timed:
    """Awaits a coroutine and measures its own steps: how long it keeps the event loop, without the
    time for which it waits."""

    def __init__(self, awaited: Awaitable[None], monotonic: Callable[[], float]) -> None:
        self._awaited, self._monotonic = awaited, monotonic
        self.seconds = 0.0
        """What its steps took so far."""

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._awaited.__await__()
        step = partial(next, steps)
        while True:
            began_s = self._monotonic()
            try:
                waits_for = step()
            except StopIteration:
                return
            finally:
                self.seconds += self._monotonic() - began_s
            try:
                step = partial(steps.send, (yield waits_for))
            except BaseException as error:  # such as its cancellation, which is its own affair
                step = partial(steps.throw, error)


class Pages:
    """Turns for pages, one of which takes the event loop as long as hundreds of heartbeats: few
    are built at once, in a share of the time, and one for all who wait for it.
    """

    def __init__(
        self, app: ASGIApp, quotas: Quotas, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._app = app
        self._quotas = quotas
        self._monotonic = monotonic
        self._kept: dict[_PageKey, _Page] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a page, and pass on every other."""
        if not _is_page(scope):
            await self._app(scope, receive, send)
            return
        try:
            page = await self._page(scope, receive)
        except Exception as error:  # answered as the framework would
            await failure_response(Request(scope), error)(scope, receive, send)
            return
        scope["route"] = page.route
        for message in page.messages:
            await send({**message})

    async def _page(self, scope: Scope, receive: Receive) -> _Page:
        key, asked_s = (scope["path"], scope["query_string"]), self._monotonic()
        network, _ = place_of(_host_of(scope))
        async with self._quotas.pages.turn(network):
            if self._begun_since(asked_s, key) is None:
                await asyncio.sleep(self._quotas.page_seconds.debt_s(""))
            return self._begun_since(asked_s, key) or await self._build(key, scope, receive)

    def _begun_since(self, asked_s: float, key: _PageKey) -> _Page | None:
        page = self._kept.get(key)
        return page if page is not None and page.began_s >= asked_s else None

    async def _build(self, key: _PageKey, scope: Scope, receive: Receive) -> _Page:
        began_s, messages = self._monotonic(), list[Message]()

        async def collect(message: Message) -> None:
            messages.append(message)

        building = _Timed(self._app(scope, receive, collect), self._monotonic)
        try:
            await building
        finally:
            self._quotas.page_seconds.charge("", building.seconds)
        page = _Page(scope.get("route"), tuple(messages), began_s)
        if messages[0]["status"] == 200:
            self._kept.pop(key, None)
            self._kept[key] = page
            if len(self._kept) > KEPT_PAGES:
                del self._kept[next(iter(self._kept))]
        return page


def _is_page(scope: Scope) -> bool:
    """Tell whether a request is for the dashboard: not for programs, a file, or events."""
    if scope["type"] != "http" or scope["method"] != "GET":
        return False
    path = scope["path"]
    return path not in _NO_PAGES and not path.startswith(("/v1/", "/static/"))


def _host_of(scope: Scope) -> str:
    return machine_of((scope.get("client") or ("local", 0))[0])


MAX_HEADER_BYTES = 16 * 1024
"""Largest sum of a request's path, query, and header names and values."""

_SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
)


def _head_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope["raw_path"]) + len(scope["query_string"])


class RequestGuard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, quotas: Quotas) -> None:
        self._app = app
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, unless its sender is over quota; charge its cost."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status, size = 500, 0

        async def send_safely(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_SAFE_HEADERS]
            else:
                size += len(message.get("body", b""))
            await send(message)

        async def receive_counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            return message

        host = _host_of(scope)
        refusal = self._refusal(scope, host)
        try:
            if refusal is None:
                await self._app(scope, receive_counted, send_safely)
            else:
                await refusal(scope, receive, send_safely)
        finally:
            if refusal is None:
                self._charge(scope, host, size)
            # The route's template, never the path: a path would let peers invent label values.
            _count(getattr(scope.get("route"), "path", "none"), status, started)

    def _refusal(self, scope: Scope, host: str) -> Response | None:
        wait_s = self._quotas.host_requests.wait_s(host) or self._quotas.host_bytes.debt_s(host)
        if wait_s:
            return refusal_response(TooMany(wait_s))
        if _head_bytes(scope) > MAX_HEADER_BYTES:
            return error_response(431, "headers_too_large", "the headers are too large")
        query = scope["query_string"].decode(errors="replace")
        if message_fault(scope["path"]) or message_fault(unquote_plus(query)):
            return error_response(400, "malformed_request", "the address holds a control character")
        return None

    def _charge(self, scope: Scope, host: str, size: int) -> None:
        self._quotas.host_bytes.charge(host, size)
        signer = scope.get(SIGNER_KEY)
        if signer is not None:
            self._quotas.signer_bytes.charge(signer, size)


def _count(route: str, status: int, started: float) -> None:
    requests, seconds = _figures(route, status)
    requests.inc()
    seconds.observe(time.perf_counter() - started)


@lru_cache(maxsize=1024)
def _figures(route: str, status: int) -> tuple[Counter, Histogram]:
    """Return counter and histogram of one kind of request; cached, because each look-up takes a
    lock."""
    labels = {"route": route, "status": str(status)}
    return REQUESTS.labels(**labels), REQUEST_SECONDS.labels(route=route)
