"""The web application: wiring only."""

from __future__ import annotations

from fastapi import FastAPI

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
from muster.orchestrator.api.guard import Guard
from muster.orchestrator.api.openapi import document_routes
from muster.orchestrator.services.context import Services

ROUTERS = (
    # Matched in this order: what nodes ask most often comes first.
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


def create_app(services: Services) -> FastAPI:
    """Return the application over loaded services."""
    app = FastAPI(
        title="Muster orchestrator",
        description="Requests and answers are specified in docs/protocol.md section 11.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.services = services
    app.state.dashboard = pages.Dashboard(services)
    add_error_handlers(app)
    app.add_exception_handler(pages.NotAnswered, pages.show_problem)
    for router in ROUTERS:
        app.include_router(router)
    document_routes(app)
    app.add_middleware(Guard, quotas=services.quotas)
    return app
