"""The run's status: JSON, server-sent events, and the page."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from muster.orchestrator.api.deps import ServicesDep
from muster.orchestrator.dashboard.page import CONTENT_SECURITY_POLICY, render
from muster.orchestrator.services.feed import StatusFeed
from muster.orchestrator.services.status import to_json

router = APIRouter()


@router.get("/v1/status")
async def status(services: ServicesDep) -> Response:
    """Return what the dashboard shows."""
    return Response(to_json(await services.status.latest()), media_type="application/json")


@router.get("/v1/events")
async def events(services: ServicesDep) -> StreamingResponse:
    """Stream the status whenever it changes."""
    services.feed.require_room()
    first = to_json(await services.status.latest())
    return StreamingResponse(
        _stream(services.feed, first),
        media_type="text/event-stream",
        headers={"cache-control": "no-store"},
    )


@router.get("/", include_in_schema=False)
async def dashboard(services: ServicesDep) -> HTMLResponse:
    """Return the page."""
    page = render(await services.status.latest(), now=services.clock())
    return HTMLResponse(
        page,
        headers={"content-security-policy": CONTENT_SECURITY_POLICY, "cache-control": "no-store"},
    )


async def _stream(feed: StatusFeed, first: str) -> AsyncIterator[str]:
    async for text in feed.listen(first):
        yield ": alive\n\n" if text is None else f"event: status\ndata: {text}\n\n"
