"""Batches and the outcomes that validators hand in for them."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response

from muster.api.answers import BatchContents, CommittedBatches, OutcomesTaken
from muster.api.limits import MAX_RECORDS_BYTES
from muster.api.requests import OutcomesBody
from muster.orchestrator.api.deps import ServicesDep, signed_json, verify
from muster.orchestrator.metrics import OUTCOMES
from muster.orchestrator.services.refusals import unknown_batch

router = APIRouter(prefix="/v1/batches")

MAX_LISTED = 1000
"""Batch ids in one answer; the next ones are asked for with `after`."""


@router.get("")
async def committed(
    request: Request,
    services: ServicesDep,
    state: Literal["committed"],
    after: Annotated[int, Query(ge=0)] = 0,
) -> CommittedBatches:
    """Return the ids above `after` of batches whose outcomes are due, ascending, and beside each
    how many validators are called for it.
    """
    assert state
    headers = verify(request, services)
    services.identities.require_validator(headers.address)
    await services.nonces.use(headers)
    due = await services.outcomes.calls(after=after, limit=MAX_LISTED)
    return CommittedBatches(
        batches=[batch_id for batch_id, _ in due], called=[len(calls.called) for _, calls in due]
    )


@router.get("/{batch_id}", response_model=BatchContents)
async def batch(batch_id: int, services: ServicesDep) -> Response:
    """Return a batch's submissions in batch order."""
    found = services.projection.batch(batch_id)
    contents = found and await services.batching.contents(found)
    if not contents:
        raise unknown_batch(batch_id, read_to=services.projection.view.block_number)
    return Response(contents.model_dump_json(), media_type="application/json")


@router.post("/{batch_id}/outcomes", status_code=202)
async def post_outcomes(batch_id: int, request: Request, services: ServicesDep) -> OutcomesTaken:
    """Take a validator's signed outcomes; the same ones again are harmless."""
    headers, body = await signed_json(request, services, OutcomesBody, max_bytes=MAX_RECORDS_BYTES)
    services.identities.require_validator(headers.address)
    await services.nonces.use(headers)
    await services.outcomes.receive(headers.address, batch_id, body.records, body.signature)
    OUTCOMES.inc()
    return OutcomesTaken(batch_id=batch_id)
