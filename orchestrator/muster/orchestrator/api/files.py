"""Submission files, for those who judge and those who train."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse

from muster.orchestrator.api.deps import ServicesDep, verify
from muster.orchestrator.services.refusals import refuse
from muster.protocol.ids import to_hash32

router = APIRouter(prefix="/v1/files")


@router.get("/{file_hash}")
async def file(file_hash: str, request: Request, services: ServicesDep) -> FileResponse:
    """Return a submission's file."""
    headers = verify(request, services)
    services.identities.require_reader(headers.address)
    await services.nonces.use(headers)
    path = services.files.path(to_hash32(file_hash))
    if path is None:
        raise refuse("file_unknown", "no file with this hash is held")
    return FileResponse(path, media_type="application/vnd.apache.parquet")
