"""The run's status for programs: JSON, and server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from muster.api.status import RunStatus
from muster.orchestrator.api.deps import ServicesDep, host_of
from muster.orchestrator.services.feed import StatusFeed
from muster.orchestrator.services.status import to_json

router = APIRouter()


@router.get("/v1/status", response_model=RunStatus)
async def status(services: ServicesDep) -> Response:
    """Return the run, its workers and its latest submissions."""
    return Response(to_json(await services.status.latest()), media_type="application/json")


@router.get("/v1/events")
async def events(request: Request, services: ServicesDep) -> StreamingResponse:
    """Stream the status whenever it changes; goes on after `Last-Event-ID`."""
    host = host_of(request)
    services.feed.require_room(host)
    first = to_json(await services.status.latest())
    return StreamingResponse(
        _stream(services.feed, first, request.headers.get("last-event-id"), host),
        media_type="text/event-stream",
        headers={"cache-control": "no-store"},
    )


async def _stream(
    feed: StatusFeed, first: str, last_seen: str | None, host: str
) -> AsyncIterator[str]:
    async for notice in feed.listen(first, last_seen, host):
        if notice is None:
            yield ": alive\n\n"
        else:
            yield f"id: {notice.event_id}\nevent: status\ndata: {notice.status}\n\n"
