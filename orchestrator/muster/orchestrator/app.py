"""The web application: wiring only."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from muster.orchestrator.api import (
    batches,
    checking,
    files,
    health,
    heartbeats,
    leases,
    metrics,
    pages,
    runs,
    status,
    submissions,
)
from muster.orchestrator.api.errors import add_error_handlers
from muster.orchestrator.api.express import Express
from muster.orchestrator.api.guard import Guard
from muster.orchestrator.api.openapi import document_routes
from muster.orchestrator.services.context import Services

ROUTERS = (
    heartbeats.router,
    leases.router,
    health.router,
    runs.router,
    submissions.router,
    batches.router,
    checking.router,
    files.router,
    metrics.router,
    status.router,
    pages.router,
)


_ABOUT: dict[str, Any] = {
    "title": "Muster orchestrator",
    "description": "Requests and answers are specified in docs/protocol.md section 11.",
}

_ENDLESS = frozenset({"/live", "/v1/events"})
"""Streams: their heads are answered with their bodies only."""


class Application(FastAPI):
    """The routes, behind the guard and beside the express."""

    def __init__(self, services: Services) -> None:
        super().__init__(**_ABOUT, docs_url=None, redoc_url=None)
        self.state.services = services
        self.state.dashboard = pages.Dashboard(services)
        self._entrance = Guard(Express(super().__call__, services), quotas=services.quotas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; one for the head alone as one for the whole, less its body."""
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
    app.add_exception_handler(pages.NotAnswered, pages.show_problem)
    app.add_exception_handler(HTTPException, pages.show_missing)
    _route(app)
    return app


def openapi_document() -> dict[str, Any]:
    """Return the OpenAPI document of every orchestrator; nothing needs to be loaded for it."""
    app = FastAPI(**_ABOUT)
    _route(app)
    return app.openapi()


def _route(app: FastAPI) -> None:
    for router in ROUTERS:
        app.include_router(router)
    document_routes(app)
