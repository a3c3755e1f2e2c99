"""Leases."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from muster.api.answers import Lease
from muster.orchestrator.api.deps import Body, ServicesDep, require_run, signed_json
from muster.orchestrator.metrics import LEASES

router = APIRouter(prefix="/v1")


class LeaseBody(Body):
    """Which run's work is asked for."""

    run_id: int
    """The run."""


@router.post("/leases", response_model=Lease, responses={204: {"description": "No work now."}})
async def lease(request: Request, services: ServicesDep) -> Response:
    """Return the node's open ticket, or the next one."""
    headers, body = await signed_json(request, services, LeaseBody)
    require_run(services, body.run_id)
    worker = services.identities.active_worker(headers.address)
    await services.nonces.use(headers)
    signed = await services.leases.lease(worker)
    LEASES.labels(answer="none" if signed is None else "ticket").inc()
    if signed is None:
        retry_after = f"{services.settings.retry_after_s:g}"
        return Response(status_code=204, headers={"retry-after": retry_after})
    services.wakes.status.set()
    answer = Lease(ticket=signed.ticket, signature=signed.signature)
    return Response(answer.model_dump_json(), media_type="application/json")
