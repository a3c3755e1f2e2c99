"""What nodes ask all the time, answered around the framework.

Matching routes, resolving dependencies, exit stacks and telemetry take longer than a heartbeat. The
routes stand in the application too: for its document, and for whatever is not exactly one of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from muster.orchestrator.api import heartbeats, leases, submissions
from muster.orchestrator.api.errors import failure_response
from muster.orchestrator.services.context import Services

Endpoint = Callable[[Request, Services], Awaitable[Response]]

_MOST_DIGITS = 10
"""A number in a path that has more is left to the framework to refuse."""


@dataclass(frozen=True, slots=True)
class _Line:
    path: str
    """The route's template, which metrics are labelled with."""
    endpoint: Endpoint


_BY_PATH = {
    ("POST", "/v1/heartbeat"): _Line("/v1/heartbeat", heartbeats.heartbeat),
    ("POST", "/v1/leases"): _Line("/v1/leases", leases.lease),
}
_UPLOADS = "/v1/submissions/"
_UPLOAD = "/v1/submissions/{run_id}/{step}/{index}"


class Express:
    """An ASGI application in front of another."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that is of these, and hand on every other."""
        line = _line_of(scope)
        if line is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = line
        request = Request(scope, receive)
        try:
            response = await line.endpoint(request, self._services)
        except Exception as error:  # answered as the framework would
            response = failure_response(request, error)
        await response(scope, receive, send)


def _line_of(scope: Scope) -> _Line | None:
    if scope["type"] != "http":
        return None
    method, path = scope["method"], scope["path"]
    line = _BY_PATH.get((method, path))
    if line is None and method == "PUT" and path.startswith(_UPLOADS):
        return _upload_line(path.removeprefix(_UPLOADS).split("/"))
    return line


def _upload_line(slot: list[str]) -> _Line | None:
    if len(slot) != 3 or not all(_is_number(part) for part in slot):
        return None
    run_id, step, index = map(int, slot)

    def endpoint(request: Request, services: Services) -> Awaitable[Response]:
        return submissions.upload(run_id, step, index, request, services)

    return _Line(_UPLOAD, endpoint)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
