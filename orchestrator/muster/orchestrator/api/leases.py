"""Leases."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from muster.api.answers import Lease
from muster.api.client import REASON_HEADER
from muster.api.requests import LeaseBody
from muster.orchestrator.api.deps import ServicesDep, require_run, signed_json
from muster.orchestrator.metrics import LEASES
from muster.orchestrator.services.leases import SignedTicket

router = APIRouter(prefix="/v1")

PAUSED = "paused"
"""The reason of an orchestrator whose owner lets it give no tickets."""


@router.post("/leases", response_model=Lease, responses={204: {"description": "No work now."}})
async def lease(request: Request, services: ServicesDep) -> Response:
    """Return the node's open ticket, or the next one; if there is work but none for it, why."""
    headers, body = await signed_json(request, services, LeaseBody)
    require_run(services, body.run_id)
    worker = services.identities.active_worker(headers.address)
    await services.nonces.use(headers)
    signed = PAUSED if services.switches.leases_are_paused else await services.leases.lease(worker)
    if not isinstance(signed, SignedTicket):
        LEASES.labels(answer="none" if signed is None else str(signed)).inc()
        headers_out = {"retry-after": f"{services.settings.retry_after_s:g}"}
        if signed is not None:
            headers_out[REASON_HEADER] = str(signed)
        return Response(status_code=204, headers=headers_out)
    LEASES.labels(answer="ticket").inc()
    services.wakes.status.set()
    answer = Lease(ticket=signed.ticket, signature=signed.signature)
    return Response(answer.model_dump_json(), media_type="application/json")
