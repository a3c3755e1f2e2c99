"""Heartbeats of nodes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from muster.api.answers import HeartbeatAnswer
from muster.api.requests import HeartbeatBody
from muster.orchestrator.api.deps import ServicesDep, require_run, signed_json
from muster.orchestrator.metrics import HEARTBEATS
from muster.protocol.ids import PolicyVersion

router = APIRouter(prefix="/v1")


@router.post("/heartbeat", response_model=HeartbeatAnswer)
async def heartbeat(request: Request, services: ServicesDep) -> Response:
    """Note a sign of life."""
    headers, body = await signed_json(request, services, HeartbeatBody)
    require_run(services, body.run_id)
    worker = services.identities.active_worker(headers.address)
    version = None if body.policy_version is None else PolicyVersion(body.policy_version)
    writes = [services.heartbeats.beat(headers.address, version, body.state, body.software)]
    if body.hardware is not None:
        said = (body.hardware.report, body.hardware.signature)
        writes.append(services.hardware.note(headers.address, *said))
    await services.nonces.use(headers, *writes)
    HEARTBEATS.inc()
    answer = HeartbeatAnswer(
        status=worker.status.lower(),
        policy_version=services.projection.run.latest_version,
        wants_hardware=services.hardware.wants(headers.address),
    )
    return Response(answer.model_dump_json(), media_type="application/json")
