"""Routes for validators, jurors and the trainer: batches, outcomes, proofs of checking, files."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, RedirectResponse

from muster.api.answers import (
    BatchChecking,
    BatchContents,
    BatchEntry,
    CommittedBatches,
    OutcomesTaken,
    WatchedValidators,
)
from muster.api.routes import (
    MAX_FINGERPRINTS_BODY_BYTES,
    MAX_RECORDS_BYTES,
    CheckingBody,
    FingerprintsBody,
    OutcomesBody,
    ReportBody,
)
from muster.orchestrator.http.errors import refuse, unknown_batch
from muster.orchestrator.http.requests import ServicesDep, host_of, seat_json, verify
from muster.orchestrator.metrics import OUTCOMES
from muster.protocol.checking import CheckReport
from muster.protocol.ids import to_hash32

router = APIRouter(prefix="/v1")

MAX_LISTED = 1000
"""Most batch ids in one answer; `after` gets the next ones."""


@router.get("/batches")
async def committed(
    request: Request,
    services: ServicesDep,
    state: Literal["committed"],
    after: Annotated[int, Query(ge=0)] = 0,
) -> CommittedBatches:
    """Return the ids above `after` of batches whose outcomes are due, ascending, each with the
    number of validators called for it.
    """
    assert state
    headers, _ = verify(request, services, services.identities.require_validator)
    await services.nonces.keep(headers)
    due = await services.outcomes.calls(after=after, limit=MAX_LISTED)
    return CommittedBatches(
        batches=[batch_id for batch_id, _ in due], called=[len(calls.called) for _, calls in due]
    )


@router.get("/batches/{batch_id}", response_model=BatchContents)
async def batch(batch_id: int, request: Request, services: ServicesDep) -> Response:
    """Return a batch's submissions in batch order."""
    found = services.projection.batch(batch_id)
    async with services.quotas.batch_reads.turn(host_of(request)):
        contents = found and await services.batching.contents(found)
    if not contents:
        raise unknown_batch(batch_id, read_to=services.projection.view.block_number)
    return Response(contents.model_dump_json(), media_type="application/json")


@router.post("/batches/{batch_id}/outcomes", status_code=202)
async def post_outcomes(batch_id: int, request: Request, services: ServicesDep) -> OutcomesTaken:
    """Receive a validator's signed outcomes; repeating them is harmless."""
    role = services.identities.require_validator
    headers, body = await seat_json(
        request, services, role, OutcomesBody, max_bytes=MAX_RECORDS_BYTES
    )
    await services.nonces.keep(headers)
    await services.outcomes.receive(headers.address, batch_id, body.records, body.signature)
    OUTCOMES.inc()
    return OutcomesTaken(batch_id=batch_id)


@router.get("/checking")
async def summary(services: ServicesDep) -> WatchedValidators:
    """Return the recent results of every validator's proofs of checking."""
    return WatchedValidators(validators=await services.checking.summary())


@router.get("/batches/{batch_id}/checking", response_model=BatchChecking)
async def checking(batch_id: int, request: Request, services: ServicesDep) -> Response:
    """Return a batch's commitments, fingerprints and reports."""
    async with services.quotas.batch_reads.turn(host_of(request)):
        found = await services.checking.of_batch(batch_id)
    return Response(found.model_dump_json(), media_type="application/json")


@router.post("/batches/{batch_id}/checking", status_code=202)
async def commit(batch_id: int, request: Request, services: ServicesDep) -> OutcomesTaken:
    """Receive a validator's commitment, before the outcomes are on chain."""
    role = services.identities.require_validator
    headers, body = await seat_json(request, services, role, CheckingBody)
    await services.nonces.keep(headers)
    hashes = (body.records_hash, body.fingerprints_hash)
    await services.checking.commit(headers.address, batch_id, hashes, body.signature)
    return OutcomesTaken(batch_id=batch_id)


@router.post("/batches/{batch_id}/fingerprints", status_code=202)
async def reveal(batch_id: int, request: Request, services: ServicesDep) -> OutcomesTaken:
    """Receive the fingerprints of a validator's commitment, once the outcomes are on chain."""
    role = services.identities.require_validator
    headers, body = await seat_json(
        request, services, role, FingerprintsBody, max_bytes=MAX_FINGERPRINTS_BODY_BYTES
    )
    await services.nonces.keep(headers)
    await services.checking.reveal(headers.address, batch_id, body.fingerprints)
    return OutcomesTaken(batch_id=batch_id)


@router.post("/batches/{batch_id}/reports", status_code=202)
async def report(batch_id: int, request: Request, services: ServicesDep) -> OutcomesTaken:
    """Receive a validator's report on another's fingerprints."""
    role = services.identities.require_validator
    headers, body = await seat_json(request, services, role, ReportBody)
    await services.nonces.keep(headers)
    said = CheckReport(
        batch_id=batch_id,
        batch_root=body.batch_root,
        validator=body.validator,
        fingerprints_hash=body.fingerprints_hash,
        compared=body.compared,
        failed=body.failed,
    )
    await services.checking.report(headers.address, said, body.signature)
    return OutcomesTaken(batch_id=batch_id)


@router.get("/files/{file_hash}", response_model=None)
async def file(
    file_hash: str, request: Request, services: ServicesDep
) -> FileResponse | RedirectResponse:
    """Return a submission's file, or redirect to a URL that works for some minutes."""
    headers, _ = verify(request, services, services.identities.require_reader)
    await services.nonces.keep(headers)
    place = await services.files.find(to_hash32(file_hash))
    if place is None:
        raise refuse("file_unknown", "this orchestrator has no file with this hash")
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
