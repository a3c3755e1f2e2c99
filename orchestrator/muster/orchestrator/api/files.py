"""Submission files, for those who judge and those who train, and what proves a submission."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, RedirectResponse

from muster.api.answers import BatchEntry
from muster.orchestrator.api.deps import ServicesDep, verify
from muster.orchestrator.services.refusals import refuse
from muster.protocol.ids import to_hash32

router = APIRouter(prefix="/v1")


@router.get("/files/{file_hash}", response_model=None)
async def file(
    file_hash: str, request: Request, services: ServicesDep
) -> FileResponse | RedirectResponse:
    """Return a submission's file, or where it may be fetched for some minutes."""
    headers = verify(request, services)
    services.identities.require_reader(headers.address)
    await services.nonces.use(headers)
    place = await services.files.find(to_hash32(file_hash))
    if place is None:
        raise refuse("file_unknown", "no file with this hash is held")
    if isinstance(place, str):
        return RedirectResponse(place, headers={"cache-control": "no-store"})
    return FileResponse(place, media_type="application/vnd.apache.parquet")


@router.get("/work/{leaf}", response_model=BatchEntry)
async def work(leaf: str, services: ServicesDep) -> Response:
    """Return a submission with its ticket and both signatures, by its leaf."""
    entry = await services.batching.work(to_hash32(leaf))
    if entry is None:
        raise refuse("submission_unknown", "no submission with this leaf was received")
    return Response(entry.model_dump_json(), media_type="application/json")
