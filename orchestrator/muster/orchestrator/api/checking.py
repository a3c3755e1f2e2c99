"""Proofs of checking: what validators commit to, show, and say about each other's."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from muster.api.answers import BatchChecking, OutcomesTaken
from muster.api.limits import MAX_FINGERPRINTS_BODY_BYTES
from muster.api.requests import CheckingBody, FingerprintsBody, ReportBody
from muster.api.status import WatchedValidators
from muster.orchestrator.api.deps import ServicesDep, signed_json
from muster.protocol.checking import CheckReport

router = APIRouter(prefix="/v1")


@router.get("/checking")
async def summary(services: ServicesDep) -> WatchedValidators:
    """Return how every validator's proofs of checking came out lately."""
    return WatchedValidators(validators=await services.checking.summary())


@router.get("/batches/{batch_id}/checking", response_model=BatchChecking)
async def checking(batch_id: int, services: ServicesDep) -> Response:
    """Return a batch's commitments, fingerprints and reports."""
    found = await services.checking.of_batch(batch_id)
    return Response(found.model_dump_json(), media_type="application/json")


@router.post("/batches/{batch_id}/checking", status_code=202)
async def commit(batch_id: int, request: Request, services: ServicesDep) -> OutcomesTaken:
    """Take a validator's commitment, before the outcomes are on chain."""
    headers, body = await signed_json(request, services, CheckingBody)
    services.identities.require_validator(headers.address)
    await services.nonces.use(headers)
    hashes = (body.records_hash, body.fingerprints_hash)
    await services.checking.commit(headers.address, batch_id, hashes, body.signature)
    return OutcomesTaken(batch_id=batch_id)


@router.post("/batches/{batch_id}/fingerprints", status_code=202)
async def reveal(batch_id: int, request: Request, services: ServicesDep) -> OutcomesTaken:
    """Take the fingerprints that a validator committed to, once the outcomes are on chain."""
    headers, body = await signed_json(
        request, services, FingerprintsBody, max_bytes=MAX_FINGERPRINTS_BODY_BYTES
    )
    services.identities.require_validator(headers.address)
    await services.nonces.use(headers)
    await services.checking.reveal(headers.address, batch_id, body.fingerprints)
    return OutcomesTaken(batch_id=batch_id)


@router.post("/batches/{batch_id}/reports", status_code=202)
async def report(batch_id: int, request: Request, services: ServicesDep) -> OutcomesTaken:
    """Take what a validator found about another's fingerprints."""
    headers, body = await signed_json(request, services, ReportBody)
    services.identities.require_validator(headers.address)
    await services.nonces.use(headers)
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
